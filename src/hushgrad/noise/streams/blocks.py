"""Streams that compute several rows at once, chunk by chunk in the cache, and hand them out one by one.

Noise does not depend on the data, so rows can be drawn ahead of their step. Reading the history once for K rows instead of
once for each divides the memory traffic (or the number of regenerated draws) by K.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar, final

import numpy as np

from hushgrad.noise import _kernel
from hushgrad.noise._threads import CHUNK
from hushgrad.noise.source import Source
from hushgrad.noise.streams.ordered import ChunkedStream, Lane

__all__ = ["BlockStream"]


Plan = TypeVar("Plan")


class BlockStream(ChunkedStream, Generic[Plan]):
    """Rows in blocks of ``block`` steps; finished rows wait in the state's ring ``rows``, row t in slot t mod ``slots``."""

    def __init__(self, source: Source, *, steps: int, block: int, slots: int) -> None:
        super().__init__(source, steps=steps)
        self._block, self._slots = block, slots
        self._chunk = max(CHUNK // 4, min(CHUNK, 4 * CHUNK // block))  # a block of rows fits the second-level cache
        self._planned: tuple[int, Plan] | None = None  # of the latest block: every chunk of every tensor needs it again

    @abstractmethod
    def _plan(self, first: int, last: int) -> Plan:
        """What the rows [first, last) need that does not depend on the elements."""

    @abstractmethod
    def _rows(self, lane: Lane, plan: Plan, first: int, last: int, low: int, high: int) -> np.ndarray:
        """The rows [first, last) for the lane's elements [low, high); earlier rows may still be read from the ring."""

    @final
    def _sizes(self) -> Mapping[str, int]:
        return {"rows": self._slots}

    @final
    def _advance(self, lane: Lane, low: int, high: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        step = lane.next
        ring = lane.rows("rows")[:, low:high]
        if step % self._block == 0:
            last = min(step + self._block, self._end())
            rows = self._rows(lane, self._plan_of(step, last), step, last, low, high)
            for t in range(step, last) if self._slots else ():
                ring[t % self._slots] = rows[t - step]
            current = rows[0]
        else:
            current = ring[step % self._slots]
        _kernel.KERNEL.emit(current, scale, out, fresh)

    def _plan_of(self, first: int, last: int) -> Plan:
        planned = self._planned
        if planned is None or planned[0] != first:
            planned = self._planned = (first, self._plan(first, last))
        return planned[1]

    def _end(self) -> int:
        assert self._steps is not None
        return self._steps

    def _draws(self, lane: Lane, steps: range, low: int, high: int) -> np.ndarray:
        """The draws of several steps for the lane's elements [low, high), one row for each step."""
        draws = np.empty((len(steps), high - low), lane.rows("rows").dtype)
        for row, step in zip(draws, steps, strict=True):
            self._source.fill(step, lane.index, lane.offset + low, row)
        return draws

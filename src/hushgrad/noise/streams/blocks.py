"""Base of streams that compute several rows at once, chunk by chunk in the cache, and hand them out one by one.

Noise does not depend on the data, so rows can be drawn ahead of their step. Reading the history once for K rows instead of
once for each divides the memory traffic (or the number of regenerated draws) by K.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar, final

import numpy as np

from hushgrad.noise import _kernel
from hushgrad.noise.source import Source
from hushgrad.noise.streams.base import ChunkedStream
from hushgrad.noise.streams.shard_state import Lane

Plan = TypeVar("Plan")


class Emit(NamedTuple):
    """Where a row goes: ``out = scale * row`` if fresh, else ``out += scale * row``."""

    out: np.ndarray
    scale: float
    fresh: bool


class BlockStream(ChunkedStream, Generic[Plan]):
    """Computes rows in blocks of ``block`` steps; the ring buffer ``rows`` in the state holds row t in slot t mod ``slots``."""

    def __init__(self, source: Source, *, steps: int, block: int, slots: int) -> None:
        super().__init__(source, steps=steps)
        self._block, self._slots = block, slots
        self._planned: tuple[int, Plan] | None = None  # for the latest block; every chunk of every tensor uses it

    @abstractmethod
    def _plan(self, first: int, last: int) -> Plan:
        """The coefficients of the rows [first, last), which do not depend on the elements."""

    @abstractmethod
    def _begin(self, lane: Lane, plan: Plan, block: range, low: int, high: int, emit: Emit) -> None:
        """Compute the rows of ``block`` for the lane's elements [low, high), put them into the ring and emit the first."""

    @final
    def _sizes(self) -> Mapping[str, int]:
        return {"rows": self._slots}

    @final
    def _advance(self, lane: Lane, low: int, high: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        step = lane.next
        if step % self._block == 0:
            block = range(step, min(step + self._block, self._end()))
            self._begin(lane, self._plan_of(block), block, low, high, Emit(out, scale, fresh))
        else:
            _kernel.KERNEL.emit(lane.rows("rows")[step % self._slots, low:high], scale, out, fresh)

    def _plan_of(self, block: range) -> Plan:
        planned = self._planned
        if planned is None or planned[0] != block.start:
            planned = self._planned = (block.start, self._plan(block.start, block.stop))
        return planned[1]

    def _end(self) -> int:
        assert self._steps is not None
        return self._steps

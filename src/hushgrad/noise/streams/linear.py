"""Streams whose rows are linear combinations of the z: nothing need be kept, since past z can be regenerated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from hushgrad import _check
from hushgrad.noise import _kernel
from hushgrad.noise._threads import SHARE
from hushgrad.noise.device_noise import MOST_THERE, Turn
from hushgrad.noise.lower_toeplitz import MEMORY
from hushgrad.noise.source import Source
from hushgrad.noise.streams.blocks import BlockStream, Emit
from hushgrad.noise.streams.shard_state import Lane


class _LinearStream(BlockStream[tuple[int, np.ndarray]]):
    """Row t = sum_s w_t[s] z_s, from regenerated z. ``memory`` numbers per parameter buy ``memory`` rows for one regeneration."""

    _chunk = SHARE  # rows that are not kept are computed in the cache

    def __init__(self, source: Source, *, steps: int, memory: int, longest: int) -> None:
        memory = _check.integer(0, memory=memory)
        # Rows computed together share their draws; more rows than the history is long would share nothing.
        block = max(1, min(memory, longest - 1))
        super().__init__(source, steps=steps, block=block, slots=block if block > 1 else 0)

    @abstractmethod
    def _weights(self, t: int) -> tuple[int, np.ndarray]:
        """(first step, weights of z from that step to t)."""

    @final
    def _plan(self, first: int, last: int) -> tuple[int, np.ndarray]:
        """(oldest step, weights of z from that step on for each row of the block)."""
        weights = [self._weights(t) for t in range(first, last)]
        oldest = min(start for start, _ in weights)
        table = np.zeros((last - first, last - oldest))
        for k, (start, w) in enumerate(weights):
            table[k, start - oldest : start - oldest + len(w)] = w
        return oldest, table

    @final
    def _begin(self, lane: Lane, plan: tuple[int, np.ndarray], block: range, low: int, high: int, emit: Emit) -> None:
        oldest, table = plan
        # Blocks are as long as the ring, so their rows lie in its first slots, and nothing older is needed.
        rows = lane.rows("rows")[: len(block), low:high] if self._slots else np.empty((1, high - low), emit.out.dtype)
        rows[:] = 0
        self._source.combine(oldest, lane.index, lane.offset + low, table, rows)
        _kernel.KERNEL.emit(rows[0], emit.scale, emit.out, emit.fresh)


@final
class FilterStream(_LinearStream):
    """Row t = sum_j coefficients[j] z_{t-j}: Toeplitz noise given by C⁻¹ (banded inverse, nu-DP-FTRL, anti-PGD).

    ``memory`` = numbers per parameter the stream may keep (8 by default). With m of them, m rows are computed together and
    a row costs 1 + (bands - 1)/m draws; with 0 nothing is kept and a row costs as many draws as there are coefficients.
    """

    def __init__(self, source: Source, coefficients: Sequence[float], *, steps: int, memory: int = MEMORY) -> None:
        steps = _check.positive_int(steps=steps)
        beta = np.array([_check.number(coefficient=c) for c in coefficients])[:steps]
        if len(beta) == 0:
            _check.fail("coefficients", coefficients, "to have at least one entry")
        super().__init__(source, steps=steps, memory=memory, longest=len(beta))
        self._beta = beta

    def _kept_there(self) -> int:
        return len(self._beta) - 1

    def _turn(self, step: int) -> Turn | None:
        kept = self._kept_there()
        if kept > MOST_THERE:
            return None
        past = [(c, (step - j) % kept) for j, c in reversed(list(enumerate(self._beta[: step + 1]))) if j and c != 0]
        weights, rows = tuple(c for c, _ in past), tuple(row for _, row in past)
        own, keep = float(self._beta[0]), step % kept if kept else -1
        return Turn(step, weights=weights, rows=rows, last=True, own=own, keep=keep, keeps_z=True)

    def _weights(self, t: int) -> tuple[int, np.ndarray]:
        used = self._beta[: t + 1]
        return t + 1 - len(used), used[::-1]


@final
class DenseStream(_LinearStream):
    """Row t = sum_{s<=t} row(t)[s] z_s, where ``row(t)`` gives C⁻¹[t, :t+1].

    ``memory`` = numbers per parameter the stream may keep (8 by default). With m of them, m rows are computed together and
    row t costs about 1 + t/m draws; with 0 it costs t + 1 draws.
    """

    def __init__(self, source: Source, row: Callable[[int], Sequence[float]], *, steps: int, memory: int = MEMORY) -> None:
        steps = _check.positive_int(steps=steps)
        super().__init__(source, steps=steps, memory=memory, longest=steps)
        self._row = row

    def _weights(self, t: int) -> tuple[int, np.ndarray]:
        weights = np.asarray(self._row(t), dtype=np.float64)
        if weights.shape != (t + 1,) or not np.all(np.isfinite(weights)):
            _check.fail(f"row({t})", weights.shape, f"to be {t + 1} finite numbers")
        leading = int(np.argmax(weights != 0))
        return leading, weights[leading:]

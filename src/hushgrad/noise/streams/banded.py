"""Streams that solve C X = Z: banded C, from the last few rows, and buffered Toeplitz C, from a few decaying buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np

from hushgrad import _check
from hushgrad.noise import _kernel
from hushgrad.noise.device_noise import MOST_THERE, Turn
from hushgrad.noise.source import Source
from hushgrad.noise.streams.base import ChunkedStream
from hushgrad.noise.streams.blocks import BlockStream, Emit
from hushgrad.noise.streams.shard_state import Lane

_AHEAD = 16  # rows solved in one pass over the history


class _Plan(NamedTuple):
    """Minus the band's entries for a block of rows: those left of the block, those inside it, and the diagonal itself."""

    history: np.ndarray
    block: np.ndarray
    diagonal: np.ndarray


@final
class BandedStream(BlockStream[_Plan]):
    """Solves C X = Z for lower-triangular banded C: x_t = (z_t - sum_{j>=1} C[t, t-j] x_{t-j}) / C[t, t].

    ``band(t)`` gives [C[t,t], C[t,t-1], ...], the same number of entries for every row but the first ones, where entries left
    of the matrix are ignored. State: bands - 1 numbers per parameter, in a ring; up to 16 rows are solved in one pass over it.

    Reference: Choquette-Choo et al. (2023), arXiv:2306.08153, Algorithm 1 (banded matrix mechanism).
    """

    _chunk = None

    def __init__(self, source: Source, band: Callable[[int], Sequence[float]], *, steps: int) -> None:
        steps = _check.positive_int(steps=steps)
        history = max(len(band(t)) for t in {0, steps // 2, steps - 1}) - 1
        super().__init__(source, steps=steps, block=max(1, min(_AHEAD, history)), slots=history)
        self._band = band

    def _coefficients(self, t: int) -> np.ndarray:
        """C[t, t], C[t, t-1], ... down to column 0 or the end of the band."""
        band = np.asarray(self._band(t), dtype=np.float64)[: t + 1]
        if len(band) == 0 or len(band) > self._slots + 1 or not np.all(np.isfinite(band)) or band[0] == 0:
            _check.fail(f"band({t})", band.tolist(), f"to be at most {self._slots + 1} finite numbers, the first not 0")
        return band

    def _plan(self, first: int, last: int) -> _Plan:
        oldest = max(0, first - self._slots)
        table, diagonal = np.zeros((last - first, last - oldest)), np.ones(last - first)
        for t in range(first, last):
            band = self._coefficients(t)
            diagonal[t - first] = band[0]
            table[t - first, t + 1 - len(band) - oldest : t - oldest] = -band[:0:-1]
        return _Plan(table[:, : first - oldest], table[:, first - oldest :], diagonal)

    def _turn(self, step: int) -> Turn | None:
        band, slots = self._coefficients(step), self._slots
        if slots > MOST_THERE:
            return None
        past = [(-c, (step - j) % slots) for j, c in reversed(list(enumerate(band))) if j and c != 0]
        weights, rows = tuple(c for c, _ in past), tuple(row for _, row in past)
        return Turn(step, weights=weights, rows=rows, divisor=float(band[0]), keep=step % slots if slots else -1)

    def _begin(self, lane: Lane, plan: _Plan, block: range, low: int, high: int, emit: Emit) -> None:
        ring = lane.rows("rows")[:, low:high]
        history = [ring[s % self._slots] for s in range(max(0, block.start - self._slots), block.start)]
        kept = [ring[t % self._slots] for t in block] if self._slots else [np.empty_like(emit.out)]
        rows = _kernel.SolvedRows(plan.history, history, plan.block, plan.diagonal, kept, emit.scale)
        self._source.solve(block.start, lane.index, lane.offset + low, rows, emit.out, emit.fresh)


@final
class BufferStream(ChunkedStream):
    """Solves C X = Z for the buffered linear Toeplitz C with c_0 = 1 and c_t = sum_j weight_j decay_j^(t-1).

    Row t: x_t = z_t - sum_j weight_j s_j, then s_j = decay_j s_j + x_t. ``decay`` and ``weight`` are those of C, not of its
    inverse. State: one number per buffer and parameter.

    Reference: Dvijotham, McMahan, Pillutla, Steinke and Thakurta (2024), arXiv:2404.16706, Algorithm 1.
    """

    _chunk = None

    def __init__(self, source: Source, decay: Sequence[float], weight: Sequence[float], *, steps: int | None = None) -> None:
        super().__init__(source, steps=steps)
        self._decay = np.array([_check.between(0, 1, closed="left", decay=d) for d in decay])
        self._weight = np.array([_check.number(weight=w) for w in weight])
        if len(self._decay) == 0:
            _check.fail("decay", list(decay), "to have at least one entry", "Without buffers use independent noise.")
        if len(self._decay) != len(self._weight):
            _check.fail("weight", list(weight), f"to have one entry for each of the {len(self._decay)} decays")

    def _sizes(self) -> Mapping[str, int]:
        return {"buffers": len(self._decay)}

    def _turn(self, step: int) -> Turn:
        return Turn(step, weights=tuple(-self._weight), rows=tuple(range(len(self._weight))), decay=tuple(self._decay))

    def _advance(self, lane: Lane, low: int, high: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        decay, weight = self._decay.astype(out.dtype), self._weight.astype(out.dtype)
        row = _kernel.BufferedRow(lane.rows("buffers")[:, low:high], decay, weight, scale)
        self._source.buffer(lane.next, lane.index, lane.offset + low, row, out, fresh)

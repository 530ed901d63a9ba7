"""Banded C: each row of noise is solved from the last few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from hushgrad import _check
from hushgrad.noise import _kernel
from hushgrad.noise.source import Source
from hushgrad.noise.streams.blocks import BlockStream
from hushgrad.noise.streams.ordered import Lane

__all__ = ["BandedStream"]

_AHEAD = 16  # rows solved in one pass over the history


@final
class BandedStream(BlockStream):
    """Solves C X = Z for lower-triangular banded C: x_t = (z_t - sum_{j>=1} C[t, t-j] x_{t-j}) / C[t, t].

    ``band(t)`` gives [C[t,t], C[t,t-1], ...], the same number of entries for every row but the first ones, where entries left
    of the matrix are ignored. State: bands - 1 numbers per parameter, in a ring; up to 16 rows are solved in one pass over it.

    Reference: Choquette-Choo et al. (2023), arXiv:2306.08153, Algorithm 1 (banded matrix mechanism).
    """

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

    def _rows(self, lane: Lane, first: int, last: int, low: int, high: int) -> np.ndarray:
        x = self._draws(lane, range(first, last), low, high)
        ring = lane.rows("rows")[:, low:high]
        bands = [self._coefficients(t) for t in range(first, last)]
        oldest = max(0, first - self._slots)
        weights = np.zeros((last - first, first - oldest), x.dtype)
        for k, band in enumerate(bands):
            for j in range(k + 1, len(band)):
                weights[k, first + k - j - oldest] = -band[j]
        _kernel.KERNEL.combine(weights, [ring[s % self._slots] for s in range(oldest, first)], x)
        for k, band in enumerate(bands):
            inner = -band[min(k, len(band) - 1) : 0 : -1]  # oldest row of this block first
            _kernel.KERNEL.combine(inner[None].astype(x.dtype), list(x[k - len(inner) : k]), x[k : k + 1])
            x[k] /= x.dtype.type(band[0])
        return x

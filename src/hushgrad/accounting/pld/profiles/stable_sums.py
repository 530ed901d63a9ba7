"""Sums over losses that neither overflow nor lose digits, used by the profiles and the grids."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_BLOCK = 30.0
_BLOCKS = 1000


def masses_of_q(losses: Array, p: Array) -> Array:
    """Q's masses e^{-L} p at rising losses, without overflow where P has almost nothing."""
    if len(losses) == 0 or losses[0] > -600.0:
        return np.asarray(p * np.exp(-losses))
    return np.where(p > 0, np.exp(np.minimum(np.log(np.maximum(p, 1e-323)) - losses, 1.0)), 0.0)


def discounted(p: Array, losses: Array) -> Array:
    """sum_{k >= j} p_k e^{l_j - l_k}, in blocks from the top that each pass their sum on: no factor is too large for a double."""
    if len(p) and losses[-1] - losses[0] > _BLOCKS * _BLOCK:
        return _doubled(p, losses)
    out, stop, passed = np.empty_like(p), len(p), 0.0
    while stop > 0:
        start = int(np.searchsorted(losses[:stop], losses[stop - 1] - _BLOCK))
        factor = np.exp(losses[start:stop] - losses[start])
        sums = np.cumsum((p[start:stop] / factor)[::-1])[::-1]
        out[start:stop] = factor * (sums + passed / factor[-1])
        stop, passed = start, float(out[start]) * math.exp(losses[start - 1] - losses[start]) if start else 0.0
    return out


def _doubled(p: Array, losses: Array) -> Array:
    """``discounted`` for widely spread losses: sums of one term, two, four, ... until the rest is negligible."""
    out: Array = np.array(p, dtype=np.float64)
    reach = 1
    while reach < len(p) and float(np.min(losses[reach:] - losses[:-reach])) < 750.0:
        out[:-reach] += np.exp(losses[:-reach] - losses[reach:]) * out[reach:]
        reach *= 2
    return out

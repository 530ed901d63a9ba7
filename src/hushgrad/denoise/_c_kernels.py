"""The denoisers' C kernels, where they were built: one pass over memory instead of several. Each has a form in torch too."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad import native
from hushgrad.native._abi import Signal

_SHARE = 1 << 19  # elements for a thread at a time; for less, a thread does not pay


class Moments(NamedTuple):
    """How Adam's moments move and what becomes of them: see :class:`hushgrad.denoise.DebiasedSecondMoment`."""

    fresh1: float
    fresh2: float
    noise: float
    floor: float
    factor: float


class Fused:
    """One pass over memory for each."""

    def __init__(self, exact: native.Library, contracted: native.Library) -> None:
        self._direction, self._smooth = exact.direction, contracted.smooth

    def smooth(self, v: Tensor, out: Tensor, *, alpha: float, scale: float, reach: int, before: float, after: float) -> None:
        """``out[i] = scale (v[i] + α Σ_{j<i} α^(i-1-j) v[j] + α Σ_{j>i} α^(j-i-1) v[j])``, with ghost cells at both ends."""
        d = v.numel()
        signal = Signal(v.data_ptr(), d, reach, alpha, scale, before, after)
        _over_shares(d, lambda low, high: self._smooth(signal, low, high, out.data_ptr()))

    def direction(self, g: Tensor, mean: Tensor, square: Tensor, out: Tensor, moments: Moments) -> None:
        """``mean += fresh1 (g - mean)``, ``square += fresh2 (g² - square)``, ``out = factor mean / sqrt(max(square - noise, floor))``."""
        places = [t.data_ptr() for t in (g, mean, square, out)]
        size = g.element_size()
        _over_shares(
            g.numel(), lambda low, high: self._direction(*(place + size * low for place in places), high - low, *moments)
        )


def _over_shares(count: int, work: Callable[[int, int], None]) -> None:
    """``work(low, high)`` on parts of ``range(count)``, the same parts for any number of threads, so that the bits are too."""
    shares = [(low, min(low + _SHARE, count)) for low in range(0, count, _SHARE)]
    native.in_turns(shares, lambda share: work(*share), min(torch.get_num_threads(), len(shares)))


def fits(*tensors: Tensor) -> bool:
    """Whether the C library can work on these."""
    return all(t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)


FUSED = Fused(native.EXACT, native.CONTRACTED) if native.EXACT is not None and native.CONTRACTED is not None else None

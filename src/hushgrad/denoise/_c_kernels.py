"""The denoisers' C kernels, if they were built: one pass over memory instead of several. Each has an equivalent in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad import native
from hushgrad.native._abi import Signal

_SHARE = 1 << 19  # elements for a thread at a time; a smaller share is not worth a thread


class Moments(NamedTuple):
    """The coefficients of :meth:`Fused.direction`; see :class:`hushgrad.denoise.DebiasedSecondMoment`."""

    fresh1: float
    fresh2: float
    noise: float
    floor: float
    factor: float


class Fused:
    """The C kernels, each of which makes one pass over memory."""

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
    """Call ``work(low, high)`` on parts of ``range(count)``, which do not depend on the number of threads, nor do the bits."""
    shares = [(low, min(low + _SHARE, count)) for low in range(0, count, _SHARE)]
    native.in_turns(shares, lambda share: work(*share), min(torch.get_num_threads(), len(shares)))


def fits(*tensors: Tensor) -> bool:
    """Whether the C kernels support these tensors: contiguous float32 in main memory."""
    return all(t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)


FUSED = Fused(native.EXACT, native.CONTRACTED) if native.EXACT is not None and native.CONTRACTED is not None else None

"""Memory for long rows: aligned to cache lines and, where the system offers them, on huge pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LINE = 64  # bytes of a cache line: a vector load across two lines is slower
_LARGE = 1 << 22  # bytes from which on numpy asks Linux for huge pages
_NUMPY: dict[torch.dtype, type] = {torch.float32: np.float32, torch.float64: np.float64}


def aligned(size: int, *, zero: bool = False) -> np.ndarray:
    """``size`` bytes that begin at a cache line."""
    room = (np.zeros if zero else np.empty)(size + LINE, np.uint8)
    return room[-room.ctypes.data % LINE :][:size]


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new uninitialised float32 or float64 tensor in main memory."""
    return _tensor(shape, dtype, zero=False)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new float32 or float64 tensor in main memory, all 0."""
    return _tensor(shape, dtype, zero=True)


def _tensor(shape: Sequence[int], dtype: torch.dtype, zero: bool) -> Tensor:
    # torch allocates on small pages: each costs a page fault at its first touch, and several long rows together exceed the processor's
    # address cache (TLB).
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return (torch.zeros if zero else torch.empty)(tuple(shape), dtype=dtype)
    return torch.from_numpy(aligned(size, zero=zero).view(_NUMPY[dtype]).reshape(tuple(shape)))

"""The arithmetic of noise on cache-sized blocks: in C if the library was built, else in numpy, with the same bits.

Every operation is one IEEE rounding, in a fixed order. Set HUSHGRAD_KERNEL=numpy to disable the C library.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np

from hushgrad import native
from hushgrad.noise import _box_muller
from hushgrad.noise._aes_ctr import KeyStream
from hushgrad.noise._kernel.base import (
    ARITHMETIC,
    DOUBLE,
    LIMIT,
    SINGLE,
    BufferedRow,
    Kernel,
    NumpyKernel,
    Piece,
    Rounding,
    SolvedRows,
    TableRows,
)
from hushgrad.noise._kernel.c_kernel import CKernel

__all__ = [
    "ARITHMETIC", "DOUBLE", "KERNEL", "LIMIT", "SINGLE",
    "BufferedRow", "CKernel", "Kernel", "NumpyKernel", "Piece", "Rounding", "SolvedRows", "TableRows",
]  # fmt: skip


def _agrees(kernel: Kernel) -> bool:
    """Whether a kernel reproduces numpy's bits on 2048 numbers, which a compiler that reorders arithmetic would break.

    A kernel with its own cipher is also tested at an address that fills all three fields of the counter.
    """
    stream, at = KeyStream(bytes(range(32)), b"hushgrad check"), ((1 << 48) - 2, (1 << 32) - 3, (1 << 40) + 5)
    words = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 32, 8 * 3 * _box_muller.PAIRS, dtype=np.uint32)
    for dtype in (np.float32, np.float64):
        ours, theirs = np.empty((2, 8 * _box_muller.GROUP), dtype)
        NumpyKernel().gaussians(words, ours)
        kernel.gaussians(words, theirs)
        same = ours.tobytes() == theirs.tobytes()
        NumpyKernel().draw(stream, *at, 0.3, ours, fresh=False)
        kernel.draw(stream, *at, 0.3, theirs, fresh=False)
        if not same or ours.tobytes() != theirs.tobytes():
            return False
    return True


def _choose() -> Kernel:
    if native.EXACT is None or sys.byteorder != "little":
        return NumpyKernel()
    kernel = CKernel(native.EXACT)
    if not _agrees(kernel):
        warnings.warn("The C noise kernel was compiled with other arithmetic and is not used; numpy is slower.", stacklevel=2)
        return NumpyKernel()
    return kernel


KERNEL = _choose()

"""The noise of scattered rows of a large table, drawn in one call."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from hushgrad import _aligned_memory, _check
from hushgrad.errors import ArgumentError
from hushgrad.noise import _kernel
from hushgrad.noise._aes_ctr import check_address
from hushgrad.noise._box_muller import GROUP, GROUP_BYTES
from hushgrad.noise._threads import SHARE, over_chunks
from hushgrad.noise.source import Source

_BLOCKS = GROUP_BYTES // 16  # of the cipher, for one group of numbers


def rows_of(source: Source, step: int, index: int, rows: Tensor, width: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """``z(step, index)`` of some rows of a table that is ``width`` wide: (len(rows), width), in main memory.

    Row k is, bit for bit, ``source.z(step, index, like_one_row, offset=rows[k] * width)``. Neighbours in ``rows`` that are
    neighbours in the table form one run, and each thread draws its runs in one call of the C kernel. Without it numpy
    draws them, with the same bits.

        >>> source, table = Source(seed=1), torch.empty(10, 4)
        >>> torch.equal(rows_of(source, 3, 0, torch.tensor([7, 2, 3]), 4), source.z(3, 0, table)[[7, 2, 3]])
        True
    """
    if source.secure:
        raise ArgumentError("Expected a source with secure=False: secure noise is added to a sum, never drawn by itself.")
    if dtype not in (torch.float32, torch.float64):
        _check.fail("dtype", dtype, "to be torch.float32 or torch.float64")
    numbers = rows.detach().cpu().to(torch.int64).numpy()
    out = _aligned_memory.empty((len(numbers), _check.positive_int(width=width)), dtype)
    if len(numbers):
        _check.integer(0, row=int(numbers.min()))
        check_address(step, index, -(-(int(numbers.max()) + 1) * width // GROUP) * _BLOCKS)
        share = max(1, SHARE // width) * width
        over_chunks(out.numel(), partial(_draw, source, step, index, numbers, out.numpy()), share)
    return out


def _draw(source: Source, step: int, index: int, rows: np.ndarray, out: np.ndarray, low: int, high: int) -> None:
    """The numbers [low, high) of ``out``, which are whole rows, on one thread."""
    width = out.shape[1]
    rows, out = rows[low // width : high // width], out[low // width : high // width]
    first = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1])  # of each run
    count = np.diff(np.append(first, len(rows)))
    kernel = _kernel.KERNEL
    head = kernel.head(source._stream, step) if isinstance(kernel, _kernel.CKernel) else None
    if not isinstance(kernel, _kernel.CKernel) or head is None:
        _gather(source, step, index, rows, out)
        return
    table = np.empty((1 + len(first), 4), np.uint64)
    table[0], places = head, table[1:]
    places[:, 0], places[:, 1], places[:, 2] = index, rows[first] * width, count * width
    places[:, 3] = out.ctypes.data + first * out.strides[0]
    kernel.draw_table(table.ctypes.data, len(places), out.itemsize, 1.0, fresh=True)


def _gather(source: Source, step: int, index: int, rows: np.ndarray, out: np.ndarray) -> None:
    """Without the C kernel's cipher: draw each group of numbers that the rows touch once, and copy the rows from these."""
    start = rows * out.shape[1]
    first, last = start // GROUP, (start + out.shape[1] - 1) // GROUP
    groups = np.unique(np.concatenate([np.minimum(first + k, last) for k in range(int((last - first).max()) + 1)]))
    z = np.empty(len(groups) * GROUP, out.dtype)
    _kernel.KERNEL.gaussians(source._stream.scattered(step, index, groups, _BLOCKS), z)
    place = np.searchsorted(groups, first) * GROUP + start % GROUP  # a row's groups are adjacent here, too
    np.take(z, place[:, None] + np.arange(out.shape[1]), out=out)

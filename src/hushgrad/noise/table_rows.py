"""The noise of scattered rows of a large table, drawn and added to them in one call."""

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

    Row k is, bit for bit, ``source.z(step, index, like_one_row, offset=rows[k] * width)``.

        >>> source, table = Source(seed=1), torch.empty(10, 4)
        >>> torch.equal(rows_of(source, 3, 0, torch.tensor([7, 2, 3]), 4), source.z(3, 0, table)[[7, 2, 3]])
        True
    """
    if dtype not in (torch.float32, torch.float64):
        _check.fail("dtype", dtype, "to be torch.float32 or torch.float64")
    out = _aligned_memory.zeros((len(rows), _check.positive_int(width=width)), dtype)
    add_rows(source, step, index, rows, torch.ones(len(rows), dtype=dtype), out, torch.arange(len(rows)))
    return out


def add_rows(
    source: Source, step: int, index: int, rows: Tensor, scales: Tensor, table: Tensor, places: Tensor | None = None
) -> None:
    """``table[places[k]] += scales[k] z``, with z the noise of row ``rows[k]`` of a table as wide as this one.

    Neighbours in ``rows`` that are neighbours in the table are drawn together. Without the C kernel numpy draws them, with the same bits.

    Args:
        source: of the noise.
        step: which row of the noise.
        index: which tensor of the model.
        rows: numbers of rows of that tensor.
        scales: what each is multiplied by, in the table's precision.
        table: a contiguous matrix of float32 or float64 in main memory, added to in place.
        places: different rows of ``table``; ``rows`` by default.
    """
    if source.secure:
        raise ArgumentError("Expected a source with secure=False: secure noise is added to a sum, never drawn by itself.")
    numbers = np.ascontiguousarray(rows.detach().cpu().numpy(), np.int64)
    to = numbers if places is None else np.ascontiguousarray(places.detach().cpu().numpy(), np.int64)
    out, width = table.detach().numpy(), table.shape[1]
    if not len(numbers):
        return
    _check.integer(0, row=int(numbers.min()))
    check_address(step, index, -(-(int(numbers.max()) + 1) * width // GROUP) * _BLOCKS)
    if int(to.min()) < 0 or int(to.max()) >= len(out):
        _check.fail("places", (int(to.min()), int(to.max())), f"to be rows of a table of {len(out)}")
    given = _kernel.TableRows(numbers, to, np.ascontiguousarray(scales.detach().numpy(), out.dtype))
    over_chunks(len(numbers) * width, partial(_add, source, step, index, given, out), max(1, SHARE // width) * width)


def _add(source: Source, step: int, index: int, given: _kernel.TableRows, out: np.ndarray, low: int, high: int) -> None:
    """The numbers [low, high) of all these rows, which are whole rows, on one thread."""
    width, kernel = out.shape[1], _kernel.KERNEL
    some = given.part(low // width, high // width)
    if isinstance(kernel, _kernel.CKernel) and kernel.draw_rows(source._stream, step, index, some, out):
        return
    z = np.empty((len(some.rows), width), out.dtype)
    _gather(source, step, index, some.rows, z)
    out[some.places] += z * some.scales[:, None]


def _gather(source: Source, step: int, index: int, rows: np.ndarray, out: np.ndarray) -> None:
    """Without the C kernel's cipher: draw each group of numbers that the rows touch once, and copy the rows from these."""
    start = rows * out.shape[1]
    first, last = start // GROUP, (start + out.shape[1] - 1) // GROUP
    groups = np.unique(np.concatenate([np.minimum(first + k, last) for k in range(int((last - first).max()) + 1)]))
    z = np.empty(len(groups) * GROUP, out.dtype)
    _kernel.KERNEL.gaussians(source._stream.scattered(step, index, groups, _BLOCKS), z)
    place = np.searchsorted(groups, first) * GROUP + start % GROUP  # a row's groups are adjacent here, too
    np.take(z, place[:, None] + np.arange(out.shape[1]), out=out)

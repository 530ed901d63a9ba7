"""Matrix products of weights' gradients, and the scattered rows of tables, by the C kernels; see :mod:`hushgrad.clipping._fused`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hushgrad import native
from hushgrad.clipping import _fused

# From vectors of so many bytes on our products take at most the time of a library's: half of it with MKL on processors of other makers,
# where that keeps to narrower ones. With narrower ones both are alike, but for lengths at which lines of the cache collide.
_WIDE = 64
_WIDEST = 0 if native.CONTRACTED is None else native.CONTRACTED.vectors(_WIDE)
_LINE = 16  # floats of a line of the cache, which two threads should not write to
_COLUMNS = 24  # of a product for a thread, at least


def add_product(left: Tensor, right: Tensor, out: Tensor, *, fresh: bool = False) -> bool:
    """``out += left @ right`` for left (p, K), the transpose of a matrix, and right (K, d); whether that could be done here.

    Each element is summed in one order, whatever the number of threads. ``fresh``: ``out`` is written, whatever it holds.
    """
    (p, K), d = left.shape, right.shape[1]
    if not _is_wide() or not _fused._fit(left.t(), right, out) or (len(right), out.shape) != (K, (p, d)):
        return False
    library: Any = _fused._LIBRARY
    x, g, to = right.data_ptr(), left.data_ptr(), out.data_ptr()

    def work(some: range) -> None:
        library.products(x, d, g + 4 * some.start, p, K, len(some), to + 4 * d * some.start, not fresh)

    _fused._shared(p, max(_COLUMNS, _fused._SHARE // max(1, K * d)), work)
    return True


def outer_gradients(x: Tensor, g: Tensor, among: int, each: int) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """``sum_t g[i,t] x[i,t]^T`` for x (B, T, d) and g (B, T, p), in blocks of ``each`` examples; and their squared norms.

    ``among``: a public number of examples. With more threads than that, which here work on whole examples, a library is faster.
    """
    threads, x, g = torch.get_num_threads(), x.contiguous(), g.contiguous()
    if not _is_wide() or threads > among or not len(x) or not _fused._fit(x, g):
        return None
    (B, T, d), p = x.shape, g.shape[2]
    library: Any = _fused._LIBRARY
    parts = tuple(x.new_empty(min(each, B - low), p, d) for low in range(0, B, each))
    norms = torch.empty(B, dtype=torch.float64)
    from_x, from_g, to = x.data_ptr(), g.data_ptr(), norms.data_ptr()
    many = max(1, _fused._SHARE // max(1, T * d * p)) if threads > 1 else each
    jobs = [(k, low, min(many, len(part) - low)) for k, part in enumerate(parts) for low in range(0, len(part), many)]

    def work(job: tuple[int, int, int]) -> None:
        k, low, some = job
        i = k * each + low
        place = parts[k].data_ptr() + 4 * p * d * low
        library.outer_gradients(from_x + 4 * T * d * i, d, from_g + 4 * T * p * i, p, T, some, place, to + 8 * i)

    native.in_turns(jobs, work, min(threads, len(jobs)))
    return parts, norms


def offset_gradients(g: Tensor, x: Tensor, starts: Sequence[int], depth: int, out: Tensor) -> bool:
    """``out[k, i] = g[i, :, :depth] @ x[i, starts[k]:][:depth]`` for all k and i; whether that could be done here.

    Args:
        g: (B, p, positions).
        x: (B, pixels, d).
        starts: of the run of pixels under each offset; ``starts[k] + depth`` is at most ``pixels``.
        depth: how many positions.
        out: (len(starts), B, p, d).
    """
    (B, p, positions), (pixels, d) = g.shape, x.shape[1:]
    if not _is_wide() or not _fused._fit(g, x, out) or (len(x), out.shape) != (B, (len(starts), B, p, d)):
        return False
    library: Any = _fused._LIBRARY
    at = array("Q", starts)
    assert depth <= positions and max(starts) + depth <= pixels
    sizes = p, positions, depth, at.buffer_info()[0], len(starts)
    from_g, from_x, to = g.data_ptr(), x.data_ptr(), out.data_ptr()

    def work(some: range) -> None:
        i = 4 * some.start
        library.offset_gradients(
            from_x + i * pixels * d, d, pixels, from_g + i * p * positions, *sizes, len(some), B * p * d, to + i * p * d
        )

    _fused._shared(B, max(1, _fused._SHARE // max(1, len(starts) * depth * p * d)), work)
    return True


def row_norms(ids: Tensor, example: Tensor, values: Tensor, examples: int) -> tuple[Tensor, Tensor, int] | None:
    """The squared norm and the mass of each example's part of a table, and the most of its rows with one id: row k goes to ``ids[k]``."""
    count, width = values.shape
    if _fused._LIBRARY is None or not _fused._fit(values) or not _indices(ids, example) or count >= 1 << 31:
        return None
    library = _fused._LIBRARY
    norms, masses = torch.zeros(examples, dtype=torch.float64), torch.zeros(examples, dtype=torch.float64)
    at = ids.data_ptr(), example.data_ptr(), values.data_ptr(), width
    most = []

    def work(some: range) -> None:
        size = 1 << len(some).bit_length()
        slots, chain = torch.zeros(2 * size, dtype=torch.int32), torch.empty(2, len(some), dtype=torch.int32)
        room, to = torch.empty(width, dtype=torch.float64), (norms.data_ptr(), masses.data_ptr())
        given = slots.data_ptr(), 2 * size, chain[0].data_ptr(), chain[1].data_ptr(), room.data_ptr()
        most.append(library.row_norms(*at, some.start, len(some), *given, *to))

    _examples_shared(example, max(1, _fused._SHARE // max(1, width)), work)
    return norms, masses.sqrt_(), max(most, default=0)


def add_rows(ids: Tensor, values: Tensor, weights: Tensor, out: Tensor) -> bool:
    """``out[ids[k]] += weights[k] values[k]``, in the order of k; whether that could be done here. Threads share the columns."""
    if native.EXACT is None or not _indices(ids) or not _fused._fit(values, weights, out) or values.dim() != 2:
        return False
    library, (count, width), rows = native.EXACT, values.shape, len(out)
    if out.shape != (rows, width) or not len(ids) == len(weights) == count:
        return False
    at, to = (ids.data_ptr(), values.data_ptr(), weights.data_ptr(), count, width), (out.data_ptr(), rows)
    done = []
    each = max(_LINE, _fused._SHARE // max(1, count) // _LINE * _LINE)
    _fused._shared(width, each, lambda some: done.append(library.add_rows(*at, some.start, len(some), *to)))
    return all(done)


def _examples_shared(example: Tensor, each: int, work: Callable[[range], None]) -> None:
    """Run ``work`` on ranges of rows, split among threads between examples, where those are in order."""
    count, cuts = len(example), [0]
    if torch.get_num_threads() > 1 and count > each and bool((example[1:] >= example[:-1]).all()):
        wanted = example[each::each].unique_consecutive()
        cuts += torch.searchsorted(example, wanted).unique_consecutive().tolist()
    shares = [range(low, high) for low, high in pairwise([*cuts, count]) if low < high]
    native.in_turns(shares, work, min(torch.get_num_threads(), len(shares)))


def _indices(*tensors: Tensor) -> bool:
    return all(t.dtype is torch.int64 and t.is_cpu and t.is_contiguous() for t in tensors)


def _is_wide() -> bool:
    """Whether our products are faster than a library's."""
    return _fused._LIBRARY is not None and _WIDEST >= _WIDE

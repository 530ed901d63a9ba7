"""The C kernels for clipping: many small calls in one, and the per-example gradients of small convolutions.

Every function has an equivalent in torch, equal up to rounding, and returns None (or False) if the C library cannot be used: it was
not built, or the tensors are not contiguous float32 in main memory. The kernels that every step of a small model calls are used directly
in :mod:`hushgrad.clipping.record` and :mod:`hushgrad.clipping.rules.linear`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hushgrad import native
from hushgrad.native import _abi

if TYPE_CHECKING:
    from hushgrad.clipping.rules.kernels import Geometry

_PATCHES_AT_MOST = 1 << 18  # floats of one example's patches: 1 MB, so that they stay in the second-level cache
_SHARE = 1 << 22  # multiply-adds for a thread at a time; for less, a thread does not pay
_LIBRARY = native.CONTRACTED


def sq_norms(rows: Tensor) -> Tensor | None:
    """The squared norm of each row of a matrix, in double precision throughout."""
    if _LIBRARY is None or not _fit(rows):
        return None
    library, (count, length) = _LIBRARY, rows.shape
    out = torch.empty(count, dtype=torch.float64)
    at, to = rows.data_ptr(), out.data_ptr()
    each = max(1, _SHARE // max(1, length))
    _shared(count, each, lambda some: library.sq_norms(at + 4 * length * some.start, len(some), length, to + 8 * some.start))
    return out


def gram(x: Tensor) -> Tensor | None:
    """x_i x_i^T of each matrix in x (B, T, d), of any strides: (B, T, T) in double precision, from products that are exact."""
    if _LIBRARY is None or x.dtype is not torch.float32 or not x.is_cpu:
        return None
    library, (B, T, d), (stride, down, along) = _LIBRARY, x.shape, x.stride()
    out = torch.empty(B, T, T, dtype=torch.float64)
    at, to = x.data_ptr(), out.data_ptr()

    def work(some: range) -> None:
        room, i = _room(T), some.start
        library.gram(at + 4 * stride * i, len(some), stride, T, d, down, along, room.data_ptr(), to + 8 * T * T * i)

    _shared(B, max(1, _SHARE // max(1, T * T * d)), work)
    return out


def group_norms(left: Tensor, right: Tensor, rows: Tensor, starts: Tensor, wild: float) -> tuple[Tensor, Tensor] | None:
    """``‖sum_r left_r right_r^T‖²`` and ``sum_r ‖left_r‖ ‖right_r‖`` of each group of rows, in double precision.

    Args:
        left: (any, m).
        right: (any, n).
        rows: of all groups, one group after the other.
        starts: where in ``rows`` each group begins, and the last one ends.
        wild: a squared norm of a row above which the second is infinite.
    """
    if _LIBRARY is None or not _fit(left, right) or not rows.is_contiguous() or not starts.is_contiguous():
        return None
    library, groups, m, n = _LIBRARY, len(starts) - 1, left.shape[1], right.shape[1]
    norms, masses = torch.empty(groups, dtype=torch.float64), torch.empty(groups, dtype=torch.float64)
    at = left.data_ptr(), m, right.data_ptr(), n, rows.data_ptr()
    first, *to = starts.data_ptr(), norms.data_ptr(), masses.data_ptr()

    def work(some: range) -> None:
        here = 8 * some.start
        library.group_norms(*at, first + here, len(some), wild, to[0] + here, to[1] + here)

    _shared(groups, max(1, _SHARE * groups // max(1, len(rows) ** 2 // max(1, groups) * (m + n))), work)
    return norms, masses


def add_wide_sums(x: Tensor, g: Tensor, weights: Tensor, out: Tensor, *, fresh: bool = False) -> bool:
    """``out += sum_i w_i g_i x_i^T`` in double precision, for x (K, d), g (K, p) in single; whether that could be done here.

    Args:
        x: inputs.
        g: gradients of outputs.
        weights: in double precision.
        out: in double precision; or in single, for few rows: then the complete sum is added to it and rounded, once.
        fresh: ``out`` is written, whatever it holds.
    """
    rounds = out.dtype is torch.float32
    if _LIBRARY is None or not _fit(x, g) or not _double([weights]) or not (_fit(out) if rounds else _double([out])):
        return False
    library, (K, d), p = _LIBRARY, x.shape, g.shape[1]
    if K > _abi.PANEL_DEPTH if rounds else fresh and not K:
        return False
    at = x.data_ptr(), d, g.data_ptr(), p, weights.data_ptr(), K
    to = (None, out.data_ptr(), 0) if rounds else (out.data_ptr(), None, not fresh)

    def work(some: range) -> None:
        room = _room(d)
        library.wide_sums(*at, some.start, len(some), room.data_ptr(), *to)

    _shared(p, max(72, _SHARE // max(1, K * d)), work)
    return True


def wide_kept(G: Tensor, weights: Tensor) -> Tensor | None:
    """``sum_i w_i G_i`` in double precision, of a matrix in single."""
    if _LIBRARY is None or not _fit(G) or not _double([weights]):
        return None
    library, (B, n) = _LIBRARY, G.shape
    out = torch.zeros(n, dtype=torch.float64)
    at, by, to = G.data_ptr(), weights.data_ptr(), out.data_ptr()
    _shared(n, max(1024, _SHARE // max(1, B)), lambda some: library.wide_kept(at, n, by, B, some.start, len(some), to))
    return out


def add_pieces(parts: Sequence[Tensor], weights: Tensor, out: Tensor) -> bool:
    """``out += sum_i w_i G_i`` of examples that lie in several blocks, one after the other; whether that could be done here.

    A product for each block would read and write ``out`` as often as there are blocks.
    """
    if native.EXACT is None or not _fit(weights, out, *parts):
        return False
    combine, n, to, by = native.EXACT.combine_f32, out.numel(), out.data_ptr(), weights.data_ptr()
    places = [part.data_ptr() + 4 * n * i for part in parts for i in range(len(part))]

    def work(some: range) -> None:
        at = array("Q", [place + 4 * some.start for place in places])
        combine(by, 1, at.buffer_info()[0], len(at), to + 4 * some.start, n, len(some))

    _shared(n, max(1024, _SHARE // max(1, len(places))), work)
    return True


def _room(columns: int) -> Tensor:
    """Scratch memory for a product in double precision: panels of rows, and of columns rounded up to whole panels."""
    whole = -(-columns // _abi.PANEL_COLUMNS) * _abi.PANEL_COLUMNS
    return torch.empty(_abi.PANEL_DEPTH, _abi.PANEL_ROWS + whole, dtype=torch.float64)


def _shared(count: int, each: int, work: Callable[[range], None]) -> None:
    """Run ``work`` on range(count), split among threads in blocks of ``each``."""
    threads = min(torch.get_num_threads(), -(-count // each)) if count else 1
    shares = [range(low, min(low + each, count)) for low in range(0, count, each)] if threads > 1 else [range(count)]
    native.in_turns(shares, work, threads)


def total(parts: Sequence[Tensor], factor: float) -> tuple[Tensor, Tensor, bool] | None:
    """``factor`` times the sum of the parts (squared norms), its square root, and whether all of it is finite."""
    if _LIBRARY is None or not _double(parts):
        return None
    rows = parts[0].numel()
    squares, norms = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
    places = array("Q", map(Tensor.data_ptr, parts))
    at = places.buffer_info()[0], len(parts), rows, factor, squares.data_ptr(), norms.data_ptr()
    return squares, norms, bool(_LIBRARY.total(*at))


def kernel_gradients(x: Tensor, g: Tensor, edges: Sequence[int], geometry: Geometry) -> tuple[Tensor, Tensor] | None:
    """A convolution's gradient for each example, (B, C_out, C_in / groups, *kernel), and its squared norm.

    ``edges`` is the zero padding as ``F.pad`` wants it; one and two dimensions.
    """
    if _LIBRARY is None or not _fit(x, g) or x.dim() > 4 or g.numel() == 0:
        return None
    shape = _shape(x.shape, g.shape, tuple(edges), geometry)
    patches = shape.out_h * shape.out_w * shape.row
    if patches > _PATCHES_AT_MOST:
        return None
    library, count = _LIBRARY, x.shape[0] * geometry.groups
    G = g.new_empty(x.shape[0], g.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    norms = torch.empty(count, dtype=torch.float64)
    scratch = patches + shape.channels * shape.padded_h * shape.padded_w
    strides = [4 * t.numel() // count for t in (x, g, G)]
    at_x, at_g, at_G, at_norms = (t.data_ptr() for t in (x, g, G, norms))

    def work(some: range) -> None:
        room, i = torch.empty(scratch, dtype=torch.float32), some.start
        library.kernel_gradients(
            shape,
            at_x + i * strides[0],
            at_g + i * strides[1],
            len(some),
            room.data_ptr(),
            at_G + i * strides[2],
            at_norms + 8 * i,
        )

    _shared(count, max(1, _SHARE // (patches * shape.out_channels)), work)
    return G, norms if geometry.groups == 1 else norms.view(-1, geometry.groups).sum(1)


@lru_cache(maxsize=1024)
def _shape(x: torch.Size, g: torch.Size, edges: tuple[int, ...], geometry: Geometry) -> _abi.Geometry:
    """In two dimensions; one dimension is an image of one line."""
    (height, width), (out_h, out_w) = _pair(x[2:]), _pair(g[2:])
    kernel_h, kernel_w = _pair(geometry.kernel)
    left, right, above, below = (*edges, 0, 0)[:4]
    channels = x[1] // geometry.groups
    taps = channels * kernel_h * kernel_w
    sizes = channels, height, width, above, left, height + above + below, width + left + right
    moves = kernel_h, kernel_w, *_pair(geometry.stride), *_pair(geometry.dilation)
    row = -(-taps // _abi.PATCH_ROW) * _abi.PATCH_ROW
    return _abi.Geometry(*sizes, *moves, g[1] // geometry.groups, out_h, out_w, taps, row)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _fit(*tensors: Tensor) -> bool:
    for t in tensors:  # noqa: SIM110 (a generator takes as long as the questions)
        if t.dtype is not torch.float32 or not t.is_cpu or not t.is_contiguous():
            return False
    return True


def _double(parts: Sequence[Tensor]) -> bool:
    for t in parts:  # noqa: SIM110
        if t.dtype is not torch.float64 or not t.is_cpu or not t.is_contiguous():
            return False
    return True

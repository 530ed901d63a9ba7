"""The C library of this room, where it was built: many small calls in one, and the kernels' gradients of small convolutions.

Everything has its form in torch beside it, equal to rounding. Each function answers None where the library cannot serve: it was
not built, the tensors are not contiguous float32 in main memory, or they are so large that torch's threads are worth more.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hushgrad import _native

if TYPE_CHECKING:
    from hushgrad.clipping.rules.conv import Geometry

__all__ = ["add_wide_sums", "clip", "gram", "kernel_gradients", "outer_sq_norms", "outer_sums", "sq_norms", "total", "wide_kept"]

_AT_MOST = 1 << 20  # elements; beyond, torch's threads are worth more than fewer calls
_OUTPUTS_AT_MOST = 32  # FEW of _rows_of.h: for more, torch's matrix product is as fast
_PATCHES_AT_MOST = 1 << 18  # floats of one example's patches: 1 MB, so that they stay in the second-level cache
_SHARE = 1 << 22  # multiply-adds for a thread at a time; for less, a thread does not pay
_ROW = 16  # floats that a row of patches is rounded up to
_LEAST = 2.0**-126  # weights below it are 0: in single precision they would have few bits, and could be too large by half


class _Library:
    """The functions of _clip.c, for vectors of so many floats: 4, 8 or 16, as the processor has."""

    def __init__(self, library: ctypes.CDLL, lanes: int | None = None) -> None:
        pointer, size, real, truth = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double, ctypes.c_int
        self.lanes = library["hushgrad_lanes"]() if lanes is None else lanes

        def function(name: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
            found = library[f"hushgrad_{name}_{self.lanes}"]
            found.argtypes, found.restype = arguments, result
            return found

        self.outer_sq_norms = function("outer_sq_norms", pointer, size, pointer, size, size, real, pointer, pointer, result=truth)
        self.total = function("total", pointer, size, size, real, pointer, pointer, result=truth)
        self.clip = function("clip", pointer, size, size, real, real, real, truth, pointer, pointer, result=truth)
        self.outer_sums = function("outer_sums", pointer, size, pointer, size, pointer, size, pointer, pointer)
        self.kernel_gradients = function("kernel_gradients", pointer, pointer, pointer, size, pointer, pointer, pointer)
        self.sq_norms = function("sq_norms", pointer, size, size, pointer)
        self.gram = function("gram", pointer, size, size, size, size, size, size, pointer, pointer)
        self.wide_sums = function("wide_sums", pointer, size, pointer, size, pointer, size, size, size, pointer, pointer)
        self.wide_kept = function("wide_kept", pointer, size, pointer, size, size, size, pointer)


_LIBRARY = _native.load(__file__, "_clip", _Library)


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
        room, i = _room(library.lanes, T), some.start
        library.gram(at + 4 * stride * i, len(some), stride, T, d, down, along, room.data_ptr(), to + 8 * T * T * i)

    _shared(B, max(1, _SHARE // max(1, T * T * d)), work)
    return out


def add_wide_sums(x: Tensor, g: Tensor, weights: Tensor, out: Tensor) -> bool:
    """``out += sum_i w_i g_i x_i^T`` in double precision, for x (K, d), g (K, p) in single; whether that could be done here."""
    if _LIBRARY is None or not _fit(x, g) or not _double([weights, out]):
        return False
    library, (K, d), p = _LIBRARY, x.shape, g.shape[1]
    at = x.data_ptr(), d, g.data_ptr(), p, weights.data_ptr(), K

    def work(some: range) -> None:
        room = _room(library.lanes, d)
        library.wide_sums(*at, some.start, len(some), room.data_ptr(), out.data_ptr())

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


def _room(lanes: int, columns: int) -> Tensor:
    """Scratch of a product in double precision: DEEP x (TALL + columns, rounded up to whole vectors), as _wide_of.h has it."""
    return torch.empty(256, 144 + -(-columns // lanes) * lanes, dtype=torch.float64)


def _shared(count: int, each: int, work: Callable[[range], None]) -> None:
    """``work`` on all of range(count), ``each`` at a time where there are threads for it."""
    threads = min(torch.get_num_threads(), -(-count // each)) if count else 1
    shares = [range(low, min(low + each, count)) for low in range(0, count, each)] if threads > 1 else [range(count)]
    _native.in_turns(shares, work, threads)


def outer_sq_norms(x: Tensor, g: Tensor, wild: float) -> tuple[Tensor, Tensor, bool] | None:
    """‖x_i‖² ‖g_i‖² and ‖g_i‖² of each row of x (B, d) and g (B, p), and whether some ‖x_i‖² or ‖g_i‖² exceeds ``wild``."""
    if _LIBRARY is None or not _fit(x, g) or x.numel() + g.numel() > _AT_MOST:
        return None
    B = x.shape[0]
    of_weight, of_bias = torch.empty(B, dtype=torch.float64), torch.empty(B, dtype=torch.float64)
    at = x.data_ptr(), x.shape[1], g.data_ptr(), g.shape[1], B, wild, of_weight.data_ptr(), of_bias.data_ptr()
    return of_weight, of_bias, bool(_LIBRARY.outer_sq_norms(*at))


def total(parts: Sequence[Tensor], factor: float) -> tuple[Tensor, Tensor, bool] | None:
    """``factor`` times the sum of the parts (squared norms), its root, and whether all of it is finite."""
    if _LIBRARY is None or not _double(parts):
        return None
    rows = parts[0].numel()
    squares, norms = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
    places = array("Q", map(Tensor.data_ptr, parts))
    at = places.buffer_info()[0], len(parts), rows, factor, squares.data_ptr(), norms.data_ptr()
    return squares, norms, bool(_LIBRARY.total(*at))


def clip(parts: Sequence[Tensor], factor: float, bound: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, bool] | None:
    """Norms whose squares are ``factor`` times the sum of the parts, min(1, bound / norm), and whether all is finite.

    The weight is 0 where the norm is no number, and where single precision could not hold it.
    """
    single = dtype is torch.float32
    if _LIBRARY is None or not _double(parts) or not (single or dtype is torch.float64):
        return None
    rows = parts[0].numel()
    norms, weights = torch.empty(rows, dtype=dtype), torch.empty(rows, dtype=dtype)
    places = array("Q", map(Tensor.data_ptr, parts))
    at = places.buffer_info()[0], len(parts), rows, factor, bound, _LEAST, single, norms.data_ptr(), weights.data_ptr()
    return norms, weights, bool(_LIBRARY.clip(*at))


def outer_sums(x: Tensor, g: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
    """The sums of w_i g_i x_i^T and of w_i g_i, for x (B, d), g (B, p) and w (B,); where p is small."""
    p, d = g.shape[1], x.shape[1]
    if _LIBRARY is None or p > _OUTPUTS_AT_MOST or x.numel() > _AT_MOST or not _fit(x, g, weights):
        return None
    of_weight, of_bias = torch.empty(p, d), torch.empty(p)
    at = x.data_ptr(), d, g.data_ptr(), p, weights.data_ptr(), x.shape[0], of_weight.data_ptr(), of_bias.data_ptr()
    _LIBRARY.outer_sums(*at)
    return of_weight, of_bias


class _Shape(NamedTuple):
    """``geometry`` of _clip.c."""

    channels: int
    height: int
    width: int
    above: int
    left: int
    padded_h: int
    padded_w: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    dilation_h: int
    dilation_w: int
    out_channels: int
    out_h: int
    out_w: int
    taps: int
    row: int

    @property
    def patches(self) -> int:
        """Floats of one example's patches."""
        return self.out_h * self.out_w * self.row

    @property
    def room(self) -> int:
        """Floats of scratch: the patches and the padded input."""
        return self.patches + self.channels * self.padded_h * self.padded_w


def kernel_gradients(x: Tensor, g: Tensor, edges: Sequence[int], geometry: Geometry) -> tuple[Tensor, Tensor] | None:
    """A convolution's gradient for each example, (B, C_out, C_in / groups, *kernel), and its squared norm.

    ``edges`` is the zero padding as ``F.pad`` wants it; one and two dimensions.
    """
    if _LIBRARY is None or not _fit(x, g) or x.dim() > 4 or g.numel() == 0:
        return None
    shape = _shape(x, g, edges, geometry)
    if shape.patches > _PATCHES_AT_MOST:
        return None
    library, count = _LIBRARY, x.shape[0] * geometry.groups
    G = g.new_empty(x.shape[0], g.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    norms = torch.empty(count, dtype=torch.float64)
    packed = struct.pack(f"{len(shape)}N", *shape)
    strides = [4 * t.numel() // count for t in (x, g, G)]
    at_x, at_g, at_G, at_norms = (t.data_ptr() for t in (x, g, G, norms))

    def work(some: range) -> None:
        room, i = torch.empty(shape.room), some.start
        library.kernel_gradients(
            packed,
            at_x + i * strides[0],
            at_g + i * strides[1],
            len(some),
            room.data_ptr(),
            at_G + i * strides[2],
            at_norms + 8 * i,
        )

    _shared(count, max(1, _SHARE // (shape.patches * shape.out_channels)), work)
    return G, norms if geometry.groups == 1 else norms.view(-1, geometry.groups).sum(1)


def _shape(x: Tensor, g: Tensor, edges: Sequence[int], geometry: Geometry) -> _Shape:
    """In two dimensions; one dimension is an image of one line."""
    (height, width), (out_h, out_w) = _pair(x.shape[2:]), _pair(g.shape[2:])
    kernel_h, kernel_w = _pair(geometry.kernel)
    left, right, above, below = (*edges, 0, 0)[:4]
    channels = x.shape[1] // geometry.groups
    taps = channels * kernel_h * kernel_w
    sizes = channels, height, width, above, left, height + above + below, width + left + right
    moves = kernel_h, kernel_w, *_pair(geometry.stride), *_pair(geometry.dilation)
    return _Shape._make((*sizes, *moves, g.shape[1] // geometry.groups, out_h, out_w, taps, -(-taps // _ROW) * _ROW))


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

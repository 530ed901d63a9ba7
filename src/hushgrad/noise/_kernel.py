"""The arithmetic on cache-sized blocks: in C where the library was built, else in numpy, with the same bits.

Every operation is one IEEE rounding in a fixed order. Set HUSHGRAD_KERNEL=numpy to do without the C library.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, final

import numpy as np
from torch import Tensor

from hushgrad import native
from hushgrad.native import _abi
from hushgrad.noise import _transform
from hushgrad.noise._keystream import BLOCKS, INDICES, STEPS, KeyStream, check_address
from hushgrad.noise._memory import aligned
from hushgrad.noise._threads import CHUNK

__all__ = ["KERNEL", "CKernel", "Kernel", "NumpyKernel", "Piece"]

_BLOCKS = _transform.GROUP_BYTES // 16  # cipher blocks for one group of numbers
_NUMBERS = BLOCKS // _BLOCKS * _transform.GROUP  # of a tensor: for more, the counter has no room
_BLOCK_CHUNK = CHUNK // 4  # of rows that are computed together: the second-level cache holds a dozen


class Words(Protocol):
    """Random words at any address; :class:`~hushgrad.noise._keystream.KeyStream` is one."""

    def words(self, step: int, index: int, block: int, size: int) -> np.ndarray:
        """``size`` bytes from ``block`` on, as 32-bit words."""


class BufferedRow(NamedTuple):
    """Buffers s_j = ``state[j]``, their coefficients in the same type, and the factor of the row that they make."""

    state: np.ndarray
    decay: np.ndarray
    weight: np.ndarray
    scale: float


class SolvedRows(NamedTuple):
    """Rows solved together: x_k = (z_k + sum_h weights[k, h] history[h] + sum_{j<k} inner[k, j] x_j) / diagonal[k].

    x_k is put into ``kept[k]``, whose memory the history may share, and ``scale`` x_0 is handed out.
    """

    weights: np.ndarray
    history: Sequence[np.ndarray]
    inner: np.ndarray
    diagonal: np.ndarray
    kept: Sequence[np.ndarray]
    scale: float

    def part(self, low: int, high: int) -> SolvedRows:
        """For the elements [low, high) alone."""
        return self._replace(history=[h[low:high] for h in self.history], kept=[x[low:high] for x in self.kept])


class Rounding(NamedTuple):
    """How far a computed z is from the exact one: ``relative`` (|x| + |y|) + ``absolute`` of its pair, if |x| + |y| <= ``far``.

    The proofs are in :mod:`hushgrad.noise.secure`.
    """

    relative: float
    absolute: float
    far: float

    def on_grid(self, ratio: float) -> Rounding:
        """The same of total / h + ratio z, as computed: a product and a sum more, of numbers up to LIMIT + ratio |z|."""
        return Rounding((self.relative + ARITHMETIC) * ratio, self.absolute * ratio + ARITHMETIC * LIMIT, self.far)


LIMIT = 2.0**30  # grid steps, of a sum; larger ones are clamped
ARITHMETIC = 2.0**-51  # how far the product and the sum in total / h + ratio z are off, relative to their terms
SINGLE = Rounding(10.5 * 2.0**-24, 0.2 * 2.0**-24, 7.4)
DOUBLE = Rounding(7.5e-10, 2e-10, 7.0)


class Piece(NamedTuple):
    """Numbers start, start + 1, ... of tensor number ``which``, to be put into elements [low, low + size) of a contiguous tensor.

    ``which`` and ``start`` are integers of at least 0; whoever makes a piece has checked that.
    """

    which: int
    start: int
    target: Tensor
    low: int
    size: int

    def array(self) -> np.ndarray:
        """The elements as a flat array that shares their memory."""
        return self.target.detach().numpy().reshape(-1)[self.low : self.low + self.size]  # type: ignore[no-any-return]


class Kernel(ABC):
    """Operations on contiguous float32 or float64 arrays; of a two-dimensional array each row is contiguous."""

    name: ClassVar[str]

    def draw(self, stream: Words, step: int, index: int, start: int, scale: float, out: np.ndarray, fresh: bool) -> None:
        """``out = scale * z`` if fresh, else ``out += scale * z``, for the numbers at ``start``, ``start + 1``, ..."""
        for low in range(0, out.size, CHUNK):
            part = out[low : low + CHUNK]
            first, last = (start + low) // _transform.GROUP, -(-(start + low + part.size) // _transform.GROUP)
            z = np.empty((last - first) * _transform.GROUP, out.dtype)
            self.gaussians(stream.words(step, index, first * _BLOCKS, (last - first) * _transform.GROUP_BYTES), z)
            self.emit(z[start + low - first * _transform.GROUP :][: part.size], scale, part, fresh)

    def draw_all(self, stream: Words, step: int, pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        """``draw`` for every piece."""
        for piece in pieces:
            self.draw(stream, step, piece.which, piece.start, scale, piece.array(), fresh)

    def draw_buffers(self, stream: Words, at: tuple[int, int, int], row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """``buffers`` on the numbers at (step, index, start), start + 1, ..."""
        step, index, start = at
        for low in range(0, out.size, CHUNK):
            part = out[low : low + CHUNK]
            z = np.empty_like(part)
            self.draw(stream, step, index, start + low, 1.0, z, fresh=True)
            self.buffers(z, row._replace(state=row.state[:, low : low + CHUNK]), part, fresh)

    def draw_solutions(self, stream: Words, at: tuple[int, int, int], rows: SolvedRows, out: np.ndarray, fresh: bool) -> None:
        """Solve rows whose z_k are the numbers at (step + k, index, start), start + 1, ...; emits the first."""
        step, index, start = at
        for low in range(0, out.size, _BLOCK_CHUNK):
            emitted = out[low : low + _BLOCK_CHUNK]
            part = rows.part(low, low + emitted.size)
            x = np.empty((len(part.kept), emitted.size), out.dtype)
            for k, z in enumerate(x):
                self.draw(stream, step + k, index, start + low, 1.0, z, fresh=True)
            self.combine(part.weights, part.history, x)
            self.solve(part.inner, part.diagonal, x)
            for kept, solved in zip(part.kept, x, strict=True):
                kept[:] = solved
            self.emit(x[0], part.scale, emitted, fresh)

    def draw_combinations(self, stream: Words, at: tuple[int, int, int], weights: np.ndarray, out: np.ndarray) -> None:
        """``out[k] += sum_j weights[k, j] z_j``, in the order of j, with z_j the numbers at (step + j, index, start), ..."""
        step, index, start = at
        for low in range(0, out.shape[1], _BLOCK_CHUNK):
            part = out[:, low : low + _BLOCK_CHUNK]
            z = np.empty_like(part[0])
            for j, column in enumerate(weights.T):
                if column.any():
                    self.draw(stream, step + j, index, start + low, 1.0, z, fresh=True)
                    self.combine(column[:, None], [z], part)

    def draw_rounded(self, stream: Words, at: tuple[int, int, int], ratio: float, h: float, out: np.ndarray) -> list[int]:
        """``out = h rint(out / h + ratio z)`` for float64 sums, correctly rounded; the places in doubt, which are left as they were.

        A correct rounding is the same however it was found, so kernels may differ in what they leave in doubt only.
        """
        step, index, start = at
        doubts: list[int] = []
        for low in range(0, out.size, CHUNK):
            part = out[low : low + CHUNK]
            first, last = (start + low) // _transform.GROUP, -(-(start + low + part.size) // _transform.GROUP)
            z = np.empty((last - first) * _transform.GROUP)
            self.gaussians(stream.words(step, index, first * _BLOCKS, (last - first) * _transform.GROUP_BYTES), z)
            pairs = np.abs(z.reshape(-1, 2, _transform.PAIRS))
            spread = np.broadcast_to(pairs.sum(1, keepdims=True), pairs.shape).reshape(-1)
            here = slice(start + low - first * _transform.GROUP, start + low - first * _transform.GROUP + part.size)
            result, certain = _rounded(part, ratio * z[here], spread[here], h, DOUBLE.on_grid(ratio))
            doubts += (np.nonzero(~certain)[0] + low).tolist()
            np.copyto(part, result, where=certain)
        return doubts

    @abstractmethod
    def gaussians(self, words: np.ndarray, out: np.ndarray) -> None:
        """Whole groups of Gaussians from their random words."""

    @abstractmethod
    def emit(self, x: np.ndarray, scale: float, out: np.ndarray, fresh: bool) -> None:
        """``out = scale * x`` if fresh, else ``out += scale * x``: a product and a sum, never fused."""

    @abstractmethod
    def combine(self, weights: np.ndarray, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """``out[k] += sum_h weights[k, h] * parts[h]``, added in the order of h; a zero weight adds nothing."""

    @abstractmethod
    def solve(self, inner: np.ndarray, diagonal: np.ndarray, x: np.ndarray) -> None:
        """Forward substitution in place: ``x[k] = (x[k] + sum_{j<k} inner[k, j] * x[j]) / diagonal[k]``."""

    @abstractmethod
    def buffers(self, z: np.ndarray, row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """One step of a buffered Toeplitz recursion: ``x = z - sum weight_j s_j``, then ``s_j = decay_j s_j + x``; emits x."""


def _rounded(sums: np.ndarray, noise: np.ndarray, spread: np.ndarray, h: float, off: Rounding) -> tuple[np.ndarray, np.ndarray]:
    """(h rint(sums / h + noise), where that is certain)."""
    s = np.clip(sums / h, -LIMIT, LIMIT)
    v = s + noise
    n = np.rint(v)
    error = off.relative * spread + off.absolute
    return n * h, (0.5 - np.abs(v - n) - error > 0) & (spread <= off.far)


@final
class NumpyKernel(Kernel):
    """Plain numpy: the reference whose bits the C library must reproduce."""

    name = "numpy"

    def gaussians(self, words: np.ndarray, out: np.ndarray) -> None:
        """By the arithmetic of _transform.py."""
        _transform.gaussians(words, out)

    def emit(self, x: np.ndarray, scale: float, out: np.ndarray, fresh: bool) -> None:
        """A product, then a sum."""
        if fresh:
            np.multiply(x, x.dtype.type(scale), out=out)
        else:
            out += x * x.dtype.type(scale)

    def combine(self, weights: np.ndarray, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """One product and one sum for each weight."""
        term = np.empty_like(out[0])
        for h, part in enumerate(parts):
            for k, weight in enumerate(weights[:, h]):
                if weight != 0:
                    out[k] += np.multiply(part, weight, out=term)

    def solve(self, inner: np.ndarray, diagonal: np.ndarray, x: np.ndarray) -> None:
        """Row after row: a combination and a division."""
        for k in range(len(x)):
            self.combine(inner[k : k + 1, :k], list(x[:k]), x[k : k + 1])
            x[k] /= diagonal[k]

    def buffers(self, z: np.ndarray, row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """Buffer after buffer."""
        x, term = z.copy(), np.empty_like(z)
        for w, s in zip(row.weight, row.state, strict=True):
            x -= np.multiply(s, w, out=term)
        for d, s in zip(row.decay, row.state, strict=True):
            s *= d
            s += x
        self.emit(x, row.scale, out, fresh)


_SUFFIXES = ((np.dtype(np.float32), "f32"), (np.dtype(np.float64), "f64"))
_ALWAYS = ("gaussians", "write", "add", "buffers", "solve", "combine")
_DRAWING = ("draw", "draw_many", "drawn_buffers", "drawn_solutions", "drawn_combinations")  # with the processor's own AES


def _at(array: np.ndarray) -> int:
    # Three times faster than array.ctypes.data, which counts for the many small tensors of a model.
    return ctypes.addressof(ctypes.c_char.from_buffer(array)) if array.size else 0  # type: ignore[arg-type]


@final
class CKernel(Kernel):
    """The functions of native/noise; ctypes releases the interpreter lock while one runs.

    Where the processor has AES instructions (``cipher``), key stream and Gaussians are made in one call, a few kilobytes at a time.
    """

    name = "c"

    def __init__(self, library: native.Library) -> None:
        self.cipher: int = library.cipher()  # how many of its blocks are in a register; 0: it has none
        self._library = library
        names = _ALWAYS + _DRAWING if self.cipher else _ALWAYS
        self._functions = {(name, dtype): getattr(library, f"{name}_{suffix}") for dtype, suffix in _SUFFIXES for name in names}
        self._draw_many: dict[int, Any] = {dtype.itemsize: self._functions.get(("draw_many", dtype)) for dtype, _ in _SUFFIXES}

    def head(self, stream: Words, step: int) -> tuple[int, int, int, int] | None:
        """``address`` of abi.h for tensor 0: how to draw from this stream in C; None where that is not possible."""
        if not self.cipher or not isinstance(stream, KeyStream):
            return None
        return stream.place or stream.round_keys(self._expanded), self.cipher, step, 0

    def _expanded(self, key: bytes) -> ctypes.Array[ctypes.c_char]:
        round_keys = ctypes.create_string_buffer(_abi.ROUND_KEYS)
        self._library.expand_key(key, round_keys)
        return round_keys

    def _address(self, stream: Words, step: int, index: int) -> _abi.Address | None:
        head = self.head(stream, step)
        return None if head is None else _abi.Address(*head[:3], index)

    def draw(self, stream: Words, step: int, index: int, start: int, scale: float, out: np.ndarray, fresh: bool) -> None:
        """Key stream and numbers in one call."""
        address = self._address(stream, step, index)
        if address is None:
            super().draw(stream, step, index, start, scale, out, fresh)
            return
        check_address(step, index, _end_block(start + out.size))
        self._functions["draw", out.dtype](address, start, scale, not fresh, _at(out), out.size)

    def draw_all(self, stream: Words, step: int, pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        """All pieces in one call, if they are of one type."""
        head = self.head(stream, step)
        if head is None or not pieces:
            super().draw_all(stream, step, pieces, scale, fresh)
            return
        kind = pieces[0].target.dtype
        itemsize, table, last, end = kind.itemsize, [*head], 0, 0
        for which, start, target, low, size in pieces:
            if target.dtype is not kind:
                super().draw_all(stream, step, pieces, scale, fresh)  # one by one
                return
            table += which, start, size, target.data_ptr() + low * itemsize
            if which > last:
                last = which
            if start + size > end:
                end = start + size
        if not (0 <= step < STEPS and last < INDICES and end <= _NUMBERS):  # nearly never, so that the sentence is made elsewhere
            check_address(step, last, _end_block(end))
        places = array("Q", table)
        at = places.buffer_info()[0]
        self._draw_many[itemsize](at, len(pieces), scale, not fresh)  # as draw_table

    def draw_rounded(self, stream: Words, at: tuple[int, int, int], ratio: float, h: float, out: np.ndarray) -> list[int]:
        """In single precision, and in double where that leaves a doubt."""
        step, index, start = at
        address = self._address(stream, step, index)
        if address is None:
            return super().draw_rounded(stream, at, ratio, h, out)
        check_address(step, index, _end_block(start + out.size))
        facts = _abi.Facts(ratio, h, 1.0 / h, LIMIT)
        bounds = (_abi.Bound * 2)(_abi.Bound(*SINGLE.on_grid(ratio)), _abi.Bound(*DOUBLE.on_grid(ratio)))
        places = np.empty(out.size, np.uint64)
        doubts = self._library.rounded(address, start, facts, bounds, _at(out), out.size, _at(places))
        return [int(place) for place in places[:doubts]]

    def draw_table(self, table: int, count: int, itemsize: int, scale: float, fresh: bool) -> None:
        """``draw`` for many places at once, from a table of rows of four integers at the address ``table``.

        The first is :meth:`head`, each of the ``count`` others (tensor, first number, how many, address that they go to).
        """
        self._draw_many[itemsize](table, count, scale, not fresh)

    def draw_buffers(self, stream: Words, at: tuple[int, int, int], row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """Numbers go into the recursion without a detour through memory."""
        step, index, start = at
        address = self._address(stream, step, index)
        if address is None:
            super().draw_buffers(stream, at, row, out, fresh)
            return
        check_address(step, index, _end_block(start + out.size))
        self._functions["drawn_buffers", out.dtype](address, start, *_buffer_arguments(row, out, fresh))

    def draw_solutions(self, stream: Words, at: tuple[int, int, int], rows: SolvedRows, out: np.ndarray, fresh: bool) -> None:
        """Drawn, combined and solved a tile at a time, in the cache."""
        step, index, start = at
        address = self._address(stream, step, index)
        if address is None:
            super().draw_solutions(stream, at, rows, out, fresh)
            return
        count = len(rows.kept)
        check_address(step + count - 1, index, _end_block(start + out.size))
        tables = [np.ascontiguousarray(table, out.dtype) for table in (rows.weights, rows.inner, rows.diagonal)]
        history, kept = _places(rows.history), _places(rows.kept)
        weights, inner, diagonal = (_at(table) for table in tables)
        given = _abi.Solutions(weights, _at(history), inner, diagonal, _at(kept), count, len(history))
        room = aligned(count * _abi.TILE_STRIDE * out.itemsize)
        self._functions["drawn_solutions", out.dtype](address, start, given, _at(room), rows.scale, not fresh, _at(out), out.size)

    def draw_combinations(self, stream: Words, at: tuple[int, int, int], weights: np.ndarray, out: np.ndarray) -> None:
        """Drawn and combined a tile at a time, in the cache."""
        step, index, start = at
        address = self._address(stream, step, index)
        if address is None:
            super().draw_combinations(stream, at, weights, out)
            return
        n = out.shape[1]
        check_address(step + weights.shape[1] - 1, index, _end_block(start + n))
        weights, room = np.ascontiguousarray(weights, out.dtype), aligned(_abi.PARTS * _abi.TILE_STRIDE * out.itemsize)
        target = _at(room), _at(out[0]), out.strides[0] // out.itemsize, n
        self._functions["drawn_combinations", out.dtype](address, start, _at(weights), *weights.shape, *target)

    def gaussians(self, words: np.ndarray, out: np.ndarray) -> None:
        """Whole groups from their words."""
        self._functions["gaussians", out.dtype](_at(words), _at(out), out.size // _transform.GROUP)

    def emit(self, x: np.ndarray, scale: float, out: np.ndarray, fresh: bool) -> None:
        """In one pass."""
        self._functions["write" if fresh else "add", x.dtype](_at(x), scale, _at(out), x.size)

    def combine(self, weights: np.ndarray, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Several rows and parts at a time."""
        weights = np.ascontiguousarray(weights, out.dtype)
        places = _places(parts)
        rows, n = out.shape
        stride = out.strides[0] // out.itemsize
        self._functions["combine", out.dtype](_at(weights), rows, _at(places), len(places), _at(out[0]), stride, n)

    def solve(self, inner: np.ndarray, diagonal: np.ndarray, x: np.ndarray) -> None:
        """A few vectors of columns at a time."""
        inner = np.ascontiguousarray(inner)
        rows, n = x.shape
        self._functions["solve", x.dtype](_at(inner), _at(diagonal), rows, _at(x[0]), x.strides[0] // x.itemsize, n)

    def buffers(self, z: np.ndarray, row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """All buffers in one pass."""
        self._functions["buffers", z.dtype](_at(z), *_buffer_arguments(row, out, fresh))


def _places(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([_at(array) for array in arrays], dtype=np.uintp)


def _buffer_arguments(row: BufferedRow, out: np.ndarray, fresh: bool) -> tuple[Any, ...]:
    stride = row.state.strides[0] // row.state.itemsize
    buffers = _at(row.state[0]), stride, _at(row.decay), _at(row.weight), len(row.state)
    return (*buffers, row.scale, not fresh, _at(out), out.size)


def _end_block(end: int) -> int:
    return -(-end // _transform.GROUP) * _BLOCKS


def _agrees(kernel: Kernel) -> bool:
    """Whether a kernel gives numpy's bits on 2048 numbers: a compiler that broke a rule must not pass unnoticed.

    The same numbers are drawn with a cipher of its own, at an address that fills all three fields of the counter.
    """
    stream, at = KeyStream(bytes(range(32)), b"hushgrad check"), ((1 << 48) - 2, (1 << 32) - 3, (1 << 40) + 5)
    words = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 32, 8 * 3 * _transform.PAIRS, dtype=np.uint32)
    for dtype, _ in _SUFFIXES:
        ours, theirs = np.empty((2, 8 * _transform.GROUP), dtype)
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

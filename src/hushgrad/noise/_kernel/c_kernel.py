"""``CKernel``: the operations in C, through ctypes."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, final

import numpy as np
from torch import Tensor

from hushgrad import native
from hushgrad._aligned_memory import aligned
from hushgrad._universal_hash import Seen
from hushgrad.native import _abi
from hushgrad.noise import _box_muller
from hushgrad.noise._aes_ctr import BLOCKS, INDICES, STEPS, KeyStream, check_address
from hushgrad.noise._kernel.base import (
    BLOCKS_OF_GROUP,
    DOUBLE,
    LIMIT,
    SINGLE,
    BufferedRow,
    Kernel,
    Piece,
    SolvedRows,
    TableRows,
    Words,
)

_TARGET, _LOW, _WHERE = attrgetter("target"), attrgetter("low"), attrgetter("which", "start", "low", "size")
_BLOCK, _HASH = 8 * _abi.WITNESS_WORDS, 16  # bytes under one hash, and bytes of a hash
_NUMBERS = BLOCKS // BLOCKS_OF_GROUP * _box_muller.GROUP  # largest tensor that the cipher's counter can address
_SUFFIXES = ((np.dtype(np.float32), "f32"), (np.dtype(np.float64), "f64"))
_ALWAYS = ("gaussians", "write", "add", "buffers", "solve", "combine")
# with the processor's own AES
_DRAWING = ("draw", "draw_many", "draw_rows", "draw_seen", "drawn_buffers", "drawn_solutions", "drawn_combinations")


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
        self.cipher: int = library.cipher()  # cipher blocks per register; 0: no AES instructions
        self._library = library
        names = _ALWAYS + _DRAWING if self.cipher else _ALWAYS
        self._functions = {(name, dtype): getattr(library, f"{name}_{suffix}") for dtype, suffix in _SUFFIXES for name in names}
        self._draw_many, self._draw_seen = (self._by_size(name) for name in ("draw_many", "draw_seen"))

    def _by_size(self, name: str) -> dict[int, Any]:
        return {dtype.itemsize: self._functions.get((name, dtype)) for dtype, _ in _SUFFIXES}

    def head(self, stream: Words, step: int) -> tuple[int, int, int, int] | None:
        """``address`` of abi.h for tensor 0, from which C draws; None if C cannot draw from this stream."""
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
        address = self._address(stream, step, index)
        if address is None:
            super().draw(stream, step, index, start, scale, out, fresh)
            return
        check_address(step, index, _end_block(start + out.size))
        self._functions["draw", out.dtype](address, start, scale, not fresh, _at(out), out.size)

    def draw_all(self, stream: Words, step: int, pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        """All pieces in one call, if they are of one type."""
        table = self._table(stream, step, pieces, None)
        if table is None:
            super().draw_all(stream, step, pieces, scale, fresh)  # one by one
        else:
            self._draw_many[pieces[0].target.dtype.itemsize](table.buffer_info()[0], len(pieces), scale, not fresh)

    def draw_seen(self, stream: Words, step: int, pieces: Sequence[Piece], scale: float, seen: Seen) -> None:
        """All pieces in one call, each hashed while it is in the cache."""
        table = self._table(stream, step, pieces, seen)
        if table is None:
            super().draw_seen(stream, step, pieces, scale, seen)
        else:
            self._draw_seen[pieces[0].target.dtype.itemsize](table.buffer_info()[0], len(pieces), scale)

    def _table(self, stream: Words, step: int, pieces: Sequence[Piece], seen: Seen | None) -> array[int] | None:
        """The table of draw_many, or of draw_seen, in abi.h; None where C cannot draw, or not at once."""
        head = self.head(stream, step)
        if head is None or not pieces:
            return None
        targets = [*map(_TARGET, pieces)]
        if seen is None or len(targets) != len(seen.tensors) or not all(map(is_, targets, seen.tensors)):
            return _new_table(head, step, pieces, seen)
        at = (
            head[:2],
            [*map(_WHERE, pieces)],
        )  # all that a table holds but for the step and the addresses: most rows' is the last one's
        kept = seen.room.table
        if kept is None or kept[0] != at or not 0 <= step < STEPS:
            table = _new_table(head, step, pieces, seen)
            seen.room.table = None if table is None or any(map(_LOW, pieces)) else (at, table[:])
            return table
        table = kept[1][:]
        table[2], table[8::5] = step, array("Q", map(Tensor.data_ptr, targets))
        return table

    def draw_rounded(self, stream: Words, at: tuple[int, int, int], ratio: float, h: float, out: np.ndarray) -> list[int]:
        """In single precision first, then in double precision for the positions in doubt."""
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

    def draw_rows(self, stream: Words, step: int, index: int, given: TableRows, out: np.ndarray) -> bool:
        """Add the noise of these rows to those of ``out``, a contiguous matrix that has them; whether C could draw it."""
        address = self._address(stream, step, index)
        if address is not None:
            at = (*map(_at, given), len(given.rows), out.shape[1], _at(out))
            self._functions["draw_rows", out.dtype](address, *at)
        return address is not None

    def draw_buffers(self, stream: Words, at: tuple[int, int, int], row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """Draws and applies the recursion in one pass, without writing the Gaussians to memory."""
        step, index, start = at
        address = self._address(stream, step, index)
        if address is None:
            super().draw_buffers(stream, at, row, out, fresh)
            return
        check_address(step, index, _end_block(start + out.size))
        self._functions["drawn_buffers", out.dtype](address, start, *_buffer_arguments(row, out, fresh))

    def draw_solutions(self, stream: Words, at: tuple[int, int, int], rows: SolvedRows, out: np.ndarray, fresh: bool) -> None:
        """Draws, combines and solves tile by tile, in the cache."""
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
        """Draws and combines tile by tile, in the cache."""
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
        self._functions["gaussians", out.dtype](_at(words), _at(out), out.size // _box_muller.GROUP)

    def emit(self, x: np.ndarray, scale: float, out: np.ndarray, fresh: bool) -> None:
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
        self._functions["buffers", z.dtype](_at(z), *_buffer_arguments(row, out, fresh))


def _places(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([_at(array) for array in arrays], dtype=np.uintp)


def _buffer_arguments(row: BufferedRow, out: np.ndarray, fresh: bool) -> tuple[Any, ...]:
    stride = row.state.strides[0] // row.state.itemsize
    buffers = _at(row.state[0]), stride, _at(row.decay), _at(row.weight), len(row.state)
    return (*buffers, row.scale, not fresh, _at(out), out.size)


def _end_block(end: int) -> int:
    return -(-end // _box_muller.GROUP) * BLOCKS_OF_GROUP


def _new_table(head: tuple[int, int, int, int], step: int, pieces: Sequence[Piece], seen: Seen | None) -> array[int] | None:
    """The table of these pieces; None if they are not of one type."""
    kind = pieces[0].target.dtype
    itemsize, last, end = kind.itemsize, 0, 0
    places, table = ({}, [*head]) if seen is None else (seen.places, [*head, seen.hashed.place])
    for which, start, target, low, size in pieces:
        if target.dtype is not kind:
            return None
        table += which, start, size, target.data_ptr() + low * itemsize
        if seen is not None:
            table.append(places[id(target)] + low * itemsize // _BLOCK * _HASH)
        if which > last:
            last = which
        if start + size > end:
            end = start + size
    if not (0 <= step < STEPS and last < INDICES and end <= _NUMBERS):  # rare; the error is raised elsewhere
        check_address(step, last, _end_block(end))
    return array("Q", table)

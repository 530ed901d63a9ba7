"""Rows of noise: drawn in order, once for every tensor or shard, into new tensors or added to given ones."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from math import isfinite
from operator import attrgetter, is_
from typing import TYPE_CHECKING, NamedTuple, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from hushgrad import _aligned_memory, _check
from hushgrad._universal_hash import Seen, UniversalHash
from hushgrad.noise import _kernel
from hushgrad.noise._aes_ctr import KeyStream
from hushgrad.noise._chacha import ChaChaStream
from hushgrad.noise._kernel import BufferedRow, Piece, SolvedRows
from hushgrad.noise._threads import CHUNK, over_shares, worth_one_thread
from hushgrad.noise.base import NoiseStream
from hushgrad.noise.device_noise import DeviceKernel

if TYPE_CHECKING:
    from hushgrad.noise.secure import SecureNoise
    from hushgrad.noise.source import Source
    from hushgrad.noise.streams.shard_state import Lane

_target, _look, _USUAL = attrgetter("target"), attrgetter("dtype", "is_cpu"), (torch.float32, True)
_TENSORS, _LOOKS = {Tensor}, {_USUAL}


class _Last(NamedTuple):
    """The last row, if it was added to ordinary tensors in single precision: most rows are added to others of the same sizes."""

    indices: list[int]
    offsets: list[int]
    sizes: list[int]
    known: dict[tuple[int, int], Lane]  # in which its lanes are
    lanes: list[Lane]


class Rows(NoiseStream):
    """Draws rows in order; a :class:`Lane` for each shard keeps its next step and its state."""

    _source: Source
    _steps: int | None
    _lanes: dict[tuple[int, int], Lane]
    _last: _Last | None = None

    @final
    def rows(
        self,
        step: int,
        likes: Sequence[Tensor],
        *,
        indices: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        out: Sequence[Tensor] | None = None,
        scale: float | Tensor = 1.0,
    ) -> list[Tensor]:
        """The rows of all tensors; nothing is drawn unless all of them can be."""
        kernel = None if likes and likes[0].is_cpu else self._kernel_of(step, likes)
        if kernel is not None:
            return self._rows_there(kernel, step, likes, indices, offsets, out, scale)
        scale = float(scale)
        pieces, lanes = self._as_last(likes, indices, offsets, out) or self._placed(likes, indices, offsets, out)
        if type(step) is not int or step < 0 or not isfinite(scale):
            step, scale = _check.integer(0, step=step), _check.number(scale=scale)
        end = step + 1 if self._steps is None else self._steps
        for lane in lanes:
            if step != lane.next or lane.interrupted or step >= end:
                self._refuse(step, lane)
        for lane in lanes:
            lane.interrupted = True  # until all chunks are done, since a partly updated state must not be used
        self._advance_all(step, lanes, pieces, scale, out is None)
        for lane in lanes:
            lane.interrupted, lane.next = False, step + 1
        if out is not None and all(map(is_, map(_target, pieces), out)):
            return list(out)
        return delivered(pieces, likes, out, exact=self._source.secure)

    def _as_last(
        self, likes: Sequence[Tensor], indices: Sequence[int] | None, offsets: Sequence[int] | None, out: Sequence[Tensor] | None
    ) -> tuple[list[Piece], list[Lane]] | None:
        """What :meth:`_placed` returns, where only the tensors differ from those of the last row; else None."""
        last = self._last
        if last is None or out is not likes or last.known is not self._lanes or (indices, offsets) != last[:2]:
            return None
        if {*map(type, out)} != _TENSORS or {*map(_look, out)} != _LOOKS or not all(map(Tensor.is_contiguous, out)):
            return None
        if [*map(Tensor.numel, out)] != last.sizes:
            return None
        return [*map(Piece, last.indices, last.offsets, out, repeat(0), last.sizes)], last.lanes

    def _placed(
        self, likes: Sequence[Tensor], indices: Sequence[int] | None, offsets: Sequence[int] | None, out: Sequence[Tensor] | None
    ) -> tuple[list[Piece], list[Lane]]:
        """Where the row of every tensor is computed, and its lane."""
        pieces = pieces_of(likes, indices, offsets, out, exact=self._source.secure)
        lanes, known = [], self._lanes
        for piece in pieces:
            which, start, target, _, size = piece
            lane = known.get((which, start))
            if lane is None or lane.count != size or lane.dtype is not target.dtype:
                lane = self._lane(piece)
            lanes.append(lane)
        if len({*map(id, lanes)}) < len(lanes):
            _check.fail("indices", list(indices or ()), "to name each shard once", "Two tensors must not share their noise.")
        usual = out is likes and not self._source.secure and {*map(type, likes)} == _TENSORS and {*map(_look, likes)} == _LOOKS
        if usual and type(indices) is list and type(offsets) is list and all(map(is_, map(_target, pieces), likes)):
            self._last = _Last([*indices], [*offsets], [piece.size for piece in pieces], known, lanes)
        return pieces, lanes

    def _advance_all(self, step: int, lanes: Sequence[Lane], pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        """Write or add row ``step`` of every lane to its piece and update its state. Without state: in one call for all tensors."""
        self._source.draw(step, pieces, scale, fresh=fresh, finished=True)

    @abstractmethod
    def _lane(self, piece: Piece) -> Lane:
        """The lane of a piece, a new one if it has none yet."""

    @abstractmethod
    def _refuse(self, step: int, lane: Lane) -> NoReturn:
        """Raise because row ``step`` is not the next row of the lane, or does not exist."""

    @abstractmethod
    def _kernel_of(self, step: int, likes: Sequence[Tensor]) -> DeviceKernel | None:
        """The kernel that draws on these tensors' device; None: the host draws."""

    @abstractmethod
    def _rows_there(
        self,
        kernel: DeviceKernel,
        step: int,
        likes: Sequence[Tensor],
        indices: Sequence[int] | None,
        offsets: Sequence[int] | None,
        out: Sequence[Tensor] | None,
        scale: float | Tensor,
    ) -> list[Tensor]:
        """All tensors' rows in one launch."""


class Drawing:
    """Base of :class:`Source`: draws its numbers, in ``draw`` on all threads.

    The other methods work on one thread, with the numbers of tensor ``index`` in row ``step`` from place ``start`` of the flattened tensor
    on, and arrays of float32 or float64; ``fresh``: the result is written to ``out``, else added.
    """

    _stream: KeyStream | ChaChaStream
    _grid: SecureNoise | None
    hashed: UniversalHash | None  # computes hashes of what rows are added to; set once
    seen: Seen | None  # hashes of the tensors that the last row was added to

    def draw(self, step: int, pieces: Sequence[Piece], scale: float, *, fresh: bool, finished: bool = False) -> None:
        """Compute the numbers of every piece, on all threads: written if ``fresh``, else added.

        Args:
            step: the row.
            pieces: which places of which tensors.
            scale: what the numbers are multiplied by.
            fresh: write; else add.
            finished: these numbers are the complete row and nothing else will be added, so the tensors may be hashed now (``seen``).
                False for correlated noise, and for tensors that get their noise through a copy.
        """
        seen = None
        if finished and not fresh and self.hashed is not None and self._grid is None:
            seen = self.seen = Seen(self.hashed, [*map(_target, pieces)])
        if torch.get_num_threads() == 1 or worth_one_thread(pieces):
            self._write(step, scale, fresh, seen, pieces)
        else:
            over_shares(pieces, partial(self._write, step, scale, fresh, seen))

    def _write(self, step: int, scale: float, fresh: bool, seen: Seen | None, pieces: Sequence[Piece]) -> None:
        """A share of ``draw``, on one thread: ``out = scale * z`` if fresh, else ``out += scale * z``."""
        if seen is not None:
            _kernel.KERNEL.draw_seen(self._stream, step, pieces, scale, seen)
            return
        if self._grid is None:
            _kernel.KERNEL.draw_all(self._stream, step, pieces, scale, fresh)
            return
        for piece in pieces:
            out = piece.array()
            for low in range(0, out.size, CHUNK):
                self._grid.write(step, piece.which, piece.start + low, out[low : low + CHUNK], scale, fresh)

    def fill(self, step: int, index: int, start: int, out: np.ndarray) -> None:
        """Write the numbers themselves."""
        _kernel.KERNEL.draw(self._stream, step, index, start, 1.0, out, fresh=True)

    def buffer(self, step: int, index: int, start: int, row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        """Send the numbers through the buffers of ``row``."""
        _kernel.KERNEL.draw_buffers(self._stream, (step, index, start), row, out, fresh)

    def solve(self, step: int, index: int, start: int, rows: SolvedRows, out: np.ndarray, fresh: bool) -> None:
        """Solve ``rows`` for the numbers of ``step``, ``step + 1``, ...; the first goes to ``out``."""
        weights, inner, diagonal = (table.astype(out.dtype) for table in (rows.weights, rows.inner, rows.diagonal))
        rows = rows._replace(weights=weights, inner=inner, diagonal=diagonal)
        _kernel.KERNEL.draw_solutions(self._stream, (step, index, start), rows, out, fresh)

    def combine(self, step: int, index: int, start: int, weights: np.ndarray, out: np.ndarray) -> None:
        """``out[k] += sum_j weights[k, j] z``, z the numbers of ``step + j``."""
        _kernel.KERNEL.draw_combinations(self._stream, (step, index, start), weights.astype(out.dtype), out)


_DTENSOR = "torch.distributed.tensor"
_PLAIN = (Tensor, type(None))


def _refuse_dtensor(**tensors: Tensor | None) -> None:
    if _DTENSOR not in sys.modules:  # slow to import; before that no DTensor exists
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, sys.modules[_DTENSOR].DTensor):
            _check.fail(name, type(tensor), "to be a local tensor", "Draw on tensor.to_local() with the shard's offset=.")


def pieces_of(
    likes: Sequence[Tensor],
    indices: Sequence[int] | None,
    offsets: Sequence[int] | None,
    out: Sequence[Tensor] | None,
    *,
    exact: bool,
) -> list[Piece]:
    """Where the noise of every tensor is computed: new memory, or ``out`` itself wherever it is contiguous and in main memory.

    ``indices`` default to 0, 1, ..., ``offsets`` to 0. ``exact``: computed in float64 throughout, rounded once at the end.
    """
    count = len(likes)
    indices = range(count) if indices is None else indices
    offsets = (0,) * count if offsets is None else offsets
    added = (None,) * count if out is None else out
    if not count == len(indices) == len(offsets) == len(added):
        sizes = {"indices": len(indices), "offsets": len(offsets), "out": len(added)}
        name, size = next((name, size) for name, size in sizes.items() if size != count)
        _check.fail(f"len({name})", size, f"to be len(likes)={count}")
    pieces = []
    for index, offset, like, to in zip(indices, offsets, likes, added, strict=True):
        usual = to is like and not exact and _look(like) == _USUAL and type(like) is Tensor and like.is_contiguous()
        if usual and type(index) is type(offset) is int and index >= 0 <= offset:
            pieces.append(Piece(index, offset, like, 0, like.numel()))
        else:
            pieces.append(_piece(index, offset, like, to, exact))
    return pieces


def _piece(index: int, offset: int, like: Tensor, out: Tensor | None, exact: bool) -> Piece:
    if type(like) is not Tensor or type(out) not in _PLAIN:
        _refuse_dtensor(like=like, out=out)
    given = like.dtype
    if not given.is_floating_point:
        _check.fail("like.dtype", given, "to be a floating-point type")
    dtype = torch.float64 if exact or given is torch.float64 else torch.float32
    if type(index) is not int or index < 0 or type(offset) is not int or offset < 0:
        index, offset = _check.integer(0, index=index), _check.integer(0, offset=offset)
    if out is None:
        target = _aligned_memory.empty(like.shape, dtype)
    elif out is not like and (out.shape != like.shape or out.dtype != given or out.device != like.device):
        _check.fail("out", tuple(out.shape), f"to have like's shape {tuple(like.shape)}, dtype and device")
    elif given is dtype and out.is_contiguous() and out.is_cpu:
        target = out
    elif exact:
        target = out.detach().to(device="cpu", dtype=dtype).contiguous()
    else:
        target = _aligned_memory.zeros(like.shape, dtype)
    return Piece(index, offset, target, 0, target.numel())


def delivered(pieces: Sequence[Piece], likes: Sequence[Tensor], out: Sequence[Tensor] | None, *, exact: bool) -> list[Tensor]:
    """The numbers of the pieces in the dtype and on the device of ``likes``: new tensors, or ``out`` after they are added."""
    if out is None:
        return [piece.target.to(device=like.device, dtype=like.dtype) for piece, like in zip(pieces, likes, strict=True)]
    for piece, to in zip(pieces, out, strict=True):
        if piece.target is not to:
            with torch.no_grad():
                if exact:
                    to.copy_(piece.target)
                else:
                    to.add_(piece.target.to(device=to.device))
    return list(out)

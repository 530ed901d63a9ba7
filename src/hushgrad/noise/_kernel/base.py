"""``Kernel``: the operations that draw noise, with default implementations by the basic ones; ``NumpyKernel``: these in numpy.

Before them stand their arguments: rows of a recursion, bounds on rounding errors, pieces of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, final

import numpy as np
from torch import Tensor

from hushgrad._universal_hash import Seen
from hushgrad.noise import _box_muller
from hushgrad.noise._threads import CHUNK


class Words(Protocol):
    """Random words at any address; :class:`~hushgrad.noise._aes_ctr.KeyStream` is one."""

    def words(self, step: int, index: int, block: int, size: int) -> np.ndarray:
        """``size`` bytes from ``block`` on, as 32-bit words."""


class BufferedRow(NamedTuple):
    """The buffers s_j = ``state[j]`` of a BLT, their decays and weights in the same dtype, and the factor of the emitted row."""

    state: np.ndarray
    decay: np.ndarray
    weight: np.ndarray
    scale: float


class SolvedRows(NamedTuple):
    """Rows solved together: x_k = (z_k + sum_h weights[k, h] history[h] + sum_{j<k} inner[k, j] x_j) / diagonal[k].

    x_k is stored in ``kept[k]``, whose memory the history may share, and ``scale`` x_0 is emitted.
    """

    weights: np.ndarray
    history: Sequence[np.ndarray]
    inner: np.ndarray
    diagonal: np.ndarray
    kept: Sequence[np.ndarray]
    scale: float

    def part(self, low: int, high: int) -> SolvedRows:
        """These rows for the elements [low, high) only."""
        return self._replace(history=[h[low:high] for h in self.history], kept=[x[low:high] for x in self.kept])


class TableRows(NamedTuple):
    """Rows of a table's noise, the rows that they are added to, and what they are multiplied by: contiguous arrays."""

    rows: np.ndarray
    places: np.ndarray
    scales: np.ndarray

    def part(self, low: int, high: int) -> TableRows:
        """Those from ``low`` to ``high``."""
        return TableRows(self.rows[low:high], self.places[low:high], self.scales[low:high])


class Rounding(NamedTuple):
    """A bound on the error of a computed z: ``relative`` (|x| + |y|) + ``absolute`` for its pair (x, y), if |x| + |y| <= ``far``.

    The proofs are in :mod:`hushgrad.noise.secure`.
    """

    relative: float
    absolute: float
    far: float

    def on_grid(self, ratio: float) -> Rounding:
        """The bound for total / h + ratio z, with one more product and sum of numbers up to LIMIT + ratio |z|."""
        return Rounding((self.relative + ARITHMETIC) * ratio, self.absolute * ratio + ARITHMETIC * LIMIT, self.far)


LIMIT = 2.0**30  # largest sum in grid steps; larger ones are clamped
ARITHMETIC = 2.0**-51  # error of the product and the sum in total / h + ratio z, relative to their terms
SINGLE = Rounding(10.5 * 2.0**-24, 0.2 * 2.0**-24, 7.4)
DOUBLE = Rounding(7.5e-10, 2e-10, 7.0)


class Piece(NamedTuple):
    """Numbers start, start + 1, ... of tensor number ``which``, to be put into elements [low, low + size) of a contiguous tensor.

    ``which`` and ``start`` are integers of at least 0, which the caller has checked.
    """

    which: int
    start: int
    target: Tensor
    low: int
    size: int

    def array(self) -> np.ndarray:
        """The elements as a flat array that shares their memory."""
        return self.target.detach().numpy().reshape(-1)[self.low : self.low + self.size]  # type: ignore[no-any-return]


BLOCKS_OF_GROUP = _box_muller.GROUP_BYTES // 16  # cipher blocks for one group of numbers
_BLOCK_CHUNK = CHUNK // 4  # numbers of each of several rows computed together: the second-level cache holds a dozen


class Kernel(ABC):
    """Operations on contiguous float32 or float64 arrays; in a two-dimensional array each row is contiguous."""

    name: ClassVar[str]

    def draw(self, stream: Words, step: int, index: int, start: int, scale: float, out: np.ndarray, fresh: bool) -> None:
        """``out = scale * z`` if fresh, else ``out += scale * z``, for the numbers at ``start``, ``start + 1``, ..."""
        for low in range(0, out.size, CHUNK):
            part = out[low : low + CHUNK]
            first, last = (start + low) // _box_muller.GROUP, -(-(start + low + part.size) // _box_muller.GROUP)
            z = np.empty((last - first) * _box_muller.GROUP, out.dtype)
            self.gaussians(stream.words(step, index, first * BLOCKS_OF_GROUP, (last - first) * _box_muller.GROUP_BYTES), z)
            self.emit(z[start + low - first * _box_muller.GROUP :][: part.size], scale, part, fresh)

    def draw_all(self, stream: Words, step: int, pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        """``draw`` for every piece."""
        for piece in pieces:
            self.draw(stream, step, piece.which, piece.start, scale, piece.array(), fresh)

    def draw_seen(self, stream: Words, step: int, pieces: Sequence[Piece], scale: float, seen: Seen) -> None:
        """``draw_all`` with the numbers added, then hash every piece; pieces are whole hash blocks, except the last of a tensor."""
        self.draw_all(stream, step, pieces, scale, False)
        for piece in pieces:
            seen.look(piece.target, piece.low, piece.size)

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
        """``out = h rint(out / h + ratio z)`` for float64 sums, correctly rounded; returns the positions in doubt, which are unchanged.

        Correct rounding is unique, so kernels can differ only in which positions they leave in doubt.
        """
        step, index, start = at
        doubts: list[int] = []
        for low in range(0, out.size, CHUNK):
            part = out[low : low + CHUNK]
            first, last = (start + low) // _box_muller.GROUP, -(-(start + low + part.size) // _box_muller.GROUP)
            z = np.empty((last - first) * _box_muller.GROUP)
            self.gaussians(stream.words(step, index, first * BLOCKS_OF_GROUP, (last - first) * _box_muller.GROUP_BYTES), z)
            pairs = np.abs(z.reshape(-1, 2, _box_muller.PAIRS))
            spread = np.broadcast_to(pairs.sum(1, keepdims=True), pairs.shape).reshape(-1)
            here = slice(start + low - first * _box_muller.GROUP, start + low - first * _box_muller.GROUP + part.size)
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
        _box_muller.gaussians(words, out)

    def emit(self, x: np.ndarray, scale: float, out: np.ndarray, fresh: bool) -> None:
        if fresh:
            np.multiply(x, x.dtype.type(scale), out=out)
        else:
            out += x * x.dtype.type(scale)

    def combine(self, weights: np.ndarray, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        term = np.empty_like(out[0])
        for h, part in enumerate(parts):
            for k, weight in enumerate(weights[:, h]):
                if weight != 0:
                    out[k] += np.multiply(part, weight, out=term)

    def solve(self, inner: np.ndarray, diagonal: np.ndarray, x: np.ndarray) -> None:
        for k in range(len(x)):
            self.combine(inner[k : k + 1, :k], list(x[:k]), x[k : k + 1])
            x[k] /= diagonal[k]

    def buffers(self, z: np.ndarray, row: BufferedRow, out: np.ndarray, fresh: bool) -> None:
        x, term = z.copy(), np.empty_like(z)
        for w, s in zip(row.weight, row.state, strict=True):
            x -= np.multiply(s, w, out=term)
        for d, s in zip(row.decay, row.state, strict=True):
            s *= d
            s += x
        self.emit(x, row.scale, out, fresh)

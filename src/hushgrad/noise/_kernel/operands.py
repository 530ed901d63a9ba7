"""Arguments of kernels: pieces of tensors, rows of a recursion, and bounds on rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor


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

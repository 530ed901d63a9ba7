"""``NumpyKernel``: the operations in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from hushgrad.noise import _box_muller
from hushgrad.noise._kernel.base import Kernel
from hushgrad.noise._kernel.operands import BufferedRow


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

"""The arithmetic on cache-sized blocks, in numpy; every operation is a single IEEE rounding in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hushgrad.noise._transform import gaussians

__all__ = ["NumpyKernel"]


class NumpyKernel:
    """Plain numpy; the reference whose bits any faster kernel must reproduce."""

    name = "numpy"

    def gaussians(self, words: np.ndarray, out: np.ndarray) -> None:
        """Whole groups of Gaussians from their random words."""
        gaussians(words, out)

    def emit(self, x: np.ndarray, scale: float, out: np.ndarray, fresh: bool) -> None:
        """``out = scale * x`` if fresh, else ``out += scale * x``: a product and a sum, each rounded, never fused."""
        if fresh:
            np.multiply(x, x.dtype.type(scale), out=out)
        else:
            out += x * x.dtype.type(scale)

    def combine(self, weights: np.ndarray, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """``out[k] += sum_h weights[k, h] * parts[h]``, added in the order of h; a zero weight adds nothing."""
        term = np.empty_like(out[0])
        for h, part in enumerate(parts):
            for k, weight in enumerate(weights[:, h]):
                if weight != 0:
                    out[k] += np.multiply(part, weight, out=term)

    def buffers(self, x: np.ndarray, state: np.ndarray, decay: np.ndarray, weight: np.ndarray) -> None:
        """One step of a buffered Toeplitz recursion in place: ``x -= sum weight_j s_j``, then ``s_j = decay_j s_j + x``."""
        term = np.empty_like(x)
        for w, s in zip(weight, state, strict=True):
            x -= np.multiply(s, w, out=term)
        for d, s in zip(decay, state, strict=True):
            s *= d
            s += x


KERNEL = NumpyKernel()

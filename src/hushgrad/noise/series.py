"""Power series: the first column of a lower-triangular Toeplitz matrix is a series, and products of such matrices are products."""

from __future__ import annotations

import numpy as np
import scipy  # its parts are imported when they are first used: scipy.signal alone takes half a second

__all__ = ["binomial", "inverse", "lower_toeplitz", "multiply"]


def binomial(exponent: float, steps: int, decay: float = 1.0) -> np.ndarray:
    """The series of (1 - decay x)^exponent: (-decay)^t binom(exponent, t), by a product without factorials.

    >>> binomial(-0.5, 4).tolist()  # binom(2t, t) / 4^t
    [1.0, 0.5, 0.375, 0.3125]
    """
    t = np.arange(1, steps)
    return np.cumprod(np.r_[1.0, (t - 1 - exponent) / t * decay])


def inverse(series: np.ndarray, steps: int) -> np.ndarray:
    """The first ``steps`` coefficients of 1 / series, by the recursion of long division (no FFT: small terms stay exact).

    >>> inverse(np.array([1.0, -0.5]), 4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    """
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(scipy.signal.lfilter([1.0], np.asarray(series, dtype=float)[:steps], impulse))


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two series of equal length, cut to that length."""
    return scipy.signal.fftconvolve(a, b)[: len(a)] if len(a) > 64 else np.convolve(a, b)[: len(a)]


def lower_toeplitz(column: np.ndarray) -> np.ndarray:
    """The lower-triangular Toeplitz matrix with this first column."""
    n = len(column)
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(lag >= 0, column[np.maximum(lag, 0)], 0.0)

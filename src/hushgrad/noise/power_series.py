"""Power series: a lower-triangular Toeplitz matrix is given by the series in its first column, and products multiply the series."""

from __future__ import annotations

import numpy as np
from scipy.fft import next_fast_len


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
    head = np.asarray(series, dtype=float)[:steps]
    tail = head[1:] / head[0]
    out = np.zeros(steps)
    out[0] = 1 / head[0]
    for t in range(steps - 1):  # the contributions of this coefficient to all later ones
        rest = out[t + 1 : t + 1 + len(tail)]
        rest -= tail[: len(rest)] * out[t]
    return out


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two series of equal length, cut to that length."""
    return convolved(a, b)[: len(a)] if len(a) > 64 else np.convolve(a, b)[: len(a)]


def convolved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The whole product of two series, by FFT; scipy.signal, which has it too, takes half a second to import."""
    length = len(a) + len(b) - 1
    size = next_fast_len(length, real=True)
    return np.asarray(np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size), size)[:length])


def correlate(a: np.ndarray, b: np.ndarray, lags: int) -> np.ndarray:
    """sum_t a_{t+j} b_t for j = 0..lags-1."""
    n = len(a)
    return np.asarray(convolved(a, b[::-1])[n - 1 : n - 1 + lags])


def lower_toeplitz(column: np.ndarray) -> np.ndarray:
    """The lower-triangular Toeplitz matrix with this first column."""
    n = len(column)
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(lag >= 0, column[np.maximum(lag, 0)], 0.0)

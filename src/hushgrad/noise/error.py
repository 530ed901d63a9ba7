"""Error per unit of noise: (||B||_F / sqrt(n), max_t ||B_t||) with B = A N."""

from __future__ import annotations

import numpy as np

from hushgrad import _check
from hushgrad.noise.power_series import multiply
from hushgrad.noise.workload import AnyWorkload, PrefixSums, as_workload

_DENSE = 8192  # above, an n x n matrix of doubles takes more than half a gigabyte


def toeplitz_unit_error(beta: np.ndarray, workload: AnyWorkload = None) -> tuple[float, float]:
    """For Toeplitz noise with coefficients ``beta`` (first column of N); O(n log n) if the workload is Toeplitz too."""
    steps = len(beta)
    work = as_workload(workload, steps)
    if isinstance(work, PrefixSums):
        return _from_series(np.cumsum(beta))
    a = work.coefficients(steps)
    if a is not None:
        return _from_series(multiply(a, beta))
    _refuse_large(steps)
    return _from_rows(_times_toeplitz(work.matrix(steps), beta))


def dense_unit_error(noising: np.ndarray, workload: AnyWorkload = None) -> tuple[float, float]:
    """For a noising matrix N given in full."""
    steps = len(noising)
    work = as_workload(workload, steps)
    if isinstance(work, PrefixSums):
        return _from_rows(np.cumsum(noising, axis=0))
    return _from_rows(work.matrix(steps) @ noising)


def _from_series(b: np.ndarray) -> tuple[float, float]:
    squares = np.cumsum(np.square(b))  # ||B_t||²: rows of a Toeplitz B grow
    return float(np.sqrt(squares.mean())), float(np.sqrt(squares[-1]))


def _from_rows(B: np.ndarray) -> tuple[float, float]:
    squares = np.einsum("ts,ts->t", B, B)
    return float(np.sqrt(squares.mean())), float(np.sqrt(squares.max()))


def _times_toeplitz(A: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """A N by row-wise correlation: (A N)_tj = sum_s A_ts beta_{s-j}."""
    n = len(beta)
    spectrum = np.fft.rfft(A[:, ::-1], 2 * n, axis=1) * np.fft.rfft(beta, 2 * n)
    return np.fft.irfft(spectrum, 2 * n, axis=1)[:, :n][:, ::-1]


def _refuse_large(steps: int) -> None:
    if steps > _DENSE:
        remedy = "Ask for a constant learning rate, or for a shorter run with the same schedule."
        _check.fail("steps", steps, f"to be at most {_DENSE} for a workload that changes from step to step", remedy)

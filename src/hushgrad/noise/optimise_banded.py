"""The best banded Toeplitz strategy for the mean error of prefix sums, by L-BFGS with the exact gradient.

With b = 1 / ((1 - x) C(x)) (prefix sums of the noise) and y = C x (participation comb), the loss is
log sum_t (n - t) b_t² + log ||y||². A change dc changes b by -(b * beta * dc), so the gradient is one correlation.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.optimize import minimize
from scipy.signal import fftconvolve

from hushgrad.noise.series import binomial, inverse, multiply

__all__ = ["optimise_banded"]

_UNSTABLE = 1e100  # 1/C of a trial whose C(x) has a root inside the unit circle grows without bound; squares stay finite below


@lru_cache(maxsize=32)
def optimise_banded(steps: int, bands: int, loss: str, gap: int, times: int) -> tuple[float, ...]:
    """Coefficients c_0 = 1, c_1, ..., c_{bands-1} that minimise sens x error; the leftmost pattern is taken for the worst."""
    weight = np.arange(steps, 0, -1.0) if loss == "mean" else np.ones(steps)
    comb = np.zeros(steps)
    comb[: gap * times : gap] = 1.0

    def objective(tail: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.r_[1.0, tail]
        beta = inverse(c, steps)
        if not np.all(np.abs(beta) < _UNSTABLE):  # a barrier that the line search steps back from
            return 1e10, np.zeros_like(tail)
        b = np.cumsum(beta)
        y = multiply(comb, np.r_[c, np.zeros(steps - bands)])
        error, sens = np.sum(weight * b**2), np.sum(y**2)
        error_slope = -2 * _correlate(weight * b, multiply(b, beta), bands)
        slope = error_slope / error + 2 * _correlate(y, comb, bands) / sens
        return float(np.log(error) + np.log(sens)), slope[1:]

    start = binomial(-0.5, bands)[1:]
    # Where participations overlap, a negative coefficient would have to be paid for by its absolute value.
    bounds = [(0.0, None)] * (bands - 1) if times > 1 and gap < bands else None
    options = {"maxiter": 500, "maxcor": 30}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return (1.0, *map(float, found.x))


def _correlate(a: np.ndarray, b: np.ndarray, lags: int) -> np.ndarray:
    """sum_t a_{t+j} b_t for j = 0..lags-1."""
    n = len(a)
    return np.asarray(fftconvolve(a, b[::-1])[n - 1 : n - 1 + lags])

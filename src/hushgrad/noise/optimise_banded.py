"""The best banded Toeplitz strategy for the mean or max error of a workload, by L-BFGS with the exact gradient.

With beta = 1 / C(x), b = beta / (1 - x) (prefix sums of the noise) and y = C x (participation comb), the loss is
log sum_t (n - t) b_t² + log ||y||². A change dc changes b by -(b * beta * dc), so the gradient is one correlation. For another
workload the first term is log betaᵀ M beta (``error_form``), and dc changes beta by -(beta * beta * dc).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import scipy

from hushgrad.noise.error import error_form
from hushgrad.noise.power_series import binomial, correlate, inverse, multiply
from hushgrad.noise.workload import Workload

_Objective: TypeAlias = Callable[[np.ndarray], tuple[float, np.ndarray]]  # of c: the loss and its gradient
_OPTIONS = {"maxiter": 500, "maxcor": 30}
_UNSTABLE = 1e100  # 1/C of a trial whose C(x) has a root inside the unit circle grows without bound; squares stay finite below


@lru_cache(maxsize=32)
def optimise_banded(
    steps: int, bands: int, loss: str, gap: int, times: int, workload: Workload | None = None
) -> tuple[float, ...]:
    """Coefficients c_0 = 1, c_1, ..., c_{bands-1} that minimise sens x error, and for which the leftmost pattern is the worst."""
    weight = np.arange(steps, 0, -1.0) if loss == "mean" else np.ones(steps)
    comb = np.zeros(steps)
    comb[: gap * times : gap] = 1.0
    form = None if workload is None else error_form(workload, steps, loss)

    def objective(c: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):  # of an unstable trial
            beta = inverse(c, steps)
        if not np.all(np.abs(beta) < _UNSTABLE):  # a barrier that the line search steps back from
            return 1e10, np.zeros_like(c)
        y = multiply(comb, np.r_[c, np.zeros(steps - bands)])
        sens = np.sum(y**2)
        if form is None:
            b = np.cumsum(beta)
            error, error_slope = np.sum(weight * b**2), -2 * correlate(weight * b, multiply(b, beta), bands)
        else:
            image = form(beta)
            error, error_slope = beta @ image, -2 * correlate(image, multiply(beta, beta), bands)
        slope = error_slope / error + 2 * correlate(y, comb, bands) / sens
        return float(np.log(error) + np.log(sens)), slope

    search = _decreasing if times > 1 and gap < bands else _free
    return tuple(map(float, search(objective, binomial(-0.5, bands))))


def _free(objective: _Objective, start: np.ndarray) -> np.ndarray:
    """Any c with c_0 = 1: participations do not overlap, so only the norm of a column counts."""

    def of_tail(tail: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = objective(np.r_[1.0, tail])
        return value, slope[1:]

    found = scipy.optimize.minimize(of_tail, start[1:], jac=True, method="L-BFGS-B", options=_OPTIONS)
    return np.r_[1.0, found.x]


def _decreasing(objective: _Objective, start: np.ndarray) -> np.ndarray:
    """c_j = d_j + d_{j+1} + ... with d >= 0: where participations overlap, only for such a c is the leftmost pattern the worst."""

    def of_drops(drops: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = objective(np.cumsum(drops[::-1])[::-1])
        return value, np.cumsum(slope)

    drops = -np.diff(start, append=0.0)
    found = scipy.optimize.minimize(
        of_drops, drops, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * len(drops), options=_OPTIONS
    )
    c = np.cumsum(found.x[::-1])[::-1]
    return np.asarray(c / c[0])  # neither the sensitivity times the error nor the order depends on the scale

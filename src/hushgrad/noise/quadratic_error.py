"""A workload's error as a quadratic form in the coefficients of Toeplitz noise, for their optimisation.

With N Toeplitz of first column beta, ||A N||_F² = betaᵀ M beta, where M_pq = sum_j (AᵀA)_{j+p, j+q}. For a Toeplitz A with first
column a it is sum_t (n - t) b_t², b = a * beta, in O(n log n); the squared norm of the last, largest row is the same without the
weights. For any other A, M is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from hushgrad import _check
from hushgrad.noise.power_series import correlate, multiply
from hushgrad.noise.workload import Workload

Form: TypeAlias = Callable[[np.ndarray], np.ndarray]  # from beta to M beta

LONGEST_SCHEDULE = 4096  # steps: M takes O(n³) to make, and an eighth of a gigabyte


@lru_cache(maxsize=8)
def error_form(workload: Workload, steps: int, loss: str) -> Form:
    """From beta to M beta, for the "mean" (times n) or the "max" squared error of ``workload``."""
    a = workload.coefficients(steps)
    if a is not None:
        weight = np.arange(steps, 0, -1.0) if loss == "mean" else np.ones(steps)
        return lambda beta: correlate(weight * multiply(a, beta), a, steps)
    if loss != "mean":
        _check.fail("loss", loss, 'to be "mean" for a workload that changes from step to step')
    if steps > LONGEST_SCHEDULE:
        remedy = "Optimise for a constant learning rate, or leave the workload out."
        _check.fail("steps", steps, f"to be at most {LONGEST_SCHEDULE} for a workload that changes from step to step", remedy)
    A = workload.matrix(steps)
    M = A.T @ A
    for p in range(steps - 2, -1, -1):  # sums along the diagonals, from their ends
        M[p, :-1] += M[p + 1, 1:]
    return lambda beta: M @ beta

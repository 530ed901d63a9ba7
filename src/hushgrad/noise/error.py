"""Error per unit of noise, (||B||_F / sqrt(n), max_t ||B_t||) with B = A N; as a quadratic form to optimise; and bounds below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import scipy

from hushgrad import _check
from hushgrad.noise.participation import Pattern
from hushgrad.noise.power_series import correlate, lower_toeplitz, multiply
from hushgrad.noise.workload import AnyWorkload, PrefixSums, Workload, as_workload

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
    if steps > _DENSE:
        remedy = "Ask for a constant learning rate, or for a shorter run with the same schedule."
        _check.fail("steps", steps, f"to be at most {_DENSE} for a workload that changes from step to step", remedy)
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


Form: TypeAlias = Callable[[np.ndarray], np.ndarray]  # from beta to M beta

LONGEST_SCHEDULE = 4096  # steps: M takes O(n³) to make, and an eighth of a gigabyte


@lru_cache(maxsize=8)
def error_form(workload: Workload, steps: int, loss: str) -> Form:
    """From beta to M beta, for the "mean" (times n) or the "max" squared error of ``workload``.

    With N Toeplitz of first column beta, ||A N||_F² = betaᵀ M beta, where M_pq = sum_j (AᵀA)_{j+p, j+q}. For a Toeplitz A with first
    column a it is sum_t (n - t) b_t², b = a * beta, in O(n log n); the squared norm of the last, largest row is the same without the
    weights. For any other A, M is computed once.
    """
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


_DECOMPOSED = 1024  # one singular value decomposition of this size takes a fraction of a second


def prefix_nuclear_norm(steps: int) -> float:
    """||A||_* of prefix sums: sum_k 1 / (2 sin((2k - 1) pi / (4n + 2))), the singular values being known in closed form.

    >>> round(prefix_nuclear_norm(1024) / 1024, 3)
    2.91
    """
    k = np.arange(1, steps + 1)
    return float(np.sum(0.5 / np.sin((2 * k - 1) * np.pi / (4 * steps + 2))))


@lru_cache(maxsize=64)
def rmse_lower_bound(workload: Workload, steps: int, pattern: Pattern) -> tuple[float, str]:
    """(bound, argument): no matrix mechanism has an rmse below the bound under (gap, times) participation.

    For any factorisation A = B C and any random contributions X of one record with E X Xᵀ = M (M is then a convex combination of
    allowed contributions), sens² >= tr(C M Cᵀ), so by the trace inequality for singular values

        sens ||B||_F >= ||C M^½||_F ||B||_F >= ||A M^½||_*   and   rmse >= ||A M^½||_* / sqrt(n).

    The record joins every g-th step from a random first one (g = max(gap, n / times)). Two choices of M are used: contributions of
    random signs (M = I / g), and, up to a thousand steps, half of the time equal ones (M = (I + E Eᵀ) / 2g, E the n x g indicator of
    t mod g), which comes within 5 % of the best M.
    """
    spacing = max(pattern.gap, -(-steps // pattern.times))
    nuclear, how = _nuclear_norm(workload, steps)
    bound, certificate = nuclear / np.sqrt(spacing * steps), f"nuclear norm, {how}"
    if pattern.times > 1 and steps <= _DECOMPOSED:
        mixed = float(scipy.linalg.svdvals(_times_root(workload.matrix(steps), spacing)).sum()) / np.sqrt(spacing * steps)
        if mixed > bound:
            bound, certificate = mixed, "nuclear norm, half equal contributions"
    return float(bound), certificate


def _nuclear_norm(workload: Workload, steps: int) -> tuple[float, str]:
    if isinstance(workload, PrefixSums):
        return prefix_nuclear_norm(steps), "closed form"
    if steps <= _DECOMPOSED:
        return float(scipy.linalg.svdvals(workload.matrix(steps)).sum()), "singular values"
    # Pinching to diagonal blocks never increases the nuclear norm, so the blocks' sum is a bound (a weaker one).
    a = workload.coefficients(steps)
    if a is not None:
        return steps // _DECOMPOSED * float(
            scipy.linalg.svdvals(lower_toeplitz(a[:_DECOMPOSED])).sum()
        ), f"diagonal blocks of {_DECOMPOSED}"
    A = workload.matrix(steps)
    blocks = (A[i : i + _DECOMPOSED, i : i + _DECOMPOSED] for i in range(0, steps, _DECOMPOSED))
    return sum(float(scipy.linalg.svdvals(block).sum()) for block in blocks), f"diagonal blocks of {_DECOMPOSED}"


def _times_root(A: np.ndarray, spacing: int) -> np.ndarray:
    """A R with R² = (I + E Eᵀ) / 2: on a group of k steps R = a I + c 1 1ᵀ has the eigenvalues a and sqrt((1 + k) / 2)."""
    group = np.arange(len(A)) % spacing
    k = np.bincount(group, minlength=spacing)
    a = np.sqrt(0.5)
    c = (np.sqrt((1 + k) / 2) - a) / np.maximum(k, 1)
    E = (group[:, None] == np.arange(spacing)[None, :]).astype(float)
    return np.asarray(a * A + ((A @ E) * c)[:, group])

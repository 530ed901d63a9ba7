"""Certified lower bounds: how small the rmse of any matrix mechanism can be for a workload and a participation.

For any factorisation A = B C and any random contributions X of one record with E X Xᵀ = M (M is then a convex combination of
allowed contributions), sens² >= tr(C M Cᵀ), so by the trace inequality for singular values

    sens ||B||_F >= ||C M^½||_F ||B||_F >= ||A M^½||_*   and   rmse >= ||A M^½||_* / sqrt(n).

Two choices of M are used, both from a record that joins every g-th step from a random first one (g = max(gap, n / times)):
contributions of random signs (M = I / g), and equal contributions (M = E Eᵀ / g, E the n x g indicator of t mod g).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.linalg import svdvals

from hushgrad.noise.participation import Pattern
from hushgrad.noise.workload import PrefixSums, Workload

__all__ = ["prefix_nuclear_norm", "rmse_lower_bound"]

_DENSE = 1024  # one singular value decomposition of this size takes a fraction of a second


def prefix_nuclear_norm(steps: int) -> float:
    """||A||_* of prefix sums: sum_k 1 / (2 sin((2k - 1) pi / (4n + 2))), the singular values being known in closed form.

    >>> round(prefix_nuclear_norm(1024) / 1024, 3)
    2.91
    """
    k = np.arange(1, steps + 1)
    return float(np.sum(0.5 / np.sin((2 * k - 1) * np.pi / (4 * steps + 2))))


@lru_cache(maxsize=64)
def rmse_lower_bound(workload: Workload, steps: int, pattern: Pattern) -> tuple[float, str]:
    """(bound, argument): no matrix mechanism has an rmse below the bound under (gap, times) participation."""
    spacing = max(pattern.gap, -(-steps // pattern.times))
    nuclear, how = _nuclear_norm(workload, steps)
    bound, certificate = nuclear / np.sqrt(spacing * steps), f"nuclear norm, {how}"
    if pattern.times > 1 and steps <= 2 * _DENSE:
        folded = _fold_columns(workload.matrix(steps), spacing)
        equal = float(svdvals(folded).sum()) / np.sqrt(spacing * steps)
        if equal > bound:
            bound, certificate = equal, "nuclear norm, equal contributions"
    return float(bound), certificate


def _nuclear_norm(workload: Workload, steps: int) -> tuple[float, str]:
    if isinstance(workload, PrefixSums):
        return prefix_nuclear_norm(steps), "closed form"
    if steps <= _DENSE:
        return float(svdvals(workload.matrix(steps)).sum()), "singular values"
    # Pinching to diagonal blocks never increases the nuclear norm, so the blocks' sum is a bound (a weaker one).
    a = workload.coefficients(steps)
    if a is not None:
        from hushgrad.noise.series import lower_toeplitz

        return steps // _DENSE * float(svdvals(lower_toeplitz(a[:_DENSE])).sum()), f"diagonal blocks of {_DENSE}"
    A = workload.matrix(steps)
    blocks = (A[i : i + _DENSE, i : i + _DENSE] for i in range(0, steps, _DENSE))
    return sum(float(svdvals(block).sum()) for block in blocks), f"diagonal blocks of {_DENSE}"


def _fold_columns(A: np.ndarray, spacing: int) -> np.ndarray:
    """A E: the columns of A added up by their index modulo ``spacing``."""
    n = len(A)
    padded = np.zeros((n, -(-n // spacing) * spacing))
    padded[:, :n] = A
    return np.asarray(padded.reshape(n, -1, spacing).sum(axis=1))

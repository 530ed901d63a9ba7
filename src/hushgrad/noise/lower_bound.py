"""Certified lower bounds on the rmse of any matrix mechanism for a workload and a participation.

For any factorisation A = B C and any random contributions X of one record with E X Xᵀ = M (M is then a convex combination of
allowed contributions), sens² >= tr(C M Cᵀ), so by the trace inequality for singular values

    sens ||B||_F >= ||C M^½||_F ||B||_F >= ||A M^½||_*   and   rmse >= ||A M^½||_* / sqrt(n).

The record joins every g-th step from a random first one (g = max(gap, n / times)). Two choices of M are used: contributions of
random signs (M = I / g), and, up to a thousand steps, half of the time equal ones (M = (I + E Eᵀ) / 2g, E the n x g indicator of
t mod g), which comes within 5 % of the best M.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy

from hushgrad.noise.participation import Pattern
from hushgrad.noise.power_series import lower_toeplitz
from hushgrad.noise.workload import PrefixSums, Workload

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
    if pattern.times > 1 and steps <= _DENSE:
        mixed = float(scipy.linalg.svdvals(_times_root(workload.matrix(steps), spacing)).sum()) / np.sqrt(spacing * steps)
        if mixed > bound:
            bound, certificate = mixed, "nuclear norm, half equal contributions"
    return float(bound), certificate


def _nuclear_norm(workload: Workload, steps: int) -> tuple[float, str]:
    if isinstance(workload, PrefixSums):
        return prefix_nuclear_norm(steps), "closed form"
    if steps <= _DENSE:
        return float(scipy.linalg.svdvals(workload.matrix(steps)).sum()), "singular values"
    # Pinching to diagonal blocks never increases the nuclear norm, so the blocks' sum is a bound (a weaker one).
    a = workload.coefficients(steps)
    if a is not None:
        return steps // _DENSE * float(scipy.linalg.svdvals(lower_toeplitz(a[:_DENSE])).sum()), f"diagonal blocks of {_DENSE}"
    A = workload.matrix(steps)
    blocks = (A[i : i + _DENSE, i : i + _DENSE] for i in range(0, steps, _DENSE))
    return sum(float(scipy.linalg.svdvals(block).sum()) for block in blocks), f"diagonal blocks of {_DENSE}"


def _times_root(A: np.ndarray, spacing: int) -> np.ndarray:
    """A R with R² = (I + E Eᵀ) / 2: on a group of k steps R = a I + c 1 1ᵀ has the eigenvalues a and sqrt((1 + k) / 2)."""
    group = np.arange(len(A)) % spacing
    k = np.bincount(group, minlength=spacing)
    a = np.sqrt(0.5)
    c = (np.sqrt((1 + k) / 2) - a) / np.maximum(k, 1)
    E = (group[:, None] == np.arange(spacing)[None, :]).astype(float)
    return np.asarray(a * A + ((A @ E) * c)[:, group])

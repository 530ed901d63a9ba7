"""Sensitivity: how far one record moves C G.

A record that takes part in the steps of a pattern p, with contributions x_i of norm at most 1, moves C G by
sum_{i,j in p} X_ij <x_i, x_j> (squared), X = CᵀC. If the X_ij are not negative, equal directions are the worst case and the
value is sum X_ij; otherwise sum |X_ij| is an upper bound, and dropping the cross terms would be a lower one (not privacy).
"""

from __future__ import annotations

import numpy as np

from hushgrad.noise.participation import Pattern
from hushgrad.noise.power_series import lower_toeplitz

DENSE_LIMIT = 1024  # the dynamic programme over a Gram matrix takes O(n² times)


def toeplitz_sensitivity(c: np.ndarray, pattern: Pattern) -> float:
    """Sensitivity of the lower-triangular Toeplitz C with first column ``c`` under (gap, times) participation.

    Exact for one participation, for c >= 0 non-increasing (the leftmost pattern 0, gap, 2 gap, ... is the worst: Kalinin and
    Lampert 2024, Theorem 2), and where c ends within the gap (no cross terms). Elsewhere an upper bound: c is replaced by the
    least non-increasing majorant of |c|, which only enlarges every |X_ij|; or the dynamic programme over |X| if that is smaller.
    """
    support = banded_toeplitz_support(c)
    if pattern.times == 1 or support <= pattern.gap:
        return leftmost(c, pattern)
    majorant = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    bound = leftmost(majorant, pattern)
    if len(c) <= DENSE_LIMIT and not np.array_equal(majorant, c):
        C = lower_toeplitz(c)
        bound = min(bound, gram_sensitivity(C.T @ C, pattern))
    return bound


def banded_toeplitz_support(c: np.ndarray) -> int:
    """The number of bands: the position after the last coefficient that is not 0."""
    nonzero = np.flatnonzero(c)
    return int(nonzero[-1]) + 1 if len(nonzero) else 0


def leftmost(c: np.ndarray, pattern: Pattern) -> float:
    """||sum of columns 0, gap, 2 gap, ...|| of the Toeplitz matrix, in O(n)."""
    n, gap = len(c), pattern.gap
    if pattern.times == 1:
        return float(np.linalg.norm(c))
    if banded_toeplitz_support(c) <= gap:  # disjoint supports: the squared norms of the (possibly cut) columns add up
        squares = np.r_[0.0, np.cumsum(np.square(c))]
        return float(np.sqrt(sum(squares[n - i] for i in range(0, pattern.times * gap, gap) if i < n)))
    blocks = -(-n // gap)
    padded = np.zeros(blocks * gap)
    padded[:n] = c
    total = np.cumsum(padded.reshape(blocks, gap), axis=0)
    total[pattern.times :] -= total[: -pattern.times].copy() if pattern.times < blocks else 0.0
    return float(np.linalg.norm(total.ravel()[:n]))


def gram_sensitivity(X: np.ndarray, pattern: Pattern) -> float:
    """Upper bound from the Gram matrix X = CᵀC: sens² <= max_p sum_{i in p} max_{p' with i} sum_{j in p'} |X_ij|.

    Exact for one participation, where the bands of X end within the gap, and, with X >= 0, for participation in every step
    and in a fixed order (the pattern is then one of ``gap``, and the sum over it is taken as it is).
    Choquette-Choo et al. 2023 (arXiv:2306.08153), appendix on min-sep sensitivity; here p' must contain i.
    """
    W = np.abs(X)
    n = len(W)
    if pattern.times == 1:
        return float(np.sqrt(W.diagonal().max()))
    if pattern.gap == 1 and pattern.times >= n:
        return float(np.sqrt(W.sum()))
    if pattern.fixed_order:
        orders = [np.arange(first, n, pattern.gap)[: pattern.times] for first in range(pattern.gap)]
        return float(np.sqrt(max(W[np.ix_(order, order)].sum() for order in orders)))
    picks = pattern.times - 1
    left = _best_before(W, pattern.gap, picks)
    right = _best_before(W[::-1, ::-1], pattern.gap, picks)[::-1]
    through = W.diagonal() + np.max([left[:, k] + right[:, picks - k] for k in range(picks + 1)], axis=0)
    best = _best_before(np.vstack([through] * 2), pattern.gap, pattern.times, rows=(n - 1 + pattern.gap,) * 2)
    return float(np.sqrt(best[0, pattern.times]))


def _best_before(W: np.ndarray, gap: int, picks: int, rows: tuple[int, ...] | None = None) -> np.ndarray:
    """Row i: for k = 0..picks, the largest sum of at most k entries W[i, j] with j <= i - gap, the j at least ``gap`` apart."""
    height, n = W.shape
    ask = np.array(rows if rows is not None else range(height)) - gap
    answer = np.zeros((height, picks + 1))
    recent = np.zeros((gap, height, picks + 1))  # a ring: the tables of the last ``gap`` positions
    best = np.zeros((height, picks + 1))
    for j in range(n):
        slot = j % gap
        taken = recent[slot, :, :-1] + W[:, j, None]  # recent[slot] is still the table of j - gap
        best = best.copy()
        np.maximum(best[:, 1:], taken, out=best[:, 1:])
        recent[slot] = best
        asking = ask == j
        answer[asking] = best[asking]
    return answer

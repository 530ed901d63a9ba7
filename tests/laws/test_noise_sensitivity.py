"""Bounds on sensitivity are the numbers that their formulas say, neither below nor above: all patterns are tried one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hushgrad.noise import sensitivity
from hushgrad.noise.participation import Pattern
from hushgrad.noise.power_series import lower_toeplitz
from hushgrad.noise.sensitivity import DENSE_LIMIT, gram_sensitivity, leftmost, toeplitz_sensitivity

PATTERNS = [Pattern(gap, times) for gap in (1, 2, 3, 7) for times in (1, 2, 3, 6, 8)]


def _participations(n: int, pattern: Pattern) -> list[tuple[int, ...]]:
    """All sets of steps, without the fixed order."""
    sizes = range(1, min(n, pattern.times) + 1)
    every = itertools.chain.from_iterable(itertools.combinations(range(n), size) for size in sizes)
    return [steps for steps in every if all(b - a >= pattern.gap for a, b in itertools.pairwise(steps))]


def _by_formula(X: np.ndarray, pattern: Pattern) -> float:
    """max_p sum_{i in p} max_{p' with i} sum_{j in p'} |X_ij|, under a root."""
    W, every = np.abs(X), _participations(len(X), pattern)
    through = [max(W[i, list(p)].sum() for p in every if i in p) for i in range(len(W))]
    return math.sqrt(max(sum(through[i] for i in p) for p in every))


def _columns(c: np.ndarray, pattern: Pattern) -> float:
    """||sum of columns 0, gap, 2 gap, ...||."""
    return float(np.linalg.norm(lower_toeplitz(c)[:, :: pattern.gap][:, : pattern.times].sum(axis=1)))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_gram_matrix_gives_the_largest_of_all_patterns(pattern):
    rng = np.random.default_rng(0)
    for n in (1, 2, 4, 6, 6):
        C = rng.standard_normal((n, n))
        assert gram_sensitivity(C.T @ C, pattern) == pytest.approx(_by_formula(C.T @ C, pattern), rel=1e-12)


@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_in_a_fixed_order_the_sum_is_taken_as_it_is(gap, times):
    C = np.random.default_rng(1).standard_normal((7, 7))
    orders = [list(range(first, 7, gap))[:times] for first in range(gap)]
    if times == 1:
        orders = [[i] for i in range(7)]
    worst = max(np.abs(C.T @ C)[np.ix_(order, order)].sum() for order in orders)
    assert gram_sensitivity(C.T @ C, Pattern(gap, times, fixed_order=True)) == pytest.approx(math.sqrt(worst), rel=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_toeplitz_matrix_takes_the_smaller_of_its_two_bounds(pattern):
    rng = np.random.default_rng(2)
    for c in (
        rng.standard_normal(6),
        np.array([1.0, 0.0, -0.9, 0.0, 0.0, 0.0]),
        np.array([1.0, 0.5, 0.4, 0.3, 0.2, 0.1]),
        np.ones(1),
    ):
        majorant = np.array([np.abs(c[i:]).max() for i in range(len(c))])
        C = lower_toeplitz(c)
        exact = pattern.times == 1 or not c[pattern.gap :].any()
        wanted = _columns(c, pattern) if exact else min(_columns(majorant, pattern), _by_formula(C.T @ C, pattern))
        assert toeplitz_sensitivity(c, pattern) == pytest.approx(wanted, rel=1e-12)
        assert leftmost(c, pattern) == pytest.approx(_columns(c, pattern), rel=1e-12)


@pytest.mark.parametrize("pattern", [Pattern(5, 1), Pattern(5, 3)], ids=str)
def test_long_coefficients_that_end_within_the_gap_are_exact(pattern):
    c = np.r_[1.0, 0.0, 0.0, 0.0, 1.0, np.zeros(DENSE_LIMIT)]
    assert toeplitz_sensitivity(c, pattern) == pytest.approx(math.sqrt(2 * pattern.times), rel=1e-12)


def test_the_dynamic_programme_is_for_matrices_up_to_its_limit(monkeypatch):
    monkeypatch.setattr(sensitivity, "gram_sensitivity", lambda X, pattern: 0.5)
    c = np.r_[1.0, 0.0, 1.0, np.zeros(1021)]
    assert toeplitz_sensitivity(c, Pattern(2, 2)) == 0.5
    assert toeplitz_sensitivity(np.r_[c, 0.0], Pattern(2, 2)) == pytest.approx(
        _columns(np.r_[np.ones(3), np.zeros(1022)], Pattern(2, 2))
    )

"""Laws of the audit's bounds, and brute force where the number of guesses is small."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from hushgrad.audit import bounds, one_run
from hushgrad.errors import ArgumentError

counts = st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts, st.floats(0.6, 0.99))
def test_clopper_pearson_inverts_the_binomial_tail(count: tuple[int, int], confidence: float) -> None:
    k, n = count
    p = bounds.rate_upper_bound(k, n, confidence=confidence)
    assert k / n <= p <= 1
    if k < n:
        assert binom.cdf(k, n, p) == pytest.approx(1 - confidence, abs=1e-9)


@given(st.integers(0, 30), st.floats(0, 3), st.floats(1e-9, 1e-2))
def test_one_run_p_value_is_a_probability_that_falls_with_the_guesses(right: int, epsilon: float, delta: float) -> None:
    values = [one_run.one_run_p_value(v, 30, 30, epsilon=epsilon, delta=delta) for v in (right, min(30, right + 1))]
    assert 0 <= values[1] <= values[0] + 1e-12 <= 1 + 1e-12


@given(st.integers(1, 25), st.floats(0, 3))
@settings(max_examples=40)
def test_one_run_p_value_without_delta_is_the_binomial_tail(right: int, epsilon: float) -> None:
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = sum(math.comb(25, k) * p**k * (1 - p) ** (25 - k) for k in range(right, 26))
    assert one_run.one_run_p_value(right, 25, 25, epsilon=epsilon, delta=1e-15) == pytest.approx(tail, abs=1e-9)


@pytest.mark.parametrize("made", [5, 20, 80])
def test_the_recursion_never_rejects_fair_coins_that_the_exact_tail_allows(made: int) -> None:
    """For f(a) = 1 - a (nothing is learned) right guesses are Binomial(r, 1/2): the recursion must be no sharper, and nearly as sharp."""
    rejected = [v for v in range(made + 1) if one_run.refutes_curve(v, made, made, lambda x: 1.0 - x, level=0.05)]
    exact = [v for v in range(made + 1) if binom.sf(v - 1, made, 0.5) <= 0.05]
    assert set(rejected) <= set(exact)
    assert len(exact) - len(rejected) <= 1
    assert rejected == list(range(min(rejected), made + 1))


@given(st.floats(0.0, 2.0), st.floats(0.01, 0.5), st.integers(40, 100))
@settings(max_examples=40)
def test_a_weaker_claim_is_harder_to_refute(mu: float, more: float, right: int) -> None:
    from scipy.special import ndtr, ndtri

    def refuted(m: float) -> bool:
        return one_run.refutes_curve(right, 100, 200, lambda x: ndtr(ndtri(1.0 - x) - m), level=0.05)

    assert refuted(mu) or not refuted(mu + more)


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_epsilon_by_clopper_pearson_is_the_definition_in_both_directions(a: float, b: float) -> None:
    rates = bounds.ErrorRates(threshold=0, false_alarms=a, misses=b, false_alarms_up=a, misses_up=b, confidence=0.95)
    e, d = bounds.epsilon_clopper_pearson(rates, delta=1e-5), 1e-5
    assert 1 - b <= math.exp(e) * a + d + 1e-9
    assert 1 - a <= math.exp(e) * b + d + 1e-9


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="scores"):
        bounds.error_rates([], [1.0], threshold=0.0)
    with pytest.raises(ArgumentError, match="NaN"):
        bounds.error_rates([np.nan], [1.0], threshold=0.0)
    with pytest.raises(ArgumentError, match="successes"):
        bounds.rate_upper_bound(3, 2, confidence=0.9)
    with pytest.raises(ArgumentError, match="thresholds"):
        bounds.grid_rates([1.0], [0.0], thresholds=[])
    with pytest.raises(ArgumentError, match="at least two"):
        bounds.split_rates([1.0], [0.0])
    with pytest.raises(ArgumentError, match="members"):
        one_run.correct_guesses([1.0, 2.0], [True], 1.0)


def test_scores_that_are_all_equal_tell_nothing_however_the_canaries_are_listed() -> None:
    """Members listed after the others: an order kept for equal scores would guess every one of them right."""
    listed = np.repeat([False, True], 500)
    for scores in (np.zeros(1000), np.repeat([0.0, 1.0, 0.0, 1.0], 250)):
        assert one_run.epsilon_one_run(scores, listed, delta=1e-5) == 0.0
        assert one_run.epsilon_one_run_fdp(scores, listed, delta=1e-5) == 0.0


def test_infinite_scores_are_scores_and_no_number_is_none() -> None:
    rng = np.random.default_rng(0)
    inside, outside = (np.where(rng.random(400) < 0.5, -np.inf, np.inf) for _ in range(2))
    assert bounds.epsilon_clopper_pearson(bounds.split_rates(inside, outside), delta=1e-5) < 0.5
    with pytest.raises(ArgumentError, match="threshold=nan"):
        bounds.error_rates([0.0], [1.0], threshold=math.nan)
    with pytest.raises(ArgumentError, match="no NaN"):
        one_run.epsilon_one_run([math.nan, 1.0], [True, False], delta=1e-5)

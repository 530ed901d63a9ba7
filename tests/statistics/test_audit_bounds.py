"""The bounds hold as often as they say, and they have power. Scores are Gaussian with a known mu, so epsilon is known.

Each false-alarm test makes 200 seeded repetitions of a bound at 95 %. If a bound errs in at most 5 % of all runs, more than 22 errors
in 200 have a probability below 4e-4 (binomial tail), which is the false-alarm rate of the test itself, were it drawn anew.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from hushgrad.accounting import gaussian_epsilon
from hushgrad.audit import bounds, one_run
from hushgrad.events import Gaussian

REPEATS, ALLOWED, DELTA = 200, 22, 1e-5


def draw(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    coins = rng.random(count) < 0.5
    return rng.normal(size=count) + mu * coins, coins


BOUNDS = {
    "fixed": lambda s, m: bounds.epsilon_gaussian(bounds.error_rates(s[m], s[~m], threshold=0.5), delta=DELTA),
    "split": lambda s, m: bounds.epsilon_gaussian(bounds.split_rates(s[m], s[~m]), delta=DELTA),
    "grid": lambda s, m: max(
        bounds.epsilon_gaussian(r, delta=DELTA) for r in bounds.grid_rates(s[m], s[~m], thresholds=[-0.5, 0.5, 1.5])
    ),
    "plain": lambda s, m: bounds.epsilon_clopper_pearson(bounds.error_rates(s[m], s[~m], threshold=0.5), delta=DELTA),
    "one run": lambda s, m: one_run.epsilon_one_run(s, m, delta=DELTA, fractions=(0.2, 1.0)),
    "one run fdp": lambda s, m: one_run.epsilon_one_run_fdp(s, m, delta=DELTA, fractions=(0.2, 1.0)),
}


def test_the_allowance_is_what_it_says() -> None:
    assert binom.sf(ALLOWED, REPEATS, 0.05) < 4e-4


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_exceeds_the_truth_as_rarely_as_stated(name: str) -> None:
    truth = gaussian_epsilon(1.0, DELTA)
    repeats = REPEATS if "one" not in name else 60
    errors = sum(BOUNDS[name](*draw(1.0, 300, seed)) > truth for seed in range(repeats))
    assert errors <= binom.isf(4e-4, repeats, 0.05)


@pytest.mark.parametrize(
    ("name", "least"), [("fixed", 3.2), ("split", 2.7), ("grid", 3.0), ("plain", 0.6), ("one run", 1.4), ("one run fdp", 2.0)]
)
def test_a_bound_has_power(name: str, least: float) -> None:
    """The median over 15 runs with 2,000 canaries, where the truth is 4.38; at noise / 2 each of the strong ones passes 4.38."""
    assert np.median([BOUNDS[name](*draw(1.0, 2000, seed)) for seed in range(15)]) >= least
    if name in ("fixed", "split", "grid", "one run fdp"):
        assert np.median([BOUNDS[name](*draw(2.0, 2000, seed)) for seed in range(15)]) > 4.38


def test_a_threshold_chosen_on_the_counted_scores_is_caught() -> None:
    """The planted defect: the best of 60 thresholds, not paid for. At mu = 0 and 50 % it errs in more than half of the runs.

    The limit is passed with probability 1e-4 by a bound that errs in half of them.
    """

    def greedy(s: np.ndarray, m: np.ndarray) -> float:
        tried = np.quantile(s, np.linspace(0.01, 0.99, 60))
        return max(bounds.mu_lower_bound(bounds.error_rates(s[m], s[~m], threshold=float(t), confidence=0.5)) for t in tried)

    def honest(s: np.ndarray, m: np.ndarray) -> float:
        return bounds.mu_lower_bound(bounds.split_rates(s[m], s[~m], confidence=0.5))

    limit = binom.isf(1e-4, 100, 0.5)
    assert sum(honest(*draw(0.0, 1000, seed)) > 0 for seed in range(100)) <= limit
    assert sum(greedy(*draw(0.0, 1000, seed)) > 0 for seed in range(100)) > limit


def test_the_gate_at_the_claimed_curve() -> None:
    """True at sigma = 1: no refutation in 200 runs beyond the allowance; noise of half the size: refuted in every one of 20."""

    def gap(mu: float, seed: int) -> float:
        scores, members = draw(mu, 600, seed)
        rates = bounds.error_rates(scores[members], scores[~members], threshold=0.5)
        return bounds.curve_gap(rates, lambda a: float(ndtr(ndtri(1.0 - a) - 1.0)))

    assert sum(gap(1.0, seed) > 0 for seed in range(REPEATS)) <= ALLOWED
    assert all(gap(2.0, seed) > 0 for seed in range(20))


def test_an_event_and_its_curve_are_the_same_claim() -> None:
    scores, members = draw(1.0, 1000, 0)
    rates = bounds.error_rates(scores[members], scores[~members], threshold=0.5)
    exact = bounds.curve_gap(rates, lambda a: float(ndtr(ndtri(1.0 - a) - 1.0)))
    assert bounds.curve_gap(rates, Gaussian(1.0)) == pytest.approx(exact, abs=2e-3)
    assert bounds.curve_gap(rates, Gaussian(1.0)) <= exact + 1e-9  # the accountant's curve lies below: rounding never refutes


def test_a_replaced_record_is_two_contributions_away() -> None:
    scores, members = draw(2.0, 1000, 1)
    rates = bounds.error_rates(scores[members], scores[~members], threshold=1.0)
    assert bounds.curve_gap(rates, Gaussian(1.0)) > 0 > bounds.curve_gap(rates, Gaussian(1.0), relation="replace_one")

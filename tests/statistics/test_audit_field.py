"""The noise's tests and the composed bounds by themselves: they err as often as they say, and brute force agrees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from hushgrad.accounting import epsilon
from hushgrad.audit import composed_bounds, noise_tests
from hushgrad.audit.composed_bounds import Composition, StepScores, step_fdp, step_gdp
from hushgrad.audit.noise_tests import Long, Runs, Wide, field_checks
from hushgrad.events import Gaussian
from hushgrad.train import Plan

SIZES = {"a": 40, "b": 3, "c": 120}


def drawn(rng: np.random.Generator, runs: int = 12, steps: int = 24) -> tuple[list[Wide], Long, Runs]:
    of = np.repeat(np.arange(3), list(SIZES.values()))
    wide = Wide(steps=(0, 1), rows={name: rng.standard_normal((2, size)) for name, size in SIZES.items()})
    long = Long(steps=tuple(range(steps)), names=tuple(SIZES), of=of, white=rng.standard_normal((steps, len(of))))
    return [wide], long, Runs(white=rng.standard_normal((runs, 300)))


def test_right_noise_is_called_wrong_as_seldom_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a level of 2 % for each check, of 150 draws at most 12 may fail (probability 2e-5 at exactly 2 %)."""
    monkeypatch.setattr(noise_tests, "FALSE_ALARM", 0.02)
    rng, failed = np.random.default_rng(0), {}
    for _ in range(150):
        for check in field_checks(*drawn(rng)):
            failed[check.name] = failed.get(check.name, 0) + (not check.passed)
    assert max(failed.values()) <= 12, failed


def test_any_fixed_dependence_of_second_order_is_projected_out() -> None:
    """A random rotation mixes every number with its copy: no lag, no pair of columns shows it, the projection does."""
    rng = np.random.default_rng(1)
    half = rng.standard_normal((32, 400))
    turned = np.linalg.qr(rng.standard_normal((800, 800)))[0]
    dependent = Runs(white=np.hstack([half, half]) @ turned)
    wides, long, right = drawn(rng, runs=32)
    assert "noise projection" in {check.name for check in field_checks(wides, long, dependent) if not check.passed}
    assert all(check.passed for check in field_checks(wides, long, right))


@pytest.mark.parametrize("seed", range(5))
def test_a_composition_bounds_brute_force_from_below_and_closely(seed: int) -> None:
    """Binary losses: the composition is binomial."""
    rng = np.random.default_rng(seed)
    a, b, steps = rng.uniform(0.01, 0.45), rng.uniform(0.01, 0.45), int(rng.integers(1, 40))
    mass, loss = np.array([1 - b, b]), np.log([(1 - b) / a, b / (1 - a)])
    counts = np.arange(steps + 1)
    losses, weights = counts * loss[0] + (steps - counts) * loss[1], binom.pmf(counts, steps, 1 - b)
    for eps in (0.0, 0.5, 2.0, 6.0):
        exact = float((weights * np.maximum(0.0, -np.expm1(eps - losses))).sum())
        found = Composition(mass, loss, steps).delta(eps)
        assert found <= exact * (1 + 1e-9) + 1e-15
        assert found >= exact - 0.02 * max(1.0, eps) * max(exact, 1e-3)


def scores(rng: np.random.Generator, noise: float, size: int = 6000) -> StepScores:
    return StepScores(inside=1 + noise * rng.standard_normal(size), outside=noise * rng.standard_normal(2 * size))


def test_bounds_from_steps_exceed_the_truth_as_seldom_as_stated() -> None:
    """At 80 %, of 40 runs at most 18 may exceed (probability 1e-4 at exactly 20 %); the bounds are conservative, so far fewer do."""
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=20)
    truth, rng = plan.guarantee().epsilon, np.random.default_rng(2)
    wrong = {"steps f-dp": 0, "steps gdp": 0}
    for seed in range(40):
        for bound in composed_bounds.composed_bounds(plan, scores(rng, 1.0), confidence=0.8, seed=seed):
            wrong[bound.method] += bound.epsilon > truth
            assert bound.epsilon > 0.4 * truth
    assert max(wrong.values()) <= 18


def test_one_step_of_everybody_is_the_gaussian_mechanism() -> None:
    truth = epsilon(Gaussian(2.0), delta=1e-5)
    found = step_fdp(scores(np.random.default_rng(3), 2.0, 200_000), noise=2.0, rate=1.0, steps=1, delta=1e-5, confidence=0.95)
    assert 0.3 * truth < found < truth  # one step: an error rate below 1e-5 is never seen
    plan = Plan.dpgd(noise_multiplier=2.0, delta=1e-5, dataset_size=50, steps=4)
    assert step_gdp(plan, ratio=1.0, reach=2.0) == pytest.approx(epsilon(Gaussian(1.0), delta=1e-5), rel=1e-3)
    assert step_gdp(plan, ratio=2.0, reach=2.0) < step_gdp(plan, ratio=1.0, reach=2.0)


def test_the_limits_are_those_of_their_laws() -> None:
    rng = np.random.default_rng(4)
    over = sum(composed_bounds.noise_upper(rng.standard_normal(500), confidence=0.9) < 1 for _ in range(500))
    assert over <= 0.1 * 500 + 4 * math.sqrt(45)
    over = sum(composed_bounds.rate_lower(int(rng.binomial(1000, 0.03)), 1000, confidence=0.9) > 0.03 for _ in range(500))
    assert over <= 0.1 * 500 + 4 * math.sqrt(45)
    over = sum(composed_bounds.contribution_lower(scores(rng, 1.0, 50), confidence=0.9) > 1 for _ in range(500))
    assert over <= 0.1 * 500 + 4 * math.sqrt(45)

"""Plans against figures that were measured elsewhere."""

from __future__ import annotations

import pytest

from hushgrad.train import Plan


def test_the_readme_plan():
    """Source: dp-accounting 0.6.0 (PLD, add/remove) calibrates sigma = 0.694 for this run; 2344 steps."""
    plan = Plan.dpsgd(epsilon=3, delta=1e-5, max_grad_norm=1.0, batch_size=256, dataset_size=60_000, epochs=10)
    assert plan.steps == 2344
    assert plan.noise_multiplier == pytest.approx(0.694, abs=1e-3)
    assert 2.99 < plan.guarantee().epsilon <= 3.0


def test_calibration_meets_its_target_from_below_for_correlated_noise():
    """One Gaussian mechanism: (epsilon, 1e-5) at sigma / sens; analytic Gaussian mechanism, Balle and Wang 2018."""
    from scipy import optimize, stats

    plan = Plan.dpftrl(epsilon=2.0, delta=1e-5, batch_size=100, dataset_size=1000, epochs=2)

    def delta(sigma: float) -> float:
        return (
            stats.norm.cdf(0.5 / sigma - 2.0 * sigma) - float(stats.norm.cdf(-0.5 / sigma - 2.0 * sigma)) * 2.718281828459045**2
        )

    exact = optimize.brentq(lambda sigma: delta(sigma) - 1e-5, 0.5, 10.0)
    assert plan.event().noise_multiplier == pytest.approx(exact, rel=2e-3)
    assert plan.guarantee().epsilon <= 2.0


def test_replace_one_costs_as_twice_the_distance():
    """A record replaced moves the sum by 2 C: the noise needed doubles (no sampling)."""
    add = Plan.dpgd(epsilon=1.0, delta=1e-6, dataset_size=1000, steps=30)
    replace = Plan.dpgd(epsilon=1.0, delta=1e-6, dataset_size=1000, steps=30, relation="replace_one")
    assert replace.noise_multiplier == pytest.approx(2 * add.noise_multiplier, rel=2e-3)


def test_the_digest_never_changes():
    """Stored checkpoints and reports refer to plans by it."""
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=64, steps=20)
    assert plan.digest.startswith("e3ae710bc5ca")

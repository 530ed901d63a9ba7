"""The classical theorems: right where they hold, refused where they do not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.accounting import classical, epsilon, gaussian_delta
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import Gaussian, PureDP

small = st.floats(0.01, 0.99)
deltas = st.floats(-10.0, -2.0).map(lambda x: 10.0**x)


@given(e=small, d=deltas)
@settings(max_examples=60, deadline=None)
def test_the_classical_gaussian_holds_below_one_and_wastes(e: float, d: float) -> None:
    sigma = classical.classical_gaussian_sigma(epsilon=e, delta=d)
    assert gaussian_delta(1 / sigma, e) <= d
    assert classical.analytic_gaussian_sigma(epsilon=e, delta=d) <= sigma


@given(e=st.floats(1e-3, 500.0), d=deltas)
@settings(max_examples=60, deadline=None)
def test_the_analytic_gaussian_is_tight(e: float, d: float) -> None:
    sigma = classical.analytic_gaussian_sigma(epsilon=e, delta=d)
    assert gaussian_delta(1 / sigma, e) <= d < gaussian_delta(1 / (sigma * (1 - 1e-6)), e)


def test_the_classical_gaussian_is_refused_from_one_on() -> None:
    for e in (1.0, 3.0, 10.0):
        needed = classical.analytic_gaussian_sigma(epsilon=e, delta=1e-5)
        with pytest.raises(NoTheorem, match=f"{needed:.6g}"):
            classical.classical_gaussian_sigma(epsilon=e, delta=1e-5)
    # the reason: the formula is false at epsilon = 10
    wrong = math.sqrt(2 * math.log(1.25e5)) / 10
    assert gaussian_delta(1 / wrong, 10.0) > 2e-5


def test_subsampling_relations_are_not_mixed() -> None:
    both = classical.subsampled(epsilon=1.0, delta=1e-5, rate=0.1, relation="replace_one", sampling="without_replacement")
    assert both == pytest.approx((math.log(1 + 0.1 * (math.e - 1)), 1e-6))
    for relation, sampling in (("replace_one", "poisson"), ("add_remove", "without_replacement")):
        with pytest.raises(NoTheorem):
            classical.subsampled(epsilon=1.0, delta=1e-5, rate=0.1, relation=relation, sampling=sampling)
    with pytest.raises(ArgumentError, match="sampling"):
        classical.subsampled(epsilon=1.0, delta=1e-5, rate=0.1, relation="add_remove", sampling="shuffled")
    huge = classical.subsampled(epsilon=1e4, delta=0.0, rate=0.1, relation="add_remove", sampling="poisson")
    assert huge[0] == pytest.approx(1e4 + math.log(0.1))


@given(e=small, slack=deltas, steps=st.integers(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_corollary_follows_from_the_theorem(e: float, slack: float, steps: int) -> None:
    step = classical.advanced_composition_step(epsilon=e, slack=slack, steps=steps)
    total, _ = classical.advanced_composition(epsilon=step, delta=0.0, steps=steps, slack=slack)
    assert total <= e
    assert epsilon(PureDP(step) * steps, delta=slack, accountant="optimal") <= e


def test_the_corollary_checks_both_conditions() -> None:
    with pytest.raises(NoTheorem, match="below 1"):
        classical.advanced_composition_step(epsilon=1.0, slack=1e-6, steps=10)
    with pytest.raises(NoTheorem, match="2 ln"):
        classical.advanced_composition_step(epsilon=0.9, slack=0.7, steps=10)


@given(e=small, d=deltas, steps=st.integers(1, 1000))
@settings(max_examples=40, deadline=None)
def test_the_lectures_noise_is_enough(e: float, d: float, steps: int) -> None:
    """Full-batch gradients of a mean of n losses: distance 2L/n under replace-one."""
    n, lipschitz = 1000, 2.0
    sigma = classical.dp_gd_sigma(epsilon=e, delta=d, lipschitz=lipschitz, dataset_size=n, steps=steps)
    event = Gaussian(sigma * n / lipschitz) * steps  # in units of one contribution, L/n
    assert epsilon(event, delta=d, accountant="gdp", relation="replace_one") <= e


def test_dp_lssgd_is_refused_for_the_papers_own_experiment() -> None:
    setting = {"delta": 1e-5, "lipschitz": 1.0, "dataset_size": 50_000, "batch_size": 128, "steps": 19_531}
    for e in (0.1, 0.2, 0.3, 1.0):
        with pytest.raises(NoTheorem, match="no mu meets both conditions"):
            classical.dp_lssgd_sigma(epsilon=e, **setting)  # type: ignore[arg-type]
    for e in (5.0, 20.0):
        assert classical.dp_lssgd_sigma(epsilon=e, **setting) > 0  # type: ignore[arg-type]


def test_dp_lssgd_noise_is_the_printed_formula() -> None:
    n, b, steps, e, d, mu = 50_000, 128, 19_531, 5.0, 1e-5, 0.4
    alpha = math.log(1 / d) / ((1 - mu) * e) + 1
    assert alpha <= math.log(mu * n**3 * e / (5 * b**3 * steps * alpha + mu * b * n**2 * e))
    assert 5 * b**2 * steps * alpha / (mu * n**2 * e) >= 1.5
    found = classical.dp_lssgd_sigma(epsilon=e, delta=d, lipschitz=2.0, dataset_size=n, batch_size=b, steps=steps, mu=mu)
    assert found == pytest.approx(math.sqrt(20 * steps * alpha * 4.0 / (mu * n**2 * e)))
    best = classical.dp_lssgd_sigma(epsilon=e, delta=d, lipschitz=2.0, dataset_size=n, batch_size=b, steps=steps)
    assert best <= found

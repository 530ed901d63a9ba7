"""Budgets that are spent after looking: the reference pool, the Rényi filter with a plan's order, the ledger's default."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from hushgrad.accounting import Filter, calibrate, calibrate_steps, epsilon
from hushgrad.accounting.reference_pool import Pool
from hushgrad.budget import Ledger
from hushgrad.budget.pricing import exceeds, fits, price
from hushgrad.budget.values import Dataset
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import ZCDP, ApproxDP, Event, Gaussian, Laplace, NonPrivate, PureDP

STEP = Gaussian(1.1).sampled(rate=0.01)


def test_a_pool_admits_its_plan_and_whatever_is_dominated_by_it() -> None:
    plan = STEP * 100 + Gaussian(5.0) * 3 + PureDP(0.1)
    pool = Pool(plan)
    assert pool.take(plan) and not pool.take(STEP) and not pool.take(Gaussian(1e3)) and not pool.take(PureDP(0.1))
    pool = Pool(plan)
    assert pool.take(Gaussian(2.0).sampled(rate=0.001) * 99) and pool.take(STEP) and not pool.take(STEP)
    half = 3.535533905932738  # 5 / sqrt(2), rounded up: a plan is not exceeded by the last digit
    assert pool.take(Gaussian(half)) and pool.take(Gaussian(10.0) * 4) and not pool.take(Gaussian(1e3))
    for other in (Gaussian(1.0).sampled(rate=0.01), Gaussian(1.1).sampled(rate=0.011), Laplace(100.0), PureDP(0.05)):
        assert not Pool(STEP * 100 + PureDP(0.1)).take(other)


def test_a_plan_that_just_fits_is_admitted_in_any_order(tmp_path: Path) -> None:
    """A part of a plan costs no more than the plan, and a part of a reservation no more than it, though they are rounded differently."""
    steps = [Gaussian(1.9417761661974977).sampled(rate=0.01) * 3, Gaussian(2.8145601805451483).sampled(rate=0.01) * 10]
    steps.append(Gaussian(16.012480391322246) * 3)
    plan = steps[0] + steps[1] + steps[2]
    delta = 5.971967406703167e-07
    budget = epsilon(plan, delta=delta)
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=budget, delta=delta, plan=plan)
    spent = Filter(epsilon=budget, delta=delta, plan=plan)
    for step in steps[::-1]:
        ledger.reserve("patients", step)
        spent.spend(step)
        assert spent.used <= 1
    with pytest.raises(BudgetExceeded):
        ledger.reserve("patients", Gaussian(1e6))


@pytest.mark.parametrize("composition", ["adaptive", "pld"])
def test_a_part_of_a_reservation_is_no_overrun(composition: str) -> None:
    dataset = Dataset(name="d", epsilon=50.0, delta=1e-6, composition=composition)
    most = Gaussian(1.10354).sampled(rate=0.0363206) * 1482
    for few in (Laplace(1e5), Gaussian(1e6), Gaussian(500.0).sampled(rate=0.01)):
        assert not exceeds(dataset, most + few * 13, few * 14 + most)
        assert exceeds(dataset, most + few + Gaussian(0.5), most + few)


def test_what_a_pool_has_given_never_costs_more_than_the_plan() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        plan = STEP * 40 + Gaussian(0.8).sampled(rate=0.002) * 10 + Gaussian(6.0) * 5
        budget = epsilon(plan, delta=1e-6)
        pool, given = Pool(plan), []
        for _ in range(60):
            step: Event = Gaussian(10 ** rng.uniform(-0.15, 1)).sampled(
                rate=rng.choice([1.0, 0.01, 0.002, 0.0005])
            ) * rng.randint(1, 12)
            if pool.take(step):
                given.append(step)
        assert given
        together = sum(given[1:], given[0])
        assert epsilon(together, delta=1e-6) <= epsilon(pool.used, delta=1e-6) * (1 + 1e-3) <= budget * (1 + 2e-3)


def test_nothing_is_admitted_beyond_a_plan_or_a_budget_by_a_last_digit() -> None:
    for sigma in (1.3, 0.7, 41.9):
        less = math.nextafter(sigma, 0.0)
        assert Pool(Gaussian(sigma) * 7).take(Gaussian(sigma) * 7) and not Pool(Gaussian(sigma)).take(Gaussian(less))
        assert Pool(Gaussian(2 * sigma) * 4).take(Gaussian(sigma)) and not Pool(Gaussian(sigma)).take(Gaussian(2 * less) * 4)
    almost = 1.9999999999999996  # its inverse is that of the next double
    assert not Pool(Gaussian(math.nextafter(almost, 2.0)).sampled(rate=0.1)).take(Gaussian(almost).sampled(rate=0.1))
    plan = Gaussian(3.0) * 5 + Gaussian(1.7)
    cost = epsilon(plan, delta=1e-6)
    Filter(epsilon=cost, delta=1e-6, plan=plan)
    with pytest.raises(ArgumentError, match="to fit into the budget"):
        Filter(epsilon=math.nextafter(cost, 0.0), delta=1e-6, plan=plan)
    data = Dataset(name="d", epsilon=math.nextafter(cost, 0.0), delta=1e-6, composition="pld")
    assert not fits(data, (plan,)) and fits(replace(data, epsilon=cost), (Gaussian(1.7), Gaussian(3.0) * 2, Gaussian(3.0) * 3))


def test_sums_of_a_filter_are_exact() -> None:
    budget = Filter(epsilon=1.0, delta=1e-6, kind="basic")
    for _ in range(10):
        budget.spend(PureDP(0.1))
    assert budget.used == 1.0 and not budget.admits(PureDP(1e-30)) and not budget.admits(NonPrivate())
    for kind, step, little in (
        ("gdp", Gaussian(10.0), Gaussian(1e10)),
        ("zcdp", ZCDP(0.01), ZCDP(1e-22)),
        ("rdp", ZCDP(0.01), ZCDP(1e-22)),
    ):
        budget = Filter(epsilon=2.0, delta=1e-6, kind=kind)
        budget.spend(step)
        before = budget.used
        for _ in range(3):
            budget.spend(little)  # each too little for the last digit of the sum
        assert budget.used > before


def test_filters_with_a_plan() -> None:
    steps = calibrate_steps(STEP, epsilon=2.0, delta=1e-6)
    pool = Filter(epsilon=2.0, delta=1e-6, plan=STEP * steps)
    assert pool.kind == "pool" and pool.admits(STEP * steps) and not pool.admits(STEP * (steps + 1))
    pool.spend(STEP * steps)
    assert 0.999 < pool.used <= 1.0
    with pytest.raises(BudgetExceeded, match="declared plan"):
        pool.spend(STEP)
    with pytest.raises(ArgumentError, match="to fit into the budget"):
        Filter(epsilon=2.0, delta=1e-6, plan=STEP * (steps + 10))
    with pytest.raises(ArgumentError, match="plan"):
        Filter(epsilon=2.0, delta=1e-6, kind="pool")
    little = Gaussian(0.8).sampled(rate=0.01)
    shares = [Filter(epsilon=3.0, delta=1e-6, kind="rdp", plan=plan).used_with(little * 100) for plan in (little * 100, None)]
    assert shares[0] < 0.6 * shares[1]  # the order that suits the budget alone admits fewer by far


def _responses(e: np.ndarray, pure: float) -> np.ndarray:
    """Delta of randomised response at ``pure``, at any epsilon."""
    p, x = math.exp(pure) / (1 + math.exp(pure)), np.exp(np.minimum(e, 50.0))
    return np.maximum(p - x * (1 - p), 0) + np.maximum((1 - p) - x * p, 0)


def _chosen_after_looking(dataset: Dataset, sigma: float) -> float:
    """The exact delta of a Gaussian followed by the worse of two steps that each still fit, chosen by its privacy loss."""
    first = Gaussian(sigma)

    def most(step: object, high: float) -> float:
        low = 0.0
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(dataset, (first, step(middle))) else (low, middle)  # type: ignore[operator]
        return low

    pure, lost = most(PureDP, 1.0), most(lambda d: ApproxDP(1e-9, d), dataset.delta)
    mu = 1 / sigma
    loss = np.linspace(mu * mu / 2 - 9 * mu, mu * mu / 2 + 9 * mu, 100_001)
    weight = norm.pdf(loss, mu * mu / 2, mu) * (loss[1] - loss[0])
    left = dataset.epsilon - loss
    worse = np.maximum(_responses(left, pure), lost + (1 - lost) * np.maximum(1 - np.exp(np.minimum(left, 0.0)), 0.0))
    return float(np.sum(weight * worse))


def test_choices_after_looking_stay_within_the_budget() -> None:
    adaptive, fixed = (Dataset(name="d", epsilon=1.0, delta=1e-6, composition=kind) for kind in ("adaptive", "pld"))
    assert _chosen_after_looking(fixed, 6.0) > 1.3e-6  # what a composition of what was spent is worth here
    for sigma in (6.0, 8.0, 15.0):
        assert _chosen_after_looking(adaptive, sigma) <= 1e-6 * (1 + 1e-6)


def test_the_default_admits_a_calibrated_run_and_goes_on_adaptively(tmp_path: Path) -> None:
    assert Dataset(name="d", epsilon=1.0, delta=1e-6).composition == "adaptive"
    old = Dataset.from_json({"account": "Dataset", "name": "d", "epsilon": 1.0, "delta": 1e-6, "composition": "pld"})
    assert old.composition == "pld"
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("full", epsilon=2.0, delta=1e-6)
    sigma = calibrate(lambda s: Gaussian(s).sampled(rate=0.05) * 200, epsilon=2.0, delta=1e-6)
    run = ledger.reserve("full", Gaussian(sigma).sampled(rate=0.05) * 200)  # only the pool of this run admits it
    with pytest.raises(BudgetExceeded):
        ledger.reserve("full", Gaussian(1e4))
    ledger.commit(run, Gaussian(sigma).sampled(rate=0.05) * 120)
    ledger.reserve("full", Gaussian(2 * sigma).sampled(rate=0.01) * 80)  # chosen after looking, in the place of the rest
    ledger.add("part", epsilon=2.0, delta=1e-6)
    ledger.reserve("part", Gaussian(10.0))
    assert ledger.status("part").epsilon == pytest.approx(epsilon(Gaussian(10.0), delta=1e-6), rel=1e-9)
    ledger.reserve("part", PureDP(0.3))
    ledger.add("planned", epsilon=2.0, delta=1e-6, plan=Gaussian(sigma).sampled(rate=0.05) * 200)
    ledger.reserve("planned", Gaussian(3.0 * sigma).sampled(rate=0.02) * 200)
    with pytest.raises(BudgetExceeded):
        ledger.reserve("planned", Gaussian(sigma).sampled(rate=0.05))


def test_a_cancelled_reservation_decides_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("d", epsilon=1.0, delta=1e-6)
    held = ledger.reserve("d", PureDP(1.0), hold=True)
    ledger.cancel(held)
    ledger.reserve("d", Gaussian(20.0))
    ledger.reserve("d", Gaussian(20.0).sampled(rate=0.1))
    (dataset,) = ledger.datasets()
    assert dataset.first == Gaussian(20.0) and price(dataset, ()) == 0.0


def test_the_order_without_a_plan_suits_steps_on_samples_too() -> None:
    """Below the order where their divergences jump, and Gaussian steps keep 95 % of what the best order admits."""
    for step, epsilon_, delta_, least in [
        (Gaussian(0.6).sampled(rate=0.001), 8.0, 1e-6, 100_000),
        (Gaussian(1.1).sampled(rate=0.00427), 3.0, 1e-5, 17_500),
        (Gaussian(20.0), 3.0, 1e-5, 0.94 * 178),
    ]:
        assert Filter(epsilon=epsilon_, delta=delta_, kind="rdp").used_with(step * int(least)) <= 1.0
    budget = Filter(epsilon=1.0, delta=1e-5, kind="rdp")
    with pytest.raises(BudgetExceeded, match="give plan="):  # no single order admits many of these: a pool admits 254
        budget.spend(Gaussian(1.0).sampled(rate=0.01))
    plan = Gaussian(1.0).sampled(rate=0.01)
    assert Filter(epsilon=1.0, delta=1e-5, kind="rdp", plan=plan).admits(plan)
    assert Filter(epsilon=1.0, delta=1e-5, plan=plan * 254).admits(plan * 254)

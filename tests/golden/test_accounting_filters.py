"""Filters, number by number: what each kind adds up, when it is full, which Rényi order it takes."""

from __future__ import annotations

import math

import pytest

from hushgrad.accounting import Filter, epsilon
from hushgrad.accounting.filter_rules import _default_order, _orders, _rho_for, order_for
from hushgrad.accounting.zcdp import ZCDPLoss
from hushgrad.errors import ArgumentError, BudgetExceeded, NoTheorem
from hushgrad.events import ApproxDP, Compose, Gaussian, Laplace, PureDP, RandomizedResponse, Relation

HALF = 5e-5  # of the delta below
ADVANCED = math.sqrt(2 * math.log(1 / HALF) * 0.14) + 0.07
ROOM = 2.0 - math.log1p(-1 / 8) + (math.log(1e-4) + math.log(8)) / 7


@pytest.mark.parametrize(
    ("kind", "step", "used"),
    [
        ("basic", PureDP(0.5) * 3, 0.75),
        ("basic", Compose([ApproxDP(0.25, 2e-5) * 2, PureDP(0.5) * 2]), 0.75),
        ("basic", ApproxDP(0.125, 2e-5) * 4, 0.8),
        ("advanced", Compose([ApproxDP(0.1, 1e-7) * 10, PureDP(0.2)]), ADVANCED / 2),
        ("advanced", ApproxDP(0.001, 1e-5) * 4, 0.8),
        ("zcdp", Gaussian(4.0) * 2, 2 / 32 / _rho_for(2.0, 1e-4)),
        ("rdp", Gaussian(3.0) * 2, 8 / 9 / ROOM),
    ],
)
def test_what_a_step_uses(kind, step, used):
    budget = Filter(epsilon=2.0, delta=1e-4, kind=kind, **({"order": 8.0} if kind == "rdp" else {}))
    assert budget.used == 0.0
    assert budget.used_with(step) == pytest.approx(used, rel=1e-9)
    budget.spend(step)
    assert budget.used_with(Compose(())) == budget.used == pytest.approx(used, rel=1e-9)  # nothing costs nothing
    fits = used * 2 <= 1
    assert budget.admits(step) is fits
    if not fits:
        with pytest.raises(BudgetExceeded, match="The step was not taken"):
            budget.spend(step)
        assert budget.used == pytest.approx(used, rel=1e-9)


@pytest.mark.parametrize("kind", ["basic", "zcdp", "gdp", "rdp"])
def test_nothing_before_the_first_step(kind):
    assert Filter(epsilon=2.0, delta=1e-4, kind=kind).used_with(Compose(())) == 0.0


def test_a_pool_is_used_up_by_epsilon():
    budget = Filter(epsilon=4.0, delta=1e-5, plan=Gaussian(4.0) * 8)
    budget.spend(Gaussian(4.0) * 3)
    assert budget.used == pytest.approx(epsilon(Gaussian(4.0) * 3, delta=1e-5) / 4.0, rel=1e-9)


def test_what_is_too_large_for_a_double_is_infinite():
    """A sum of fractions may be larger than every double: basic filters ended in an OverflowError."""
    for kind in ("basic", "advanced", "zcdp", "rdp"):
        budget = Filter(epsilon=2.0, delta=1e-5, kind=kind)
        assert budget.used_with(PureDP(1e308) * 10) == math.inf and not budget.admits(PureDP(1e308) * 10)
    revealed = Compose([RandomizedResponse(0.0), PureDP(0.5)])
    assert Filter(epsilon=2.0, delta=1e-5, kind="basic", relation="replace_one").used_with(revealed) == math.inf


def test_what_a_kind_has_no_theorem_for():
    with pytest.raises(NoTheorem, match="one \\(epsilon, delta\\) each"):
        Filter(epsilon=2.0, delta=1e-5, kind="basic").admits(Compose([PureDP(0.1), Gaussian(5.0)]))
    with pytest.raises(NoTheorem, match="No Rényi order leaves room"):
        Filter(epsilon=1e-12, delta=1e-300, kind="rdp")
    for order in (1.5, 1e9 + 0.5):
        with pytest.raises(ArgumentError, match="order="):
            Filter(epsilon=1e-3, delta=1e-300, kind="rdp", order=order)


@pytest.mark.parametrize(("budget", "delta"), [(50.0, 1e-5), (1.0, 1e-5), (0.01, 1e-8)])
def test_rho_is_the_largest_that_fits(budget, delta):
    rho = _rho_for(budget, delta)
    assert ZCDPLoss(rho).epsilon(delta) <= budget < ZCDPLoss(rho * (1 + 1e-7)).epsilon(delta)


def test_orders_are_a_grid_of_logarithms():
    assert _orders(-1.0, 1.0, 0.5) == pytest.approx([1 + math.exp(x) for x in (-1.0, -0.5, 0.0, 0.5)], rel=1e-15)
    assert (_default_order(1.0, 1e-5), _default_order(3.0, 1e-6)) == pytest.approx((15.013203607733608, 7.423736771429133))


@pytest.mark.parametrize(
    ("plan", "budget", "delta", "order"),
    [
        (Gaussian(5.0) * 10, 3.0, 1e-5, 6.206979827179849),
        (Gaussian(2.0).sampled(rate=0.01) * 100, 1.0, 1e-5, 15.87973172487283),
        (Gaussian(4.0) * 20, 4.9, 1e-5, 5.3059595283452055),  # does not fit
        (Gaussian(1.0) * 50, 1.0, 1e-5, 17.776850672139872),
        (Laplace(1.0) * 3, 2.0, 1e-6, 8023.456895351563),
    ],
)
def test_the_order_for_a_plan(plan, budget, delta, order):
    assert order_for.__wrapped__(plan, budget, delta, Relation.ADD_REMOVE) == pytest.approx(order, rel=1e-9)

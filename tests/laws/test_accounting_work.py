"""How much the accountants compute for an answer: counted, not timed."""

from __future__ import annotations

import statistics

import pytest

from hushgrad import Plan, planner
from hushgrad.accounting import certified_calibration, delta_curve, epsilon
from hushgrad.accounting.calibration_target import likely_factor
from hushgrad.accounting.rdp import RDP, RDPLoss
from hushgrad.events import Gaussian, Laplace, Relation
from hushgrad.noise import optimise_blt

USUAL = Gaussian(0.69).sampled(rate=256 / 60_000) * 2350


@pytest.fixture
def asked(monkeypatch):
    """The Rényi questions that were asked."""
    questions = []
    for name in ("epsilon", "delta"):
        old = getattr(RDPLoss, name)
        monkeypatch.setattr(RDPLoss, name, lambda self, x, old=old: questions.append(x) or old(self, x))
    return questions


def test_a_direction_that_does_not_decide_asks_for_no_other_bound(asked):
    assert epsilon(USUAL, delta=1e-5) < 3.1
    assert asked == []  # the smaller direction is computed coarsely on purpose, which is no reason for doubt


def test_a_curve_asks_for_the_other_bound_where_it_may_matter_only(asked):
    points = [3.0 * (k / 200) ** 1.5 for k in range(201)]
    found = delta_curve(USUAL, points)
    assert len(asked) <= 20
    net = RDP().loss(USUAL)
    assert all(delta <= net.delta(e) for delta, e in zip(found[::20], points[::20], strict=True))


CASES = [
    (3.0, 1e-5, 256 / 60_000, 2350),
    (3.0, 1e-5, 0.137, 74),
    (1.0, 1e-6, 0.01, 1000),
    (8.0, 1e-5, 0.1, 500),
    (0.3, 1e-7, 0.05, 3000),
    (2.0, 1e-5, 1.0, 100),
]


@pytest.mark.parametrize("relation", list(Relation))
def test_a_usual_calibration_takes_few_questions(relation):
    taken = []
    for budget, delta, rate, steps in CASES:
        event = Gaussian(1.0).sampled(rate=rate) * steps
        start = likely_factor(event, budget, delta, relation)
        found = certified_calibration(
            lambda noise, rate=rate, steps=steps: Gaussian(noise).sampled(rate=rate) * steps,
            epsilon=budget,
            delta=delta,
            relation=relation,
            start=start,
        )
        assert found.epsilon <= budget < found.neighbour_epsilon
        assert 0 < 1 - found.neighbour / found.value < 2.1e-5
        taken.append(found.evaluations)
    assert statistics.median(taken) <= 7 and max(taken) <= 10, taken


def test_where_nothing_is_known_no_guess_is_made():
    assert likely_factor(Laplace(1.0) * 3, 1.0, 1e-5, "add_remove") is None
    plan = Plan.dpsgd(epsilon=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=5, before=Laplace(10.0))
    assert plan.guarantee().epsilon <= 1.0


def test_a_family_whose_member_brings_nothing_is_not_optimised_further():
    optimise_blt.optimise_blt.cache_clear()
    found = planner.compare(epsilon=3.0, delta=1e-5, dataset_size=6000, batch_size=60, epochs=10)
    names = {dropped.name: dropped.reason for dropped in found.dropped}
    assert names["BLT(3)"].startswith("It is no better than BLT(2)")
    assert names["BLT(4)"] == "Not tried: BLT(3), which keeps less, is left out already."
    assert optimise_blt.optimise_blt.cache_info().misses == 2

"""Laws of the planner: budgets are kept, limits are obeyed, more budget never hurts."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from hushgrad.accounting import epsilon
from hushgrad.errors import ArgumentError
from hushgrad.events import Relation
from hushgrad.planner import Question, compare, dry_run, one_more_epoch, plan_for, sweep
from hushgrad.sampling import RoundRobin
from hushgrad.train import Plan

SMALL = {"delta": 1e-5, "dataset_size": 1000, "batch_size": 50, "epochs": 3}


def test_every_plan_keeps_its_promise_and_none_is_wasteful():
    for candidate in compare(epsilon=1.5, **SMALL):
        plan = candidate.plan
        assert 1.5 * 0.995 < plan.guarantee().epsilon <= 1.5, candidate.name
        assert plan.steps == 60 and plan.batch_size == 50
        assert plan.noise_multiplier * plan.noise.unit_error(steps=60)[0] == pytest.approx(candidate.rmse)
        less = plan.noise.event(0.98 * plan.noise_multiplier, plan.participation, plan.steps)
        assert epsilon(less, delta=1e-5, relation=plan.relation) > 1.5  # the law can fail


def test_best_first_with_reasons_and_bounds():
    found = compare(epsilon=4.0, parameters=1000, **SMALL)
    assert [c.relative for c in found] == sorted(c.relative for c in found) and found[0].relative == 1
    for candidate in found:
        assert candidate.reason.endswith(".") and candidate.state_bytes == 4000 * candidate.state
        assert (candidate.gap is None) == (not isinstance(candidate.plan.sampler, RoundRobin))
        assert candidate.gap is None or candidate.gap >= 0
    dense = next(c for c in found if c.name == "Dense")
    others = [c for c in found if isinstance(c.plan.sampler, RoundRobin) and c is not dense]
    assert all(dense.rmse <= c.rmse * 1.0001 and dense.gap <= c.gap * 1.0001 for c in others)


def test_memory_is_a_limit():
    free = compare(epsilon=4.0, parameters=1000, **SMALL)
    tight = compare(epsilon=4.0, parameters=1000, memory=8000, **SMALL)
    assert {c.name for c in tight} == {c.name for c in free if c.state_bytes <= 8000}
    assert len(tight) < len(free)
    assert any("8e+03 are allowed" in dropped.reason for dropped in tight.dropped)
    assert [c.name for c in compare(epsilon=4.0, memory=2, **SMALL)] == [c.name for c in tight]  # 2 numbers of 4 bytes each
    stateless = plan_for(epsilon=4.0, parameters=1000, memory=0, **SMALL)
    assert all(plan.noise.state_size(steps=60) == 0 for plan in stateless)


def test_without_sampling_nothing_is_amplified():
    found = compare(epsilon=4.0, sampling_allowed=False, **SMALL)
    assert {type(c.plan.sampler) for c in found} == {RoundRobin}
    assert "Independent" in {c.name for c in found}
    assert any("ruled out" in dropped.reason for dropped in found.dropped)


def test_a_fixed_order_needs_whole_epochs():
    found = compare(epsilon=4.0, delta=1e-5, dataset_size=1000, batch_size=50, steps=57)
    assert not any(isinstance(c.plan.sampler, RoundRobin) for c in found)
    assert any("whole epochs" in dropped.reason for dropped in found.dropped)


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_other_relations(relation):
    plans = plan_for(epsilon=4.0, relation=relation, **SMALL)
    assert plans and all(plan.relation is Relation.of(relation) and plan.guarantee().epsilon <= 4.0 for plan in plans)


def test_sweeps_are_monotone():
    question = Question(epsilon=1.0, delta=1e-5, dataset_size=200, batch_size=50, epochs=2, memory=0)
    errors = [point.error for point in sweep(question, over="epsilon", values=[0.5, 2, 8])]
    assert all(a > b for a, b in itertools.pairwise(errors))
    sizes = sweep(question, over="batch_size", values=[25, 50])
    assert [point.plan.batch_size for point in sizes] == [25, 50]
    steps = sweep(question, over="steps", values=[8, 16])
    assert [point.plan.steps for point in steps] == [8, 16]
    assert steps[0].noise_multiplier != steps[1].noise_multiplier


def test_one_more_epoch_costs_both_ways():
    for plan in plan_for(epsilon=2.0, **SMALL):
        if type(plan.noise).__name__ == "Dense":
            with pytest.raises(ArgumentError, match="plan the longer run anew"):
                one_more_epoch(plan, dataset_size=1000)
            continue
        cost = one_more_epoch(plan, dataset_size=1000)
        assert cost.longer_steps == plan.steps + 20
        assert cost.longer_epsilon > cost.epsilon, plan.noise
        assert cost.longer_noise_multiplier > 0.5 * cost.noise_multiplier
        assert "One more epoch (20 steps)" in str(cost)


def test_json_round_trip():
    found = json.loads(json.dumps(compare(epsilon=2.0, **SMALL).to_json()))
    assert [Plan.from_json(c["plan"]) for c in found["candidates"]] == plan_for(epsilon=2.0, **SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": None}, "exactly one of epochs and steps"),
        ({"steps": 3}, "exactly one of epochs and steps"),
        ({"batch_size": 2000}, "to be at most dataset_size=1000"),
        ({"memory": -1.0}, "memory=-1.0"),
        ({"epsilon": 0.0}, "epsilon=0"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ArgumentError, match=message):
        compare(**{"epsilon": 1.0, **SMALL, **changes})


def test_dry_run_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    plan = Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=50, dataset_size=1000, epochs=3)
    before = [p.clone() for p in model.parameters()]
    batch = (torch.randn(50, 4), torch.zeros(50, dtype=torch.long))
    random = torch.get_rng_state()
    found = dry_run(model, optimizer, plan, batch, nn.functional.cross_entropy)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    numbers = sum(p.numel() for p in model.parameters())
    assert found.parameter_bytes == 4 * numbers and found.optimizer_bytes >= 8 * numbers
    assert found.noise_bytes == 4 * numbers * plan.noise.state_size(steps=plan.steps)
    assert found.seconds == pytest.approx(60 * found.seconds_per_step) and "60 steps of" in str(found)


def test_a_mechanism_of_ones_own_is_ranked_among_the_others():
    from hushgrad.noise import Independent, Tree

    question = {"epsilon": 4.0, "delta": 1e-6, "dataset_size": 400, "batch_size": 100, "epochs": 2}
    found = compare(**question, mechanisms=[Tree(), Independent()])
    errors = {candidate.name: candidate.rmse for candidate in found}
    assert errors["your Tree, fixed order"] == errors["Tree"]
    assert errors["your Independent, random batches"] == errors["DP-SGD"]
    assert "your Tree, random batches" in {*errors, *(dropped.name for dropped in found.dropped)}

"""Laws of plans: JSON both ways, one digest each, events that grow, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import events
from hushgrad.clipping import Flat
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import Relation
from hushgrad.noise import BLT, Independent
from hushgrad.sampling import BallsInBins, FixedSize, Poisson, RoundRobin
from hushgrad.train import EMA, SVRG, Ball, Box, Plan, Polyak, Tail

sizes = st.integers(2, 10_000).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))


@st.composite
def plans(draw) -> Plan:
    size, n = draw(sizes)
    common = {
        "delta": draw(st.sampled_from([1e-9, 1e-5, 0.01])),
        "max_grad_norm": draw(st.floats(1e-3, 1e3)),
        "noise_multiplier": draw(st.floats(0.01, 1e3)),
        "average": draw(st.sampled_from([None, "tail", "ema", "polyak", Tail(0.25), EMA(0.9), Polyak()])),
        "projection": draw(st.sampled_from([None, Ball(2.0), Box(-1.0, 1.0)])),
        "denoise": draw(st.sampled_from([None, SVRG()])),
        "unit": draw(st.sampled_from(["example", "user"])),
        "dataset_size": n,
    }
    recipe = draw(st.sampled_from(["dpsgd", "dpftrl", "dpgd"]))
    if recipe == "dpgd":
        return Plan.dpgd(steps=draw(st.integers(1, 50)), **common)
    if recipe == "dpftrl":
        return Plan.dpftrl(batch_size=size, epochs=draw(st.integers(1, 3)), noise=Independent(), **common)
    sampling = draw(st.sampled_from(["poisson", "truncated_poisson", "fixed_size"]))
    relation = "replace_one" if sampling == "fixed_size" else "add_remove"
    return Plan.dpsgd(batch_size=size, epochs=draw(st.integers(1, 3)), sampling=sampling, relation=relation, **common)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_json_both_ways_and_one_digest(plan):
    text = json.dumps(plan.to_json())
    again = Plan.from_json(text)
    assert again == plan and again.digest == plan.digest and hash(again) == hash(plan)
    assert len(plan.digest) == 64
    other = replace(plan, noise_multiplier=plan.noise_multiplier * 2)
    assert other.digest != plan.digest
    assert str(plan.steps) in str(plan) and plan.digest[:12] in str(plan)


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_the_cost_of_a_prefix(plan, data):
    steps = data.draw(st.integers(0, plan.steps))
    event = plan.event(steps)
    assert (event == events.Compose(())) == (steps == 0)
    assert plan.event(plan.steps) == plan.event()
    with pytest.raises(ArgumentError, match="longer plan"):
        plan.event(plan.steps + 1)


def test_poisson_steps_compose():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=7)
    assert plan.event(3) == events.Gaussian(1.0).sampled(rate=0.1) * 3


def test_equal_plans_have_equal_digests_whatever_the_number_type():
    one = Plan.dpsgd(noise_multiplier=1, delta=1e-5, batch_size=10, dataset_size=100, steps=7)
    assert replace(one, batch_size=10.0).digest == one.digest == replace(one, noise_multiplier=1.0).digest


def test_the_default_recipe_is_poisson_with_a_public_divisor():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=256, dataset_size=60_000, epochs=10)
    assert plan.sampler == Poisson(rate=256 / 60_000, steps=2344) and plan.batch_size == 256
    assert plan.clip == Flat(1.0) and plan.relation is Relation.ADD_REMOVE


def test_dpftrl_defaults_to_zero_out_over_one_order_and_resolves_its_noise():
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-5, batch_size=100, dataset_size=1000, epochs=3)
    assert plan.relation is Relation.ZERO_OUT and plan.participation == events.MinSep(gap=10, times=3)
    assert isinstance(plan.noise, BLT)
    assert plan.noise == plan.noise.resolved(steps=plan.steps, participation=plan.participation)  # nothing left to choose
    assert Plan.from_json(plan.to_json()) == plan
    assert isinstance(plan.event(), events.Gaussian)  # the whole run is one Gaussian mechanism
    assert plan.event(5).noise_multiplier >= plan.event().noise_multiplier  # a prefix costs no more


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 3.0}, "exactly one of epsilon"),
        ({"noise_multiplier": None}, "exactly one of epsilon"),
        ({"epochs": 1}, "exactly one of epochs"),
        ({"steps": None}, "exactly one of epochs"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 101}, "at most dataset_size"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"sampling": "poison"}, "Did you mean 'poisson'"),
        ({"relation": "remove"}, "relation"),
        ({"average": "tial"}, "Did you mean 'tail'"),
        ({"unit": ""}, "unit"),
        ({"unit": "user\n```"}, "unit"),
        ({"sampling": Poisson(rate=0.1, steps=9)}, "left to the sampler"),
    ],
)
def test_bad_arguments_get_one_clear_sentence(change, message):
    good = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100, "steps": 7}
    with pytest.raises(ArgumentError, match=message):
        Plan.dpsgd(**{**good, **change})


def test_what_no_theorem_covers_cannot_be_planned():
    common = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100}
    with pytest.raises(NoTheorem):  # correlated noise has no amplification under independent sampling
        Plan.dpsgd(steps=20, noise=BLT(buffers=2), **common)
    with pytest.raises(NoTheorem, match="public"):  # the mechanism has a theorem, the accountant has none
        Plan.dpsgd(steps=20, sampling="fixed_size", relation="add_remove", **common)
    fixed = RoundRobin(batch_size=10, dataset_size=100, epochs=2, shuffle=False)
    with pytest.raises(NoTheorem, match="zero_out"):
        Plan.dpftrl(sampling=fixed, relation="add_remove", noise=Independent(), **common)
    Plan.dpftrl(sampling=fixed, relation="replace_one", noise=Independent(), **common)


def test_a_sampler_of_other_steps_is_refused():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=7)
    with pytest.raises(ArgumentError, match="sampler's steps"):
        replace(plan, steps=8)


def test_samplers_by_name():
    common = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 95}
    fixed = Plan.dpsgd(steps=3, sampling="fixed_size", relation="replace_one", **common).sampler
    assert fixed == FixedSize(size=10, dataset_size=95, steps=3)
    bins = {"sampling": "balls_in_bins", "noise": BLT(buffers=2), **common}
    assert Plan.dpftrl(epochs=2, **bins).sampler == BallsInBins(bins=10, epochs=2)
    with pytest.raises(ArgumentError, match="whole epochs"):
        Plan.dpftrl(steps=11, **bins)
    cyclic = Plan.dpftrl(steps=12, sampling="cyclic_poisson", noise=Independent(), **common).sampler
    assert cyclic.rate * 95 / cyclic.period == pytest.approx(10)


def test_an_uncalibrated_plan_has_no_event():
    plan = replace(Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=7), noise_multiplier=None)
    with pytest.raises(ArgumentError, match="calibrated"):
        plan.event()
    assert "not calibrated" in str(plan)


def test_unknown_json_is_refused():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=7)
    with pytest.raises(ArgumentError):
        Plan.from_json({**plan.to_json(), "secret": 1})
    with pytest.raises(ArgumentError):
        Plan.from_json({**plan.to_json(), "plan": "Other"})

"""What is released before a run is part of its plan: of the event, the calibration, the books and every question about them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad.errors import ArgumentError
from hushgrad.events import Compose, Gaussian, NonPrivate, PureDP

COMMON = {"delta": 1e-5, "batch_size": 50, "dataset_size": 500}
METHODS = [
    (hushgrad.Plan.dpsgd, {**COMMON, "steps": 20}),
    (hushgrad.Plan.dpftrl, {**COMMON, "epochs": 2}),
    (hushgrad.Plan.dpgd, {"delta": 1e-5, "dataset_size": 500, "steps": 5}),
]


@pytest.mark.parametrize(("make", "options"), METHODS)
@pytest.mark.parametrize("before", [Gaussian(8.0), PureDP(0.3), Gaussian(9.0) + Gaussian(12.0)])
def test_the_noise_is_calibrated_for_both_together(make, options, before):
    alone, plan = make(epsilon=2.0, **options), make(epsilon=2.0, before=before, **options)
    assert plan.noise_multiplier > alone.noise_multiplier
    both = before + alone.event_with(plan.noise_multiplier)
    found = hushgrad.epsilon(both, delta=1e-5, relation=plan.relation)
    assert 1.99 < found <= 2.0
    assert plan.guarantee().epsilon == pytest.approx(found, abs=1e-9)
    assert hushgrad.epsilon(before + alone.event(), delta=1e-5, relation=plan.relation) > 2.0  # counted only: too much


@pytest.mark.parametrize(("make", "options"), METHODS)
def test_a_run_has_spent_it_from_its_beginning(make, options):
    plan = make(noise_multiplier=3.0, before=Gaussian(8.0), **options)
    model = nn.Linear(2, 2)
    private = hushgrad.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0)
    assert private.spent().epsilon == pytest.approx(hushgrad.epsilon(Gaussian(8.0), delta=1e-5, relation=plan.relation))
    for x, y in private.loader(TensorDataset(torch.randn(500, 2), torch.randint(2, (500,)))):
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        private.optimizer.step()
        assert private.ledger.event() == plan.event(private.steps)
    assert private.spent().epsilon == plan.guarantee().epsilon
    assert private.ledger.steps == plan.steps


def test_a_budget_that_the_release_alone_uses_up_allows_no_step():
    plan = hushgrad.Plan.dpsgd(noise_multiplier=3.0, before=Gaussian(1.0), steps=20, **COMMON)
    model = nn.Linear(2, 2)
    private = hushgrad.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0, max_epsilon=1.0)
    assert private.steps_allowed == 0


def test_it_is_written_down_and_old_files_read_the_same():
    plan = hushgrad.Plan.dpsgd(noise_multiplier=3.0, before=Gaussian(8.0), steps=20, **COMMON)
    assert hushgrad.Plan.from_json(plan.to_json()) == plan
    assert "Gaussian(8)" in str(plan)
    plain = hushgrad.Plan.dpsgd(noise_multiplier=3.0, steps=20, **COMMON)
    assert "before" not in plain.to_json()
    assert plan.digest != plain.digest
    assert plan.event(0) == Compose([Gaussian(8.0)])


@pytest.mark.parametrize("before", [NonPrivate(), 8.0])
def test_what_has_no_finite_price_is_refused(before):
    with pytest.raises(ArgumentError, match="before"):
        hushgrad.Plan.dpsgd(noise_multiplier=3.0, before=before, steps=20, **COMMON)


@pytest.mark.parametrize(("make", "options"), METHODS)
@pytest.mark.parametrize("before", [Gaussian(30.0), PureDP(0.3)])
def test_a_budget_that_is_used_up_before_the_run_is_refused_by_its_name(make, options, before):
    alone = hushgrad.epsilon(before, delta=1e-5)
    with pytest.raises(ArgumentError, match=r"Expected epsilon=0\.1 to be more than 0\.\d+, which .* before the run costs alone"):
        make(epsilon=0.1, before=before, **options)
    assert make(epsilon=1.1 * alone, before=before, **options).guarantee().epsilon <= 1.1 * alone

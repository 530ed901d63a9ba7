"""What a training loop does by habit, in the middle of a run: it goes on as it should, or is refused by a sentence about that habit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError, CaptureError, NotIsolated
from hushgrad.train import Plan, make_private

DATA = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))


def trained(model, *, before=None, between=None, after=None, optimizer=None, **options):
    """The run, after six steps with these habits; each is called with the number of the step and what the loop has."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, steps=6)
    private = make_private(model, optimizer, plan, seed=1, **options)
    try:
        for step, (x, y) in enumerate(private.loader(DATA)):
            optimizer.zero_grad()
            if before is not None:
                before(step, model, x)
            F.cross_entropy(model(x), y).backward()
            if between is not None:
                between(step, model, x)
            optimizer.step()
            if after is not None:
                after(step, model, x)
        return private, private.spent()
    finally:
        private.detach()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))


class Blocks(nn.Module):
    """As many of its blocks run as the loop says; it counts its passes, and takes only so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)
        self.active, self.temperature, self.passes, self.most = 1, 1.0, 0, most

    def forward(self, x):
        self.passes += 1
        if not 0.5 < self.temperature <= self.most:
            raise ValueError("no such temperature")
        for k in range(self.active):
            x = x + self.blocks[k](x)
        return self.head(x) / self.temperature


def test_numbers_of_a_schedule_are_not_tried_where_no_pass_has_them():
    def dropout(step, model, x):
        model[1].p = 0.1 + 0.02 * step

    private, spent = trained(mlp(), before=dropout)
    assert private.steps == 6 and spent.epsilon < 10

    lot = random.Random(2)
    for _ in range(4):
        rate, every = lot.uniform(0.9, 0.99), lot.choice((1, 2, 3))

        def both(step, model, x, rate=rate, every=every):
            model.active, model.temperature = 1 + min(2, step // every), rate**step

        private, _ = trained(Blocks(lot.choice((1, 4))), before=both, unused="zero")
        assert private.steps == 6


class MixesLater(Blocks):
    """A counter mixes the examples as of its 40th pass; beside it a number that cannot be advanced."""

    def forward(self, x):
        y = super().forward(x)
        return y + y.mean(0) if self.passes > 40 else y


def test_a_counter_is_advanced_though_another_number_cannot_be():
    def cool(step, model, x):
        model.temperature = 0.99**step

    with pytest.raises(NotIsolated, match="later pass"):
        trained(MixesLater(1), before=cool, unused="zero")


def test_a_search_for_anomalies_looks_at_the_users_passes_only():
    with torch.autograd.detect_anomaly(check_nan=True):
        private, _ = trained(mlp())
        assert private.steps == 6 and torch.is_anomaly_enabled()


def swapped(model):
    model[3]._parameters["weight"] = nn.Parameter(torch.randn(3, 8))


REPLACEMENTS = {
    "parametrization": lambda model: parametrizations.weight_norm(model[3]),
    "pruning": lambda model: prune.l1_unstructured(model[3], "weight", 4),
    "dictionary": swapped,
}


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("at", [0, 2])
def test_a_replaced_parameter_is_what_the_sentence_is_about(how, at):
    with pytest.raises(CaptureError, match="parameters are not those that were made private"):
        trained(mlp(), before=lambda step, model, x: REPLACEMENTS[how](model) if step == at else None)


@pytest.mark.parametrize("at", [0, 2])
def test_a_model_inside_of_a_transformation_is_refused_or_evaluated(at):
    def each(step, model, x):
        if step == at:
            torch.func.vmap(lambda row: model(row[None]).sum(), randomness="different")(x)

    with pytest.raises(CaptureError, match=r"torch\.func"):
        trained(mlp(), before=each)
    private, _ = trained(mlp(), before=lambda step, model, x: torch.no_grad()(each)(step, model, x))
    assert private.steps == 6


def test_a_layer_of_two_runs_belongs_to_one_of_them():
    """Both would clip and noise it, and each would change what the other has released."""
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, steps=2)
    shared = nn.Linear(6, 8)
    first, second = (nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    run = make_private(first, optimizers[0], plan, seed=1)
    with pytest.raises(ArgumentError, match=r"share no trained parameter with another private run, as 0\."):
        make_private(second, optimizers[1], plan, seed=2)
    run.detach()
    make_private(second, optimizers[1], plan, seed=2).detach()  # once the first is over
    shared.requires_grad_(False)
    for k, model in enumerate((first, second)):  # a frozen one may be everybody's
        make_private(model, torch.optim.SGD(model[2].parameters(), lr=0.1), plan, seed=k)

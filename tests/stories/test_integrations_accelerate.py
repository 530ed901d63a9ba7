"""accelerate: the run's own loader passes through ``prepare``; batches that accelerate deals are never called private."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'hushgrad[hf]'")

from accelerate.data_loader import prepare_data_loader, skip_first_batches  # noqa: E402

from hushgrad.errors import ArgumentError, CaptureError  # noqa: E402
from hushgrad.train import Plan, make_private  # noqa: E402


def data():
    rng = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(12, 4, generator=rng), torch.randint(3, (12,), generator=rng))


def private_run(model=None):
    torch.manual_seed(1)
    model = nn.Linear(4, 3) if model is None else model
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, max_grad_norm=0.5, batch_size=2, dataset_size=12, steps=10)
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=2)


def train(private, model, optimizer, loader, backward):
    for x, y in loader:
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    return private


def test_prepare_leaves_the_runs_loader_as_it_is():
    model = nn.Linear(4, 3)
    plain = private_run(copy.deepcopy(model))
    train(plain, plain.model, plain.optimizer, plain.loader(data()), torch.Tensor.backward)

    accelerator, private = accelerate.Accelerator(cpu=True), private_run(model)
    loader = private.loader(data())
    prepared, optimizer, same = accelerator.prepare(model, private.optimizer, loader)
    assert same is loader  # it is no DataLoader: accelerate neither shards it nor moves its batches
    train(private, prepared, optimizer, loader, accelerator.backward)
    assert torch.equal(model.weight, plain.model.weight)
    assert private.spent() == plain.spent()
    assert math.isfinite(private.spent().epsilon)


@pytest.mark.parametrize(
    "deal",
    [prepare_data_loader, accelerate.Accelerator(cpu=True).prepare_data_loader, lambda loader: skip_first_batches(loader, 2)],
    ids=["prepare_data_loader", "accelerator.prepare_data_loader", "skip_first_batches"],
)
def test_it_cannot_be_dealt_anew(deal):
    private = private_run()
    with pytest.raises(ArgumentError, match="dealt by its own loader"):
        deal(private.loader(data()))
    assert private.steps == 0


def test_batches_that_accelerate_deals_are_not_called_private():
    """On two processes a Poisson batch sampler's batches go to the processes in turn: half the steps, twice the rate."""
    private = private_run()
    redealt = prepare_data_loader(DataLoader(data(), batch_size=2), num_processes=2, process_index=0)
    assert len(redealt) == 3  # of 6
    train(private, private.model, private.optimizer, redealt, torch.Tensor.backward)
    assert private.steps == 3
    assert private.spent().epsilon == math.inf


def test_accumulation_is_noticed():
    accelerator, private = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), private_run()
    model, optimizer = accelerator.prepare(private.model, private.optimizer)
    with pytest.raises(CaptureError, match=r"Call optimizer.step\(\) once for each batch"):
        for x, y in private.loader(data()):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
    assert private.steps == 0

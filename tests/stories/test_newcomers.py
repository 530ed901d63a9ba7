"""Somebody with an Opacus script, or with the usual slips: each is answered by name, and the next right call works."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hushgrad
from hushgrad.errors import ArgumentError

DATA = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
PLAN = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, batch_size=10, dataset_size=40, steps=2)


def attached() -> tuple[nn.Module, torch.optim.Optimizer, hushgrad.train.Private]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, hushgrad.make_private(model, optimizer, PLAN)


@pytest.mark.parametrize(
    "data, options",
    [
        (DataLoader(DATA, batch_size=10), {}),
        ([], {}),
        (DATA, {"shuffle": True}),
        (DATA, {"batch_size": 4}),
        (DATA, {"sampler": None}),
        ([DATA[0]], {"sampler": None, "shuffle": True}),
    ],
    ids=["a loader", "empty", "shuffle", "batch_size", "sampler", "other data, wrong option"],
)
@pytest.mark.parametrize("durable", [False, True])
def test_a_refused_loader_binds_the_run_to_nothing(data, options, durable, tmp_path):
    model, optimizer, private = attached()
    checkpoint = hushgrad.Checkpoint(tmp_path / "run", private) if durable else None
    with pytest.raises(ArgumentError):
        private.loader(data, **options)
    for x, y in private.loader(DATA):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert private.spent().epsilon < float("inf")
    if checkpoint is not None:
        checkpoint.save()
    private.detach()


def test_three_names_on_the_left_and_an_engines_methods_are_answered():
    _, _, private = attached()
    with pytest.raises(ArgumentError, match="private = make_private"):
        _model, _optimizer, _loader = private
    with pytest.raises(AttributeError, match=r"get_epsilon is here: private\.spent\(\)"):
        private.get_epsilon(1e-3)
    with pytest.raises(AttributeError, match=r"no attribute 'speent'$"):
        private.speent()
    assert not hasattr(private, "accountant")
    private.detach()


def test_what_opacus_has_wrapped_is_refused_by_name():
    opacus = pytest.importorskip("opacus")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, stepping, _ = opacus.PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(DATA, batch_size=10), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.raises(ArgumentError, match="'GradSampleModule' not to be Opacus'"):
        hushgrad.make_private(wrapped, optimizer, PLAN)
    with pytest.raises(ArgumentError, match="'DPOptimizer' to have the hooks"):
        hushgrad.make_private(nn.Linear(4, 2), stepping, PLAN)


def test_a_layer_of_opacus_is_a_layer_like_others():
    layers = pytest.importorskip("opacus.layers.dp_multihead_attention")
    model = layers.SequenceBias(4)
    hushgrad.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAN).detach()


@pytest.mark.parametrize("loss", ["cross_entropy", None, nn.CrossEntropyLoss, torch.tensor(1.0)])
def test_a_loss_that_is_no_function_is_refused_before_the_first_batch(loss):
    model, _, private = attached()
    with pytest.raises(ArgumentError, match="to be a function of outputs and targets"):
        private.loss(loss)
    private.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="to be a function of outputs and targets"):
        hushgrad.fit(model, loss, optimizer, DATA, PLAN, progress=False)

"""Ctrl-C in a pass, and averages that are swapped in: the weights of the run stay those of a run that is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from several_processes import run
from torch import nn

from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.train import Checkpoint, Plan, make_private

PROGRAM = Path(__file__).with_name("interrupted_program.py")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run(PROGRAM, tmp_path_factory.mktemp("sharded"), 1, {})[0]


def test_averages_of_a_sharded_model_are_looked_at_and_trained_on_by_nobody(sharded):
    whole, shards = sharded["averaged"]
    assert torch.allclose(torch.tensor(whole[0]), torch.tensor(shards[0]), atol=1e-6)
    assert torch.allclose(torch.tensor(whole[1]), torch.tensor(shards[1]), atol=1e-5)


def test_a_step_of_a_sharded_model_is_repeated_as_it_would_have_been_after_an_interrupt_in_any_probe(sharded):
    whole, *interrupted = sharded["interrupted"]
    assert all(torch.allclose(torch.tensor(whole), torch.tensor(weights), atol=1e-6) for weights in interrupted)


class Net(nn.Sequential):
    """Two layers; ``stop`` is called between them, forward and backward."""

    def __init__(self, stop) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))
        self.stop = stop

    def forward(self, x):
        h = self[0](x)
        self.stop("forward")
        if h.requires_grad:
            h.register_hook(lambda _: self.stop("backward"))
        return self[1](h)


@pytest.fixture
def run_of():
    """A run of six steps over 16 records; its model calls ``stop``."""

    def made(stop=lambda where: None, **options):
        torch.manual_seed(0)
        model = Net(stop)
        plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=16, steps=6, **options)
        data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))
        return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0), data

    return made


def test_the_averages_are_not_saved_as_weights_of_the_run_and_take_no_step(run_of, tmp_path):
    private, data = run_of(average="ema")
    checkpoint = Checkpoint(tmp_path, private)
    batches = iter(private.loader(data))
    for _ in range(2):
        x, y = next(batches)
        nn.functional.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    before = (tmp_path / "state.safetensors").read_bytes()
    with private.averaged():
        for refused in (checkpoint.save, private.state_dict, private.optimizer.step):
            with pytest.raises(ArgumentError, match=r"outside of private.averaged\(\)"):
                refused()
    assert (tmp_path / "state.safetensors").read_bytes() == before and private.steps == 2
    checkpoint.save()


def test_an_interrupt_while_averages_are_swapped_in_leaves_the_weights(run_of, monkeypatch):
    private, data = run_of(average="ema")
    for x, y in private.loader(data):
        nn.functional.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    weights = [p.detach().clone() for p in private.model.parameters()]
    copied, calls = torch.Tensor.copy_, []

    def copy(self, *given):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return copied(self, *given)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(KeyboardInterrupt), private.averaged():
        pass
    assert all(torch.equal(p, w) for p, w in zip(private.model.parameters(), weights, strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_was_interrupted_and_repeated_is_told_so_and_a_new_loader_goes_on(run_of, where):
    left = []

    def stop(now):
        if left == [now]:
            left.clear()
            raise KeyboardInterrupt

    private, data = run_of(stop)

    def passes(x, y):
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.model(x), y).backward()

    for step, (x, y) in enumerate(private.loader(data)):
        passes(x, y)
        private.optimizer.step()
        if step == 1:
            break
    x, y = next(iter(private.loader(data)))
    left.append(where)
    with pytest.raises(KeyboardInterrupt):
        passes(x, y)
    with pytest.raises(CaptureError, match=r"interrupted .*new private.loader\(\)"):
        passes(x, y)
        private.optimizer.step()
    for x, y in private.loader(data):
        passes(x, y)
        private.optimizer.step()
    assert private.steps == 6

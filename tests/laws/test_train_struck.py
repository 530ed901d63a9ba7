"""A step that is interrupted anywhere (Ctrl-C) was taken, or was not: nothing in between, and whatever follows is the same."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from struck import Strike
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad.clipping import Adaptive, Capture, Flat
from hushgrad.denoise import Kalman
from hushgrad.errors import CaptureError
from hushgrad.noise import AntiPGD, Independent
from hushgrad.release.placement.world import ProcessLost
from hushgrad.sampling import FullBatch, Poisson
from hushgrad.train import Plan

STEPS = 60
RULES = {"steps": STEPS, "delta": 1e-5, "batch_size": 16, "noise_multiplier": 1.0}
DRAWN = {"sampler": Poisson(rate=0.25, steps=STEPS), "clip": Flat(1.0), "noise": Independent(), **RULES}
PLANS = {
    "independent": Plan(**DRAWN),
    "adaptive": Plan(**{**DRAWN, "clip": Adaptive(1.0, batch_size=16, count_noise=3.0)}),
    "correlated": Plan(**{**DRAWN, "sampler": FullBatch(steps=STEPS), "noise": AntiPGD(damping=0.8)}),
    "certified": Plan(**DRAWN, certified=True),
    "filtered": Plan(**DRAWN, denoise=Kalman(0.7, 0.5)),
}


class Run:
    """A run of a plan on data of its own; the same for every run."""

    def __init__(self, plan: Plan, *, sharded: bool = False) -> None:
        torch.manual_seed(0)
        self.model, data = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(64, 8)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (1,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.private = hushgrad.make_private(self.model, self.optimizer, plan, seed=1, loss_reduction="sum")
        self.data = TensorDataset(data, torch.randint(3, (64,)))
        self.batches = iter(self.private.loader(self.data))

    def weights(self) -> list[torch.Tensor]:
        return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in self.model.parameters()]

    def take(self, batch, k: int = 0) -> None:
        def passes():
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="sum").backward()

        probed = self.private.plan.denoise is not None
        if not probed:
            passes()
        before = sys.getprofile()
        sys.setprofile(Strike(k) if k else before)
        try:
            self.optimizer.step(passes) if probed else self.optimizer.step()
        finally:
            sys.setprofile(before)


def _again(run: Run, batch) -> None:
    """Where the strike fell before the step's own hook, the first passes are still there: a repetition is refused once."""
    try:
        run.take(batch)
    except CaptureError:
        run.take(batch)


def _follow(run: Run, other: Run) -> None:
    """Be where ``other`` is: its weights, its clip norm and what its denoiser keeps."""
    run.model.load_state_dict(other.model.state_dict())
    run.private._release.use_clip(other.private._release.clip)
    run.private._release.filter_state = copy.deepcopy(other.private._release.filter_state)


@pytest.mark.parametrize("wide", [1, 3])
def test_passes_that_are_interrupted_anywhere_leave_nothing_switched_off(wide):
    """Each place of a known pass, one after the other; what is forgotten then leaves the model as it was."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(wide))), torch.randn(8, 4)
    capture = Capture(model)
    capture.attach()

    def passes(k: int) -> bool:
        """Whether the passes were interrupted, at the k-th place."""
        before = sys.getprofile()
        try:
            sys.setprofile(Strike(k) if k else before)
            model(x).sum().backward()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(before)
            capture.discard()
        return False

    passes(0)
    places = next(k for k in range(1, 2000) if _left_as_it_was(passes(k), model))
    assert places > 20 * wide
    capture.detach()


def _left_as_it_was(struck: bool, model: nn.Module) -> bool:
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    return not struck


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """A group whose other process is silent: messages come back as they were sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", PLANS)
def test_a_step_that_is_interrupted_anywhere_was_taken_or_was_not(name):
    _taken_or_not(name, sharded=False)


@pytest.mark.parametrize("name", PLANS)
def test_a_step_on_shards_that_is_interrupted_anywhere_was_taken_or_was_not(name, alone):
    _taken_or_not(name, sharded=True)


def _taken_or_not(name: str, *, sharded: bool) -> None:
    whole, struck = (Run(PLANS[name], sharded=sharded) for _ in range(2))
    lot = random.Random(name)
    for batch in whole.batches:
        before, same = whole.weights(), next(struck.batches)
        whole.take(batch)
        try:
            struck.take(same, lot.randint(1, 400))
        except KeyboardInterrupt:
            assert torch.is_grad_enabled()
            if struck.private.steps < whole.private.steps:
                _again(struck, same)
            elif all(map(torch.equal, struck.weights(), before)):  # its noise is spent, and it led nowhere, or not to its end
                _follow(whole, struck)
        assert struck.private.steps == whole.private.steps
        assert all(map(torch.equal, struck.weights(), whole.weights()))
    book, other = (run.private._attendance.state_dict() for run in (whole, struck))
    assert all(torch.equal(torch.as_tensor(book[key]), torch.as_tensor(other[key])) for key in book)
    assert whole.private.spent() == struck.private.spent()


@pytest.mark.parametrize("name", PLANS)
def test_a_process_that_is_interrupted_in_a_step_of_several_sends_nothing_more(name, first_of_two, monkeypatch):
    """The others wait for its next message. One that belongs to another step, or to the same one anew, must not be it."""
    sent: list[int] = []
    reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **how: (sent.append(tensor.numel()), reduce(tensor, **how))[1])
    lot, apart, taken = random.Random(name), 0, 0
    for _ in range(12):
        run = Run(PLANS[name])
        batch = next(run.batches)
        run.take(batch)
        of_a_step, batch = len(sent), next(run.batches)
        before = run.weights()
        sent.clear()
        try:
            run.take(batch, lot.randint(1, 500))
        except KeyboardInterrupt:
            begun, steps = bool(sent), run.private.steps
            if steps == 2:  # all messages of the step were sent, or the process parts
                taken += 1
            if not run.private._world.apart:
                assert not begun or steps == 2
            else:
                apart += 1
                sent.clear()
                with pytest.raises(ProcessLost, match="interrupted in a step that all processes take together"):
                    _again(run, batch)
                with pytest.raises(ProcessLost, match="Start all processes again"):
                    next(iter(run.private.loader(run.data)))
                assert not sent and run.private.steps == steps
                assert steps == 2 or all(map(torch.equal, run.weights(), before))
        sent.clear()
        run.private.detach()
        assert of_a_step
    assert apart >= 3

"""A step that is interrupted anywhere (Ctrl-C) was taken, or was not: nothing in between, and whatever follows is the same."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad.clipping import Adaptive, Flat
from hushgrad.denoise import Kalman
from hushgrad.errors import CaptureError
from hushgrad.noise import AntiPGD, Independent
from hushgrad.sampling import FullBatch, Poisson
from hushgrad.train import Plan

HOME = str(Path(hushgrad.__file__).parent)
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


class Strike:
    """Raises KeyboardInterrupt at the k-th place inside of hushgrad where the interpreter would: a call begins, or one in C ends."""

    def __init__(self, k: int) -> None:
        self.left = k

    def __call__(self, frame, event, arg):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(HOME):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


class Run:
    """A run of a plan on data of its own; the same for every run."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        self.model, data = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(64, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.private = hushgrad.make_private(self.model, self.optimizer, plan, seed=1, loss_reduction="sum")
        self.batches = iter(self.private.loader(TensorDataset(data, torch.randint(3, (64,)))))

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

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


@pytest.mark.parametrize("name", PLANS)
def test_a_step_that_is_interrupted_anywhere_was_taken_or_was_not(name):
    whole, struck, lot = Run(PLANS[name]), Run(PLANS[name]), random.Random(name)
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

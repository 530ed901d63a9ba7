"""Models that mix examples where a mask drops, where rows are sorted by random numbers, or in some of their passes only."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushgrad.clipping import Capture
from hushgrad.errors import NotIsolated


class _Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.change, self.passes = nn.Linear(6, 3), change, 0

    def forward(self, x):
        return self.linear(self.change(self, x))


class _Counts(_Model):
    def forward(self, x):
        self.passes += 1
        return super().forward(x)


def _centred(x):
    return x - x.mean(0)


def _drop(x, p):
    return F.dropout(torch.ones_like(x), p) > 0


def _coin(x, p):
    return torch.bernoulli(torch.full((len(x), 1), p)).bool()


MASKS = {
    "a mean where dropout drops": lambda m, x: torch.where(_drop(x, 0.5), x, x.mean(0)),
    "another example by a coin": lambda m, x: torch.where(_coin(x, 0.3), x, x.roll(1, 0)),
    "another order": lambda m, x: x[torch.rand(len(x)).argsort()],
    "an order that is nearly kept": lambda m, x: x[(torch.arange(len(x)) + 3 * torch.rand(len(x))).argsort()],
}
APART = {
    "dropout": lambda m, x: F.dropout(x, 0.5),
    "its own mean where dropout drops": lambda m, x: torch.where(_drop(x, 0.5), x, x.mean(1, keepdim=True)),
    "its own numbers in another order": lambda m, x: x.gather(1, torch.rand(x.shape).argsort(1)),
    "noise": lambda m, x: x + torch.randn_like(x) * torch.rand(len(x), 1),
    "divided by what is left": lambda m, x: F.dropout(x, 0.5) / F.dropout(x.abs(), 0.5).sum(1, keepdim=True),
}


def _step(model, seed):
    torch.manual_seed(seed)
    capture = Capture(model)
    capture.attach()
    model(torch.randn(12, 6)).pow(2).mean().backward()
    capture.detach()


@pytest.mark.parametrize("name", MASKS)
def test_whoever_is_dropped_or_moved_meets_no_other(name):
    with pytest.raises(NotIsolated):
        _step(_Model(MASKS[name]), 0)


@pytest.mark.parametrize("name", APART)
def test_random_numbers_for_each_example_are_fine(name):
    _step(_Model(APART[name]), 1)


@pytest.mark.parametrize("seed", range(6))
def test_a_model_that_mixes_in_some_passes_only_is_refused_in_the_first(seed):
    draw = random.Random(seed)
    every, first = draw.randint(2, 10), draw.randint(2, 9)
    when = [lambda n: n % every == 0, lambda n: first <= n < first + 3][seed % 2]
    with pytest.raises(NotIsolated, match="later pass"):
        _step(_Counts(lambda m, x: _centred(x) if when(m.passes) else x), seed)


def test_one_that_counts_and_mixes_in_none_is_not():
    _step(_Counts(lambda m, x: x * (1 + m.passes % 3)), 0)

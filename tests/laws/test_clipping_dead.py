"""Gradients that are 0 while a model is proved: what comes back later, and records that are no numbers, stay each one's own."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hushgrad.clipping import Capture, Flat

INPUTS = 4
DEAD = {
    "softmax of one": lambda h: h[:, :1].softmax(-1).expand_as(h),
    "times 0": lambda h: h * 0,
    "ReLU": lambda h: (h - 1e3).relu(),
    "where": lambda h: torch.where(h > 50, h * 2, torch.zeros_like(h)),
    "clamp": lambda h: h.clamp(100, 200),
    "round": torch.round,
    "norm of one": lambda h: F.layer_norm(h[:, :1], (1,)).expand_as(h),
}
MEET = {
    "linear": lambda x, w: F.linear(x, w),
    "product": lambda x, w: x @ (w / w.norm()).mT,
    "sum": lambda x, w: (x[:, None] * w).sum(-1),
    "einsum": lambda x, w: torch.einsum("bd,kd->bk", x, w.tanh()),
}


class Dead(nn.Module):
    """A parameter that meets the examples in front of an operation whose gradient is 0, for most of them or for all."""

    def __init__(self, lot):
        super().__init__()
        self.dead, self.meet, self.width = lot.choice(list(DEAD)), lot.choice(list(MEET)), lot.choice([1, 2, 5])
        self.tame, self.beside = lot.random() < 0.3, lot.random() < 0.3
        self.w, self.v = nn.Parameter(torch.randn(self.width, INPUTS)), nn.Parameter(torch.randn(self.width, 1))
        self.o = nn.Linear(self.width, 3)

    def forward(self, x):
        met = MEET[self.meet](x, self.w)
        h = DEAD[self.dead](met) * F.normalize(self.v, dim=1).t() + self.beside * met
        made = self.o(h)
        return made.nan_to_num(0.0, 0.0, 0.0) if self.tame else made


def sums(capture, model, x):
    capture.examples(len(x))
    model(x).square().sum().backward()
    return torch.cat([t.flatten().double() for t in capture.collect(Flat(1.0)).raw_sums.values()])


def alone(model, x):
    """The clipped gradients of single examples, added up."""
    made = 0.0
    for one in x.split(1):
        found = torch.autograd.grad(
            model(one).square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        g = torch.cat([t.flatten().double() for t in found])
        made = made + g / g.norm().clamp(min=1.0)
    return made


@pytest.mark.parametrize("seed", range(14))
def test_a_record_that_is_no_number_stays_out_of_others_behind_a_gradient_of_0(seed):
    lot = random.Random(seed)
    torch.manual_seed(seed)
    model, B = Dead(lot), lot.choice([3, 4, 8])
    capture = Capture(model, unused="zero", loss_reduction="sum")
    capture.attach()
    for k in range(3):  # other numbers of examples, and others who get a gradient
        x = torch.randn(B - (k == 1), INPUTS)
        made = sums(capture, model, x)
        with capture.pause():
            torch.testing.assert_close(made, alone(model, x), rtol=1e-4, atol=1e-4)
    for value in (math.nan, math.inf, 1e30, 1e4):
        x = torch.cat([torch.full((1, INPUTS), value), torch.randn(B - 1, INPUTS)])
        assert (sums(capture, model, x) - sums(capture, model, x[1:])).norm() <= 1 + 1e-4
    capture.detach()


class Rounded(nn.Module):
    """Of a batch in which one number alone does not round to 0, what is shared seems to be that example's."""

    def __init__(self):
        super().__init__()
        self.w, self.v, self.o = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(1, 1)), nn.Linear(1, 3)

    def forward(self, x):
        return self.o((x @ self.w.mT.tanh()).round() @ F.normalize(self.v, dim=0))


@pytest.mark.parametrize("seed", [0, 4])
def test_examples_that_meet_further_up_than_in_the_proof_keep_their_gradients(seed):
    torch.manual_seed(seed)
    model, numbers = Rounded(), torch.Generator().manual_seed(1)
    capture = Capture(model, unused="zero", loss_reduction="sum")
    capture.attach()
    for examples in (3, 3, 2, 2, 3):
        x = torch.randn(examples, 3, generator=numbers)
        made = sums(capture, model, x)
        with capture.pause():
            torch.testing.assert_close(made, alone(model, x), rtol=1e-4, atol=1e-4)
    capture.detach()


class Saving(nn.Module):
    """A reentrant checkpoint of a layer in front of an operation whose gradient is 0."""

    def __init__(self, dead):
        super().__init__()
        self.reentrant = True
        self.dead, self.first, self.inner, self.o = DEAD[dead], nn.Linear(INPUTS, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def inside(self, h):
        return h + self.dead(self.inner(h))

    def forward(self, x):
        return self.o(checkpoint(self.inside, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("dead", DEAD)
def test_a_checkpointed_layer_without_a_gradient_has_that_of_0_until_one_comes(dead):
    torch.manual_seed(0)
    model = Saving(dead)
    plain = copy.deepcopy(model)
    plain.reentrant = False  # which torch.autograd.grad can pass
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for size in (1.0, 1.0, 1e4):  # large numbers open ReLU, where and clamp
        x = torch.randn(4, INPUTS) * size
        torch.testing.assert_close(sums(capture, model, x), alone(plain, x), rtol=1e-3, atol=1e-4)
    capture.detach()

"""What acts on the way back: hooks on tensors and on nodes of the graph, and functions whose backward reads what their forward has left."""

import random

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated

WIDTH, EXAMPLES = 3, 6

CHANGES = {
    "centred": lambda g: g - g.mean(0),
    "half centred": lambda g: g / 2 + g.mean(0) / 2,
    "normed": lambda g: g / (1e-3 + g.norm()),
    "bounded": lambda g: g * (5.0 / g.norm()).clamp(max=1),
    "rolled": lambda g: g.roll(1, 0),
    "centred if large": lambda g: torch.where(g.abs().max() > 3, g - g.mean(0), g),
}


def _of_all(change):
    return lambda gs: gs[0].copy_(change(gs[0]))


HOOKS = {
    "tensor": lambda t, change: t.register_hook(change),
    "before a node": lambda t, change: t.grad_fn.register_prehook(lambda gs: tuple(change(g) for g in gs)),
    "after a node": lambda t, change: t.grad_fn.register_hook(
        lambda made, _: tuple(g if g is None or g.shape != (EXAMPLES, WIDTH) else change(g) for g in made)
    ),
    "several": lambda t, change: register_multi_grad_hook([t], _of_all(change), mode="all"),
    "any of several": lambda t, change: register_multi_grad_hook([t], lambda g: g.copy_(change(g)), mode="any"),
}


class Hooked(nn.Module):
    def __init__(self, hook, change, where):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hook, self.change, self.where = hook, change, where

    def met(self, t, where):
        if where == self.where and t.requires_grad:
            HOOKS[self.hook](t, CHANGES[self.change])
        return t

    def forward(self, x):
        h = self.met(self.met(self.first(x), "a layer").tanh(), "between")
        return self.met(self.head(self.second(h).sin()), "the outputs")


class Left(torch.autograd.Function):
    """Multiplies gradients by what its forward has left where ``kind`` says."""

    @staticmethod
    def forward(ctx, h, model):
        ctx.model, found = model, h.detach().mean(0)
        if model.kind == "number":
            model.number = float(found.abs().sum())
        elif model.kind == "new":
            model.fresh = found
        elif model.kind == "list":
            model.listed.append(found)
        elif model.kind == "object":
            model.held.value = found
        else:
            model.value = found
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        model = ctx.model
        kinds = {"number": "number", "new": "fresh"}
        value = {"list": lambda: model.listed[-1] if model.listed else 0.0, "object": lambda: model.held.value}.get(
            model.kind, lambda: getattr(model, kinds.get(model.kind, "value"), 0.0)
        )()
        return g * (1 + 10 * value), None


class Held:
    value = 0.0


class Leaving(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), kind
        self.number, self.value, self.listed, self.held = 0.0, 0.0, [], Held()

    def forward(self, x):
        return self.head(Left.apply(self.layer(x), self).tanh())


def _moved(make):
    """How far a record and its loss move the sum of a step, in clip norms; None if the model is refused."""
    sums = []
    for other in (False, True):
        torch.manual_seed(0)
        model = make().double()
        capture = Capture(model, loss_reduction="sum", unused="zero")
        capture.attach()
        found = []
        try:
            for step in range(2):
                drawn = torch.Generator().manual_seed(step)
                x = torch.randn(EXAMPLES, WIDTH, dtype=torch.float64, generator=drawn)
                loss = torch.ones(EXAMPLES, 1, dtype=torch.float64)
                if other:
                    x[0], loss[0] = 20 * x[0], 1e4
                capture.examples(EXAMPLES)
                (model(x).sin() * loss).sum().backward()
                found.append(torch.cat([t.flatten() for t in capture.collect(Flat(0.2)).raw_sums.values()]))
        except (CaptureError, NotIsolated) as error:
            return str(error)
        finally:
            capture.detach()
        sums.append(torch.stack(found) / 0.2)
    return float((sums[0] - sums[1]).norm(dim=1).max())


@pytest.mark.parametrize("where", ["a layer", "between", "the outputs"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_mixes_gradients_is_refused_wherever_it_is(hook, where):
    for change in [*random.Random(f"{hook} {where}").sample(list(CHANGES), 3), "centred if large"]:
        moved = _moved(lambda change=change: Hooked(hook, change, where))
        if hook == "after a node" and where == "a layer":  # of the first layer: what it changes is used by nobody
            assert moved <= 2 + 1e-6
        else:
            assert isinstance(moved, str), (change, moved)
            assert "hook" in moved.lower()  # what is to be left out is named


@pytest.mark.parametrize("kind", ["number", "new", "list", "object", "value"])
def test_a_backward_reads_what_its_own_forward_has_left_in_a_proof_too(kind):
    assert isinstance(_moved(lambda: Leaving(kind)), str)

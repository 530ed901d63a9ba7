"""Models that count: what they do at a number that no proof has seen is looked at when they reach it, and sizes are no public count."""

import random

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof.trials import Trials
from hushgrad.errors import CaptureError, NotIsolated

WIDTH, EXAMPLES = 3, 5


class Counter:
    n = 0


class Counting(nn.Module):
    """``kind`` counts, ``gate`` opens at one of the counted numbers, where the examples meet."""

    def __init__(self, kind, gate, at):
        super().__init__()
        self.kind, self.gate, self.at = kind, gate, at
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.register_buffer("one", torch.zeros((), dtype=torch.long))
        self.register_buffer("several", torch.zeros(2, dtype=torch.long))
        self.n, self.held = 0, Counter()

    def counted(self, x):
        if self.kind == "number":
            self.n += 1
            return torch.full((), self.n)
        if self.kind == "object":
            self.held.n += 1
            return torch.full((), self.held.n)
        if self.kind == "set by the loop":
            return torch.full((), self.n)
        buffer = self.one if self.kind == "buffer" else self.several
        buffer += 1
        return buffer.max()

    def forward(self, x):
        h, n = self.layer(x).tanh(), self.counted(x)
        meet = h - (h.detach() if "detached" in self.gate else h).mean(0)
        if "chosen" in self.gate:
            return self.head(torch.stack([h, meet]).index_select(0, (n % 64 == self.at).long().view(1))[0])
        return self.head(torch.where(n % 64 == self.at, meet, h))


@pytest.mark.parametrize("gate", ["selected", "detached", "chosen"])
@pytest.mark.parametrize("kind", ["number", "object", "buffer", "several", "set by the loop"])
def test_a_gate_that_opens_at_a_counted_number_is_seen_when_it_opens(kind, gate):
    torch.manual_seed(0)
    at = random.Random(f"{kind} {gate}").randint(13, 30)
    model = Counting(kind, gate, at).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    steps = 0
    with pytest.raises((CaptureError, NotIsolated)):
        for steps in range(at + 1):
            if kind == "set by the loop":
                model.n = steps
            capture.examples(EXAMPLES)
            model(torch.randn(EXAMPLES, WIDTH, dtype=torch.float64)).sin().sum().backward()
            capture.collect(Flat(0.2))
    assert steps >= 10  # it was trained until then
    capture.detach()


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, model):
        ctx.model = model
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.model.change(g), None


def _late_only(act):
    return lambda model, h: act(model, h) if model.late else h


def _on_tensor(model, h):
    h.register_hook(model.change)
    return h


def _before_node(model, h):
    h.grad_fn.register_prehook(lambda gs: tuple(model.change(g) for g in gs))
    return h


def _saved(model, h):
    with saved_tensors_hooks(lambda t: t, model.change):
        return h.sin()


ACTS = {
    "what is saved": _saved,
    "what is saved late": lambda model, h: _saved(model, h) if model.late else h.sin(),
    "a function": lambda model, h: Late.apply(h, model),
    "a hook": _on_tensor,
    "a node's hook": _before_node,
    "a module's hook": lambda model, h: h,
    "a hook that comes late": _late_only(_on_tensor),
    "a node's hook that comes late": _late_only(_before_node),
    "nothing": lambda model, h: h,
}


class ActingBack(nn.Module):
    """Counts its passes; from the pass ``at`` on, gradients meet on the way back if it ``mixes``."""

    def __init__(self, act, at, mixes):
        super().__init__()
        self.act, self.at, self.mixes, self.n = act, at, mixes, 0
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        if act == "a module's hook":
            self.head.register_full_backward_hook(lambda module, given, made: (self.change(given[0]),))

    @property
    def late(self):
        return self.n > self.at

    def change(self, g):
        return g - g.mean(0) if self.late and self.mixes else g * 1

    def forward(self, x):
        self.n += 1
        h = self.layer(x).tanh()
        return self.head(ACTS[self.act](self, h) if h.requires_grad or "saved" in self.act else h)


def _trained_back(act, at, mixes, steps):
    torch.manual_seed(0)
    capture = Capture(ActingBack(act, at, mixes).double(), loss_reduction="sum")
    capture.attach()
    taken = 0
    try:
        while taken < steps:
            capture.examples(EXAMPLES)
            capture.model(torch.randn(EXAMPLES, WIDTH, dtype=torch.float64)).sin().sum().backward()
            capture.collect(Flat(0.2))
            taken += 1
    except NotIsolated:
        pass
    capture.detach()
    return taken


@pytest.mark.parametrize("act", [act for act in ACTS if act != "nothing"])
def test_what_acts_on_the_way_back_from_a_counted_number_on_is_seen_before_it_counts(act):
    """Outputs show nothing of it: one record moved the sum by more than the clip norm."""
    at = random.Random(act).randint(13, 30)
    assert _trained_back(act, at, True, at + 3) == at


@pytest.mark.parametrize("act", ACTS)
def test_what_acts_on_the_way_back_and_mixes_nothing_is_trained(act, monkeypatch):
    looked, repeat_back = [], Trials.repeat_back
    monkeypatch.setattr(Trials, "repeat_back", lambda self, *given: looked.append(self) or repeat_back(self, *given))
    assert _trained_back(act, 5, False, 9) == 9
    assert bool(looked) is (act != "nothing")  # without any, nothing goes backward once more


class Sized(nn.Module):
    """Keeps how many examples a batch had, and scales the next one by it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.last, self.most = kind, nn.Linear(WIDTH, 2), 1, 1
        self.register_buffer("size", torch.ones(()))

    def forward(self, x):
        scale = {"last": self.last, "most": self.most, "buffer": self.size.clone()}[self.kind]
        self.last, self.most = len(x), max(self.most, len(x))
        self.size.fill_(len(x))
        return self.layer(x) / scale


@pytest.mark.parametrize("kind", ["last", "most", "buffer"])
def test_the_size_of_an_earlier_batch_is_something_of_its_data(kind):
    torch.manual_seed(0)
    model = Sized(kind).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with pytest.raises((CaptureError, NotIsolated)):
        for examples in (5, 5, 4, 5):
            capture.examples(examples)
            model(torch.randn(examples, WIDTH, dtype=torch.float64)).sin().sum().backward()
            capture.collect(Flat(0.2))
    capture.detach()

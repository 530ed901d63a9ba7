"""Ways that open after a proof through something that the model's attributes do not show, or that grows from almost nothing.

Tensors in globals, closures, classes and caches; arrays; large masks; factors too small to be seen at first; weights that pass a threshold.
Only that one thing changes between two steps: then the pass is refused.
"""

import functools

import numpy as np
import pytest
import torch
from test_clipping_neighbours import clipped
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof.changed_weights import beyond
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import one_by_one, sum_of_sines


class _Slots:
    __slots__ = ("tensor",)


class _Class:
    tensor = torch.zeros(5)


_HELD = {"factor": 0.0, "tensor": torch.zeros(5), "array": np.zeros(5), "order": torch.arange(5000)}
_SLOTS, _TUPLE, _MASK, _CLOSED = _Slots(), (torch.zeros(5),), torch.zeros(5000), torch.zeros(5)
_SLOTS.tensor = torch.zeros(5)


@functools.lru_cache
def _cached():
    return torch.zeros(5)


def _closing(held):
    return lambda m, h: held * h.mean(0)


def _by(first, later):
    """A number in nobody's attributes."""
    return later if _HELD["factor"] else first


class _Mixing(nn.Module):
    """``mix`` is what others do to the middle of the model."""

    def __init__(self, mix):
        super().__init__()
        self.table, self.b, self.mix = nn.Embedding(20, 5), nn.Linear(5, 3), mix
        self.alone, self.row = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(5))
        self.register_buffer("wide", torch.zeros(10_000))
        self.tree, self.teacher = {"a": {"b": torch.zeros(5)}}, [nn.Linear(5, 5).requires_grad_(False)]
        self.teacher[0].bias.zero_()

    def forward(self, x):
        h = self.table(x).tanh().mean(1)
        return self.b(h + self.mix(self, h.detach()) + 0 * self.alone + 0 * self.row)


def _band(h):
    place = torch.arange(len(h), dtype=h.dtype)
    return ((place[:, None] - place).abs() <= _by(0.2, 1.0)).to(h) @ h


# Each way, and what opens it (1) and shuts it (0) again.
_WAYS = {
    "a tensor elsewhere": (lambda m, h: _HELD["tensor"] * h.mean(0), lambda m, v: _HELD.update(tensor=torch.full((5,), v))),
    "an array elsewhere": (
        lambda m, h: torch.from_numpy(_HELD["array"]) * h.mean(0),
        lambda m, v: _HELD.update(array=np.full(5, v)),
    ),
    "a long order": (
        lambda m, h: h[_HELD["order"][: len(h)] % len(h)],
        lambda m, v: _HELD.update(order=torch.arange(5000).roll(int(v))),
    ),
    "a large mask, written to its data": (lambda m, h: _MASK[:5] * h.mean(0), lambda m, v: _MASK.data.fill_(v)),
    "a large buffer": (lambda m, h: m.wide[:5] * h.mean(0), lambda m, v: m.wide.fill_(v)),
    "a tensor in a class": (lambda m, h: _Class.tensor * h.mean(0), lambda m, v: setattr(_Class, "tensor", torch.full((5,), v))),
    "a tensor in a slot": (lambda m, h: _SLOTS.tensor * h.mean(0), lambda m, v: setattr(_SLOTS, "tensor", torch.full((5,), v))),
    "a tensor in a tuple": (lambda m, h: _TUPLE[0] * h.mean(0), lambda m, v: _TUPLE[0].fill_(v)),
    "a tensor in a cache": (lambda m, h: _cached() * h.mean(0), lambda m, v: _cached().fill_(v)),
    "a tensor in a closure": (_closing(_CLOSED), lambda m, v: _CLOSED.fill_(v)),
    "a tensor in a tree": (lambda m, h: m.tree["a"]["b"] * h.mean(0), lambda m, v: m.tree["a"]["b"].fill_(v)),
    "a teacher": (lambda m, h: m.teacher[0].bias * h.mean(0), lambda m, v: m.teacher[0].bias.fill_(v)),
    "a constructor of old": (lambda m, h: torch.Tensor([_by(0.0, 1.0)] * 5) * h.mean(0), None),
    "a tiny factor": (lambda m, h: _by(1e-13, 0.5) * h.mean(0), None),
    "tiny factors": (lambda m, h: torch.tensor([_by(1e-13, 0.5)] * 5) * h.mean(0), None),
    "a tiny temperature": (lambda m, h: (-torch.cdist(h, h) / _by(1e-5, 2.0)).softmax(1) @ h, None),
    "an exponent": (lambda m, h: torch.pow(torch.tensor(0.5), _by(60.0, 0.5)) * h.mean(0), None),
    "a complex factor": (lambda m, h: (_by(0j, 0.5 + 0j) * h.mean(0)).real, None),
    "a width": (lambda m, h: _band(h), None),
    "an end": (lambda m, h: torch.linspace(0, _by(0.0, 1.0), 5) * h.mean(0), None),
    "a weight beyond a number": (lambda m, h: (m.alone.detach() > 5).to(h) * h.mean(0), lambda m, v: m.alone.data.fill_(7 * v)),
    "a weight less a number": (lambda m, h: (m.alone.detach() - 3).relu() * h.mean(0), lambda m, v: m.alone.data.fill_(7 * v)),
    "a row less a number": (lambda m, h: (m.row.detach() - 4).relu() * h.mean(0), lambda m, v: m.row.data.fill_(7 * v)),
    "large weights": (
        lambda m, h: (m.b.weight.detach().norm() > 20).to(h) * h.mean(0),
        lambda m, v: m.b.weight.data.fill_(7 * v),
    ),
}


@pytest.mark.parametrize("way", _WAYS)
def test_a_way_that_opens_elsewhere(way):
    mix, turn = _WAYS[way]
    turn = turn or (lambda m, v: _HELD.update(factor=v))
    torch.manual_seed(0)
    model = _Mixing(mix)
    turn(model, 0.0)
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    try:
        with pytest.raises((CaptureError, NotIsolated)):
            for step in range(3):
                if step == 2:
                    turn(model, 1.0)
                clipped(capture, model, (torch.randint(20, (8, 4)),))
    finally:
        capture.detach()
        turn(model, 0.0)


def test_what_comes_from_numpy_is_proved_once(monkeypatch):
    class Arrays(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 3)

        def forward(self, x):
            return self.a(x) * torch.from_numpy(_HELD["array"])[:3] + torch.Tensor([1.0, 2.0, 3.0])

    _HELD["array"] = np.ones(5)
    model = Arrays()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    proofs, prove = [], capture._root._trials.proved
    monkeypatch.setattr(capture._root._trials, "proved", lambda *args: proofs.append(1) or prove(*args))
    for _ in range(4):
        clipped(capture, model, (torch.randn(8, 5),))
    capture.detach()
    assert len(proofs) == 1


def test_a_kind_of_number_is_known_in_its_place_where_the_order_follows_from_the_data():
    """A factor of 0 between others that are not: a loop over the examples has no order of its own."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(20, 5), nn.Linear(5, 3)

        def forward(self, x):
            h = torch.stack([self.a(row).mean(0) * 0.5 for row in x]).tanh()
            return self.b(h + h.detach().mean(0) * _HELD["factor"])

    _HELD["factor"] = 0.0
    model = Loop()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for B in (6, 7):
        clipped(capture, model, (torch.randint(20, (B, 4)),))
    _HELD["factor"] = 0.3
    with pytest.raises(NotIsolated):
        clipped(capture, model, (torch.randint(20, (7, 4)),))
    capture.detach()
    _HELD["factor"] = 0.0


@pytest.mark.parametrize("bound", [5.0, -3e5])
def test_weights_beyond_a_bound_come_back_bit_for_bit(bound):
    weights = [torch.randn(4, 5), torch.randn(5), torch.tensor([[0.0, -0.0], [1e-42, 3.0]]), torch.zeros(2, 2), torch.randn(())]
    before = [w.clone() for w in weights]
    with beyond(weights, bound):
        assert all(w.abs().max() >= abs(bound) for w in weights)
        assert weights[4] > bound if bound > 0 else weights[4] < bound
    assert all(torch.equal(w.view(torch.int32), b.view(torch.int32)) for w, b in zip(weights, before, strict=True))


def _frozen_gradient(m, z):
    return torch.autograd.grad((z @ m.frozen).tanh().sum(), z)[0]


def _detached_gradient(m, z):
    return torch.autograd.grad(nn.functional.linear(z, m.e.weight.detach()).tanh().sum(), z)[0]


def _trained_gradient(m, z):
    return torch.autograd.grad(m.e(z).tanh().sum(), z)[0]


def _kept_gradient(m, z):
    return torch.autograd.grad(m.e(z).tanh().sum(), z, create_graph=True)[0]


class _Differentiating(nn.Module):
    """A step of its inputs along a gradient that its forward asks for."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient, self.e, self.o = gradient, nn.Linear(5, 5), nn.Linear(5, 2)
        self.register_buffer("frozen", torch.randn(5, 5))

    def forward(self, x):
        return self.o(self.e(x) + self.gradient(self, x.clone().requires_grad_()))


@pytest.mark.parametrize("gradient", [_frozen_gradient, _detached_gradient])
def test_a_gradient_that_the_forward_asks_for_of_what_is_not_trained_is_exact(gradient):
    torch.manual_seed(0)
    model, x = _Differentiating(gradient).double(), torch.randn(8, 5, dtype=torch.float64)
    alone = [
        torch.cat([g.flatten() for g in torch.autograd.grad(model(x[i : i + 1]).sin().sum(), list(model.parameters()))])
        for i in range(8)
    ]
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    model(x).sin().sum().backward()
    torch.testing.assert_close(capture.collect(Flat(1.0)).raw_norms, torch.stack(alone).norm(dim=1))
    capture.detach()


@pytest.mark.parametrize("gradient", [_trained_gradient, _kept_gradient])
def test_one_that_passes_trained_layers_is_refused_by_its_name(gradient):
    model = _Differentiating(gradient)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with pytest.raises(CaptureError, match="asks for gradients inside of its forward"):
        clipped(capture, model, (torch.randn(8, 5),))
    capture.detach()


class _Adapted(nn.Module):
    """Steps of an inner loop on a weight: over the batch, or for each example by itself."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.each = nn.Linear(5, 4), nn.Linear(4, 2), each

    def _loss(self, weight, x):
        return nn.functional.linear(x, weight, self.inner.bias).square().mean()

    def _alone(self, x):
        return nn.functional.linear(x, self.inner.weight - 0.1 * torch.func.grad(self._loss)(self.inner.weight, x))

    def forward(self, x):
        if self.each:
            return self.outer(torch.func.vmap(self._alone)(x).tanh())
        weight = self.inner.weight
        (step,) = torch.autograd.grad(self._loss(weight, x), weight, create_graph=True)
        return self.outer(nn.functional.linear(x, weight - 0.1 * step).tanh())


def test_an_inner_loop_over_the_batch_is_refused_with_a_remedy_that_works():
    torch.manual_seed(0)
    x = torch.randn(8, 5)
    capture = Capture(_Adapted(each=False), loss_reduction="sum")
    capture.attach()
    with pytest.raises(NotIsolated, match="an inner loss over the batch does that"):
        capture.model(x)
    model = _Adapted(each=True)
    single = one_by_one(model, (x,), sum_of_sines)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    sum_of_sines(model(x)).backward()
    norms = torch.stack([G.flatten(1).square().sum(1) for G in single.values()]).sum(0).sqrt()
    torch.testing.assert_close(capture.collect(Flat(1.0)).raw_norms, norms, check_dtype=False)


def test_a_part_that_was_traced_is_exact():
    torch.manual_seed(0)
    part = torch.jit.trace(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), torch.randn(2, 5))
    model, x = nn.Sequential(nn.Linear(5, 5), part), torch.randn(8, 5)
    alone = [
        torch.cat([g.flatten() for g in torch.autograd.grad(model(x[i : i + 1]).sin().sum(), list(model.parameters()))])
        for i in range(8)
    ]
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    model(x).sin().sum().backward()
    torch.testing.assert_close(capture.collect(Flat(1.0)).raw_norms, torch.stack(alone).norm(dim=1))
    capture.detach()

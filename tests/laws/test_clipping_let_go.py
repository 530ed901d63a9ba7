"""What a pass holds is let go of: a proof keeps no activations, nor per-example gradients, of any of its passes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.layout import Kind, Layout
from hushgrad.clipping.proof import seal_runs, tags
from hushgrad.clipping.proof.tags import Exit, tagged
from hushgrad.clipping.site import Call
from hushgrad.clipping.thresholds import MANY_NUMBERS, crowd
from hushgrad.errors import CaptureError


class Shared(nn.Module):
    """Its position table is read at the frontier, and its head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(self.table(ids) + self.position))
        return x @ self.table.weight.t()


class Deep(nn.Module):
    """Parameters that no layer holds, one behind the other: each has a frontier of its own, below the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(4))
        self.shifts = nn.ParameterList(torch.randn(6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for weight, shift in zip(self.weights, self.shifts, strict=True):
            x = torch.addmm(shift, torch.tanh(x).flatten(0, 1), weight).view_as(x)
        return x


MODELS = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(4, 5, 6)),
    "shared": (Shared, lambda: torch.randint(7, (4, 5))),
    "deep": (Deep, lambda: torch.randn(4, 5, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_pass_outlives_its_step(name: str) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    made: list[weakref.ref[torch.Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, output: made.append(weakref.ref(output)))
    capture = Capture(model)
    capture.attach()
    for _ in range(2):
        model(data()).pow(2).mean((1, 2)).mean().backward()
        capture.collect(Flat(1.0))
        gc.collect()  # it does not see circles through the graph
        assert made
        assert not [tuple(found.shape) for each in made if (found := each()) is not None]


@pytest.mark.parametrize("name", MODELS)
def test_steps_leave_no_calls_behind(name: str) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    capture = Capture(model)
    capture.attach()
    for step in range(4):
        if step == 2:  # a pass of which no gradient comes back leaves nothing either
            model(data())
        model(data()).pow(2).mean((1, 2)).mean().backward()
        capture.collect(Flat(1.0))
        gc.collect()  # once: of circles through the graph it would find one node at a time
        assert not [call.site.path for call in gc.get_objects() if type(call) is Call and call.site.tape is capture._tape]


class Bare(Deep):
    """No layer of it would notice a gradient that comes too late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()


@pytest.mark.parametrize("examples", [1, 4])
@pytest.mark.parametrize("collected", [True, False])
def test_a_gradient_that_comes_back_to_a_forgotten_pass_is_refused(examples: int, collected: bool) -> None:
    torch.manual_seed(0)
    model = Bare()
    capture = Capture(model)
    capture.attach()

    def loss(count: int) -> torch.Tensor:
        return model(torch.randn(count, 5, 6)).pow(2).mean((1, 2)).mean()

    early = loss(3)
    if collected:
        early.backward(retain_graph=True)
        capture.collect(Flat(1.0))
    loss(examples).backward()
    with pytest.raises(CaptureError, match="from an earlier batch"):
        early.backward()
    with pytest.raises(CaptureError, match="from an earlier batch"):
        capture.collect(Flat(1.0))


@pytest.mark.parametrize("name", MODELS)
def test_a_proof_holds_one_graph_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    passes: list[list[weakref.ref[torch.Tensor]]] = []
    model.register_forward_pre_hook(lambda _module, _args: passes.append([]))
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, output: passes[-1].append(weakref.ref(output)))
    held: list[int] = []
    pulled = tags._pulled

    def counted(*args: Any) -> Any:
        held.append(sum(any(output() is not None for output in outputs) for outputs in passes))
        return pulled(*args)

    monkeypatch.setattr(tags, "_pulled", counted)
    capture = Capture(model)
    capture.attach()
    model(data())
    assert held
    assert set(held) == {1}


def test_owners_that_follow_a_rule_take_no_room() -> None:
    x = torch.randn(6, 40, 50, requires_grad=True)
    y = x * 3.0
    edge = torch.autograd.graph.get_gradient_edge
    exits = [Exit(edge(y), y.detach(), Layout(Kind.DIM))]
    (found,), _ = tagged(exits, [edge(x)], [], 6)
    assert found.proved
    assert found.each is not None
    assert torch.equal(found.each, torch.arange(6).reshape(6, 1, 1).expand(6, 40, 50).to(found.each.dtype))
    assert found.each.untyped_storage().nbytes() <= 64


def test_crowds_of_large_outputs_are_small_and_larger_batches_are_proved() -> None:
    assert crowd(8) == 32
    assert crowd(8, MANY_NUMBERS) == 16
    assert crowd(64, MANY_NUMBERS) == crowd(64) == 128


def test_a_difference_in_one_row_of_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_runs, "_AT_ONCE", 8)  # some rows after the others
    torch.manual_seed(0)
    x = torch.randn(12, 4)
    where, every = (Layout(Kind.DIM), 12), torch.arange(12)
    order = torch.randperm(12)
    assert seal_runs._alike(x, x[order], order, every, where, where)
    y = x[order].clone()
    y[11, 3] += 0.1
    assert not seal_runs._alike(x, y, order, every, where, where)
    small = x.clone()
    small[3] *= 1e-9  # beside the largest of all rows, not of its own: rounding
    assert seal_runs._alike(small, small + 1e-8 * (every == 3).unsqueeze(1), every, every, where, where)

"""What happens between passes, beside them and to them: a model that is changed, numbers that somebody sets, inputs that are written to."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.layout import FIRST
from hushgrad.clipping.proof.tags import Exit, tagged
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import one_by_one

B, D = 6, 4


def _captured(model: nn.Module, **options: Any) -> Capture:
    capture = Capture(model, loss_reduction="sum", **options)
    capture.attach()
    return capture


def _step(capture: Capture, x: Tensor) -> Any:
    capture.examples(len(x))
    capture.model(x).square().sum().backward()
    return capture.collect(Flat(1e-3))


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


# Changed between passes: nothing of it is in a graph, for it comes before the first layer -----------------------------------


class _Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.function, self.layer, self.epoch = nn.Identity(), F.relu, nn.Linear(D, D), 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.first(x))
        return self.layer(_centred(x) if self.epoch > 50 else x)


class _Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _centred(x)


def _patched_class(model: _Before, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Identity, "forward", lambda _, x: _centred(x))


def _everywhere(model: _Before, monkeypatch: pytest.MonkeyPatch) -> Any:
    return register_module_forward_pre_hook(lambda m, a: (_centred(a[0]),) if m is model.first else None)


CHANGES: dict[str, Callable[[_Before, pytest.MonkeyPatch], Any]] = {
    "module": lambda m, _: setattr(m, "first", _Centre()),
    "function": lambda m, _: setattr(m, "function", _centred),
    "hook": lambda m, _: m.first.register_forward_hook(lambda m, a, y: _centred(y)),
    "hook before": lambda m, _: m.first.register_forward_pre_hook(lambda m, a: (_centred(a[0]),)),
    "forward": lambda m, _: setattr(m.first, "forward", MethodType(lambda m, x: _centred(x), m.first)),
    "class": _patched_class,
    "hook everywhere": _everywhere,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_proved_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Before()
    capture, x = _captured(model), torch.randn(B, D)
    _step(capture, x)
    _step(capture, x)
    handle = CHANGES[name](model, monkeypatch)
    try:
        with pytest.raises(NotIsolated):
            _step(capture, x)
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_hooks_that_are_made_anew_for_each_pass_need_no_proof_each() -> None:
    model = _Before()
    capture, x = _captured(model), torch.randn(B, D)
    passes, counts = [], []
    for _ in range(4):
        handle = model.first.register_forward_hook(lambda m, a, y: passes.append(y.shape))
        _step(capture, x)
        handle.remove()
        counts.append(len(passes))
    assert counts[0] > 1 and counts[1:] == [counts[0] + 1, counts[0] + 2, counts[0] + 3]


def test_a_number_that_somebody_sets_is_tried_as_it_may_be_later() -> None:
    model = _Before()
    capture, x = _captured(model), torch.randn(B, D)
    with pytest.raises(NotIsolated, match=r"in (a )?later pass"):
        for model.epoch in range(3):
            _step(capture, x)


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.layer(_centred(x) if int(self.passes) > 5 else x)


def test_passes_that_a_buffer_counts_are_tried_as_they_will_be_later() -> None:
    capture = _captured(_Counts())
    with pytest.raises(NotIsolated, match=r"in (a )?later pass"):
        _step(capture, torch.randn(B, D))


# Written to ----------------------------------------------------------------------------------------------------------------


class _Shifts(nn.Module):
    """As OPT's positions, but in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, D), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        ids += 2
        return self.layer(self.table(ids)).mean(1)


def test_a_forward_that_writes_to_its_inputs_gets_them_once() -> None:
    model = _Shifts().double()
    capture, ids = _captured(model), torch.randint(0, 5, (B, 3))
    found = _step(capture, ids.clone()).raw_norms
    capture.detach()
    wanted = [_norm_alone(model, ids[i : i + 1].clone()) for i in range(B)]
    torch.testing.assert_close(found, torch.stack(wanted))


def _norm_alone(model: nn.Module, x: Tensor) -> Tensor:
    grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    return torch.cat([g.flatten() for g in grads]).norm()


class _Remembers(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(D, D), nn.Parameter(torch.zeros(D), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x) + self.mean


@pytest.mark.parametrize("trained", [False, True])
def test_a_refused_model_keeps_its_weights(trained: bool) -> None:
    model = _Remembers(trained)
    capture, x = _captured(model), torch.randn(B, D)
    with pytest.raises(CaptureError, match="Parameter mean was changed by the forward pass"):
        _step(capture, x)
    # What is trained and was 0 is 0 again; else one ordinary pass was written, and nothing extreme.
    torch.testing.assert_close(model.mean.detach(), torch.zeros(D) if trained else 0.1 * x.mean(0))


# What is no number ---------------------------------------------------------------------------------------------------------


class _Nothing(nn.Module):
    """Layers that count for nothing, as ``0.0 * sum(...)`` for unused parameters does: no gradient says whose their rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Conv1d(2, 3, 2)
        self.idle, self.moving, self.flat = nn.Conv1d(2, 3, 2), nn.GRU(2, 3, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2)
        return self.used(x) + 0.0 * self.idle(x) + 0.0 * self.moving(x)[0][:, :1].mT + 0.0 * self.flat(x)[:, :1].mT


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_record_that_is_no_number_leaves_others_alone_in_layers_without_gradient(value: float) -> None:
    torch.manual_seed(0)
    capture, x = _captured(_Nothing()), torch.randn(B, D)
    _step(capture, x)
    bad = x.clone()
    bad[-1] = value
    found, without = _step(capture, bad), _step(capture, x[:-1])
    moved = torch.cat([(a - b).flatten() for a, b in zip(found.raw_sums.values(), without.raw_sums.values(), strict=True)]).norm()
    assert float(moved) <= 1.0001e-3
    torch.testing.assert_close(found.raw_norms[:-1], without.raw_norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_told_from_a_small_gradient(dtype: torch.dtype) -> None:
    """A softmax whose positions are added up has no gradient: what comes back is rounding. A gradient of 1e-9 is one."""
    x = torch.randn(5, 64, dtype=dtype).requires_grad_()
    h = x * 1.0
    cases = {"cancels": (h.softmax(1).sum(1), False), "small": ((h * 1e-9).sum(1), True)}
    for y, proved in cases.values():
        exits = [Exit(torch.autograd.graph.get_gradient_edge(y), y.detach(), FIRST)]
        owners = tagged(exits, [torch.autograd.graph.get_gradient_edge(h)], [], 5)[0][0]
        assert owners.proved is proved
        assert not proved or bool((owners.each == torch.arange(5).unsqueeze(1)).all())


# Beside the step -----------------------------------------------------------------------------------------------------------


def test_an_evaluation_between_forward_and_backward_is_no_part_of_the_step() -> None:
    model, x = nn.Linear(D, 2).double(), torch.randn(B, D, dtype=torch.float64)
    alone = one_by_one(model, (x,), lambda y: y.square().sum())
    capture = _captured(model)
    capture.examples(B)
    loss = model(x).square().sum()
    assert model(x[:5]).shape == (5, 2)
    loss.backward()
    torch.testing.assert_close(capture.collect(Flat(1e9)).raw_sums["weight"], alone["weight"].sum(0))


@pytest.mark.parametrize("training, rows", [(False, 3 * B), (False, B), (True, 3 * B + 1)])
def test_an_evaluation_before_the_forward_is_no_part_of_the_step(training: bool, rows: int) -> None:
    """Whatever its size: one that is a multiple of the batch, too, or that cannot hold the batch."""
    model, x = nn.Linear(D, 2).double(), torch.randn(B, D, dtype=torch.float64)
    alone = one_by_one(model, (x,), lambda y: y.square().sum())
    capture = _captured(model)
    capture.examples(B)
    model.train(training)
    assert model(torch.randn(rows, D, dtype=torch.float64)).shape == (rows, 2)
    model.train()
    model(x).square().sum().backward()
    torch.testing.assert_close(capture.collect(Flat(1e9)).raw_sums["weight"], alone["weight"].sum(0))


def test_a_gradient_from_another_batch_in_evaluation_mode_is_refused() -> None:
    model = nn.Linear(D, 2).eval()
    capture = _captured(model)
    capture.examples(B)
    with pytest.raises(CaptureError, match="none over the examples of the batch"):
        model(torch.randn(3 * B, D)).sum().backward()


def test_a_gradient_that_comes_back_from_it_is_refused() -> None:
    model = nn.Linear(D, 2)
    capture, x = _captured(model), torch.randn(B, D)
    capture.examples(B)
    loss = model(x).square().sum()
    with pytest.raises(CaptureError, match=r"none over the examples of the batch.*batch\.split\(size\)"):
        (loss + model(x[:5]).sum()).backward()

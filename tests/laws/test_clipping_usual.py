"""The usual step is let through at a glance; whatever is wrong with it is refused all the same."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof.read_pass import Reader
from hushgrad.errors import CaptureError


def _passed() -> tuple[nn.Sequential, Capture, torch.Tensor]:
    """A model, each module of which was called once, and the input that its first layer holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    capture = Capture(model)
    capture.attach()
    return model, capture, torch.randn(5, 4)


def test_a_usual_step_is_recognised() -> None:
    model, capture, x = _passed()
    model(x).square().mean().backward()
    assert capture._usual() is not None
    assert len(capture.collect(Flat(1.0)).raw_norms) == 5


def test_a_usual_pass_of_another_size_needs_no_second_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    model, capture, x = _passed()
    for _ in range(2):  # proved, and read once
        model(x).square().mean().backward()
        capture.discard()
    monkeypatch.setattr(Reader, "read", lambda *args, **options: pytest.fail("read again"))
    model(x[:4]).square().mean().backward()
    norms = capture.collect(Flat(1.0)).raw_norms
    capture.detach()
    for one, norm in zip(x[:4], norms, strict=True):
        grads = torch.autograd.grad(model(one).square().mean(), list(model.parameters()))
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads]).norm())


def test_an_input_changed_between_backward_and_collect_is_refused() -> None:
    model, capture, x = _passed()
    model(x).square().mean().backward()
    x.mul_(2)
    with pytest.raises(CaptureError, match="changed in place"):
        capture.collect(Flat(1.0))


def test_a_gradient_that_went_past_the_capture_is_refused() -> None:
    model, capture, x = _passed()
    loss = model(x).square().mean() + model[2].weight.square().sum()
    loss.backward()
    with pytest.raises(CaptureError, match=r"2\.weight got a gradient that does not come through the outputs"):
        capture.collect(Flat(1.0))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_turned_on_or_off_is_refused(frozen: bool) -> None:
    model, capture, x = _passed()
    if not frozen:
        capture.detach()
        model[0].bias.requires_grad_(False)
        capture.attach()
    model(x).square().mean().backward()
    model[0].bias.requires_grad_(not frozen)
    with pytest.raises(CaptureError, match=r"requires_grad of 0\.bias has changed"):
        capture.collect(Flat(1.0))


def test_a_second_pass_and_a_failure_are_not_usual() -> None:
    model, capture, x = _passed()
    for _ in range(2):
        model(x).square().mean().backward()
    assert capture._usual() is None
    capture.discard()
    model(x).square().mean().backward()
    capture._tape.failure = "refused inside backward"
    with pytest.raises(CaptureError, match="refused inside backward"):
        capture.collect(Flat(1.0))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_leaves_nothing_to_the_garbage_collector(passes: int) -> None:
    model, capture, x = _passed()

    def step() -> None:
        for _ in range(passes):
            model(x).square().mean().backward()
        capture.collect(Flat(1.0))

    def garbage() -> int:
        gc.collect()
        gc.disable()
        try:
            step()
            return gc.collect()
        finally:
            gc.enable()

    step()  # what torch makes once
    gc.collect()
    gc.freeze()  # what other tests left is not looked through again and again
    # Objects of earlier tests, whose finalizers needed one collection more, may be counted once; a step's own every time.
    assert min(garbage() for _ in range(4)) == 0


class _Tied(nn.Module):
    """A table that is read as a layer and as a matrix, beside a layer that is not used: as many calls as in the usual step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.idle = nn.Embedding(10, 4), nn.Linear(4, 4, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) @ self.table.weight.t()).sum(1)


@pytest.mark.parametrize("unused", ["zero", "raise"])
def test_a_parameter_that_is_used_twice_is_not_usual(unused: str) -> None:
    torch.manual_seed(0)
    model, ids = _Tied().double(), torch.randint(10, (5, 3))
    capture = Capture(model, loss_reduction="sum", unused=unused, check_isolation=False)
    capture.attach()
    model(ids).sin().sum().backward()
    if unused == "raise":
        with pytest.raises(CaptureError, match=r"idle\.weight got no gradient"):
            capture.collect(Flat(1.0))
        return
    found = capture.collect(Flat(1.0))
    capture.detach()
    for i, norm in enumerate(found.raw_norms):
        (g,) = torch.autograd.grad(model(ids[i : i + 1]).sin().sum(), [model.table.weight])
        torch.testing.assert_close(norm, g.norm())


@pytest.mark.parametrize("kind", ["a dict", "a list", "a tensor and a number"])
def test_usual_passes_over_other_inputs_than_tensors_are_taken_again_and_again(kind):
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, given, scale=1):
            x = given if isinstance(given, torch.Tensor) else given["x"] if isinstance(given, dict) else given[0]
            return self.layer(x) * scale

    model = Given()
    capture = Capture(model)
    capture.attach()
    for _ in range(6):
        x = torch.randn(4, 3)
        inputs = {"a dict": ({"x": x},), "a list": ([x],), "a tensor and a number": (x, 2)}[kind]
        capture.examples(4)
        model(*inputs).square().mean().backward()
        assert capture.collect(Flat(1.0)).raw_norms.shape == (4,)
    capture.detach()

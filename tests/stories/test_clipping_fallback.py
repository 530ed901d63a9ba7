"""Layers without a rule, and layers that are mapped over the examples: whatever their inputs and outputs look like, exact or refused."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hushgrad.clipping import Capture, Flat, rule
from hushgrad.clipping.rules import vmap
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import check_rule

B = 6
Pair = namedtuple("Pair", ["a", "b"])


class Scale(nn.Module):
    """Anything with a parameter of its own, around a function."""

    def __init__(self, forward):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.inner = forward

    def forward(self, *args, **kwargs):
        return self.inner(self.scale, *args, **kwargs)


class Mapped(Scale):
    """The same, run again for each example instead of read at the frontier."""

    def forward(self, *args, **kwargs):
        return self.inner(self.scale, *args, **kwargs)


rule(Mapped)(vmap.Vmap)


class Around(nn.Module):
    """Layers before and behind, so that gradients have somewhere to go."""

    def __init__(self, layer, call):
        super().__init__()
        self.before, self.layer, self.behind, self.call = nn.Linear(4, 4), layer, nn.Linear(4, 3), call

    def forward(self, x):
        return self.behind(self.call(self.layer, self.before(x)))


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: [x, x.tanh()],
        lambda x: (x, x.tanh()),
        lambda x: {0: x, 1: x.tanh()},
        lambda x: Pair(x, x.tanh()),
        lambda x: [x, x.tanh(), None, "a word"],
    ],
)
def test_nested_inputs(nest):
    check_rule(lambda: Around(Scale(lambda s, xs: xs[0] * s + xs[1]), lambda f, x: f(nest(x))), torch.randn(B, 4))


def test_nested_inputs_by_unit_and_without_a_bad_example():
    torch.manual_seed(0)
    model = Around(Scale(lambda s, xs: xs[0] * s + xs[1]), lambda f, x: f([x, x.tanh()])).double()
    x = torch.randn(B, 4, dtype=torch.float64)
    x[2] = torch.nan
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    capture.units(torch.tensor([0, 1, 2, 0, 1, 3]))
    model(x).sin().sum().backward()
    clipped = capture.collect(Flat(1e9))
    assert clipped.rejected == 1
    capture.detach()
    model(x[[0, 1, 3, 4, 5]]).sin().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(clipped.raw_sums[name], p.grad)


def attention(scale, x, mask):
    return (x * scale @ x.transpose(1, 2) + mask).softmax(-1) @ x


def masked(layer, x):
    T = x.shape[1]
    return layer(x, torch.full((T, T), -1e9, dtype=x.dtype).triu(1))


@pytest.mark.parametrize("kind", [Scale, Mapped])
@pytest.mark.parametrize("T", [B - 1, B, B + 1])
def test_a_mask_of_as_many_positions_as_examples_is_shared(T, kind):
    check_rule(lambda: Around(kind(attention), masked), torch.randn(B, T, 4))


def test_a_mask_that_is_read_row_by_row_would_be_noticed(monkeypatch):
    monkeypatch.setattr(vmap, "_readings", lambda rows: iter([rows]))
    with pytest.raises(NotIsolated, match="alone"):
        check_rule(lambda: Around(Mapped(attention), masked), torch.randn(B, B, 4))


def test_a_table_of_as_many_rows_as_examples_is_shared():
    table = torch.randn(B, 4, dtype=torch.float64)
    for kind in (Scale, Mapped):
        check_rule(lambda: Around(kind(lambda s, x, t: (x * s) @ t.t() @ t), lambda f, x: f(x, table)), torch.randn(B, 4))  # noqa: B023


def test_a_mask_for_each_example_is_not_shared():
    masks = torch.randn(B, 4, dtype=torch.float64)
    check_rule(lambda: Scale(lambda s, x, m: x * s + (m * s).sin()), (torch.randn(B, 4), masks))


class Multiply(torch.autograd.Function):
    """Without what functorch asks for."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: Multiply.apply(x, s),
        lambda s, x: checkpoint(torch.sin, x * s, use_reentrant=False),
    ],
)
def test_what_functorch_cannot_do_is_done_one_by_one(forward):
    check_rule(lambda: Around(Scale(forward), lambda f, x: f(x)), torch.randn(B, 4))


def test_what_cannot_be_repeated_at_all_is_named():
    layer = Scale(lambda s, x: x * s if len(x) > 1 else (x * s).view(7, 7))
    with pytest.raises(CaptureError, match=r"Around cannot be run for fewer or more examples.*any number of examples"):
        check_rule_of(Around(layer, lambda f, x: f(x)))


@dataclass
class Result:
    scores: torch.Tensor
    aside: object = None


def test_a_dataclass_is_looked_into():
    check_rule(lambda: Around(Scale(lambda s, x: Result(x * s)), lambda f, x: f(x).scores), torch.randn(B, 4))


def check_rule_of(model):
    """A step of this model, for refusals: a loop over single examples may not be possible."""
    capture = Capture(model.double(), loss_reduction="sum")
    capture.attach()
    try:
        model(torch.randn(B, 4, dtype=torch.float64)).sin().sum().backward()
        return capture.collect(Flat(1.0))
    finally:
        capture.detach()


def test_a_number_beside_the_examples_is_refused():
    layer = Scale(lambda s, x: (x * s, (x * s).sin().mean()))
    with pytest.raises(NotIsolated, match=r"no way to take 6 examples apart|influence each other"):
        check_rule_of(Around(layer, lambda f, x: sum(f(x))))
    check_rule_of(Around(layer, lambda f, x: f(x)[0]))  # the loss does not use it


def test_an_output_that_another_one_is_computed_from_has_its_own_gradient():
    def both(s, x):
        y = x * s
        return y, y.sin()

    check_rule(lambda: Around(Scale(both), lambda f, x: sum(f(x))), torch.randn(B, 4))


class Keeps(nn.Module):
    """Writes something down in its forward."""

    def __init__(self, keep):
        super().__init__()
        self.scale, self.keep, self.kept = nn.Parameter(torch.randn(4)), keep, None

    def forward(self, x):
        y = x * self.scale
        self.kept = self.keep(self.scale, x, y)
        return y


@pytest.mark.parametrize(
    "keep",
    [lambda s, x, y: s.square().sum(), lambda s, x, y: y.sin(), lambda s, x, y: [y.sum(), x]],
    ids=["penalty", "activation", "list"],
)
def test_what_a_layer_keeps_of_its_parameters_would_lose_its_gradient(keep):
    with pytest.raises(CaptureError, match=r"Keeps owns parameters.* keeps kept as an attribute.*kept\.detach\(\)"):
        check_rule_of(Around(Keeps(keep), lambda f, x: f(x)))


rule(Keeps)(vmap.Vmap)


@pytest.mark.parametrize(
    "keep", [lambda s, x, y: y, lambda s, x, y: y.detach(), lambda s, x, y: x], ids=["output", "detached", "input"]
)
def test_what_a_layer_may_keep_is_that_of_its_own_forward(keep):
    model = Around(Keeps(keep), lambda f, x: f(x) + f.kept.square()).double()
    check_rule(lambda: model, torch.randn(B, 4))
    check_rule_of(model)
    assert model.layer.kept.shape == (B, 4)
    assert torch.isfinite(model.layer.kept).all()  # no tensor of a transform that is over

"""Norms of other people's making: those that are affine in a vector have a rule, everything else has not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hushgrad.clipping.base import Record
from hushgrad.clipping.rules.scaling import scaling_for
from hushgrad.testing import check_rule


class RootNorm(nn.Module):
    """As in Llama, with its own name for epsilon."""

    def __init__(self, size, *, plus=0.0):
        super().__init__()
        self.weight, self.variance_epsilon, self.plus = nn.Parameter(torch.linspace(0.5, 1.5, size)), 1e-5, plus

    def forward(self, x):
        return (self.plus + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class OnePlusNorm(RootNorm):
    """As in Gemma."""

    def __init__(self, size):
        super().__init__(size, plus=1.0)


class MixingNorm(RootNorm):
    """Every output depends on every weight."""

    def forward(self, x):
        return super().forward(x) * self.weight.sum()


class SquaredNorm(RootNorm):
    def forward(self, x):
        return self.weight.square() * x


class OverBatchNorm(RootNorm):
    """Affine in its vector, but examples see each other: that is for the model's proof to find."""

    def forward(self, x):
        return self.weight * (x - x.mean(0))


class Rooted(RootNorm):
    """Not called a norm."""


@pytest.mark.parametrize("kind", [RootNorm, OnePlusNorm])
@pytest.mark.parametrize("shape", [(5, 6), (4, 3, 6), (2, 3, 2, 6), (0, 3, 6)])
def test_norms_have_a_rule(kind, shape):
    assert scaling_for(kind(6), ["weight"]) is not None
    check_rule(lambda: kind(6), torch.randn(*shape, generator=torch.Generator().manual_seed(1)), tolerance=1e-9)


@pytest.mark.parametrize(("kind", "passes"), [(RootNorm, 1), (OnePlusNorm, 2)])
def test_a_norm_that_is_nothing_without_its_vector_is_run_again_once(kind, passes):
    """With w = 0 it gives 0, which nobody needs to compute."""
    rule, module, x, seen = scaling_for(kind(6), ["weight"]), kind(6), torch.randn(4, 3, 6), []
    module.register_forward_hook(lambda *_: seen.append(1))
    record = Record(module, ("weight",), (x,), {}, (torch.ones_like(x),))
    assert rule.per_example(record)["weight"].shape == (4, 6) and len(seen) == passes


@pytest.mark.parametrize("kind", [MixingNorm, SquaredNorm, Rooted])
def test_everything_else_has_none(kind):
    assert scaling_for(kind(6), ["weight"]) is None
    check_rule(lambda: kind(6), torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1)), tolerance=1e-9)


def test_a_norm_over_the_batch_is_refused_by_the_proof():
    from hushgrad.clipping import Capture
    from hushgrad.errors import NotIsolated

    model = nn.Sequential(nn.Linear(6, 6), OverBatchNorm(6))
    capture = Capture(model)
    capture.attach()
    with pytest.raises(NotIsolated):
        model(torch.randn(4, 6))

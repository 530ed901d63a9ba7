"""What a model saves under hooks of its own (checkpoints, ``save_on_cpu``) is read as if it saved it itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError

B, T, WIDTH, BAD = 5, 4, 4, 2


class _Kept(torch.autograd.Function):
    """x @ m, which keeps x where nobody else sees it."""

    @staticmethod
    def forward(ctx, x, m):
        ctx.x, ctx.m = x, m
        return x @ m

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.m.t(), torch.einsum("btd,bte->de", ctx.x, g)


OPERATIONS = {
    "scale": lambda x, m: x * m[0],
    "conv": lambda x, m: F.conv1d(x, m.unsqueeze(-1).expand(-1, -1, 3), padding=1),
    "distance": lambda x, m: torch.cdist(x, m),
    "kept": lambda x, m: _Kept.apply(x, m),
}


class Model(nn.Module):
    """A parameter that all examples share, in front of an operation, inside of ``hooks``."""

    def __init__(self, hooks, operation):
        super().__init__()
        self.first, self.last, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.hooks, self.operation = hooks, OPERATIONS[operation]

    def inside(self, x):
        return self.first(x).tanh() + self.operation(x, self.shared.tanh())

    def forward(self, x):
        if self.hooks == "checkpoint":
            return self.last(checkpoint(self.inside, x, use_reentrant=False).mean(1))
        with save_on_cpu():
            return self.last(self.inside(x).mean(1))


def _sum(hooks, operation, *, bad=None, without=False):
    """The clipped sum of a batch that was not proved."""
    torch.manual_seed(0)
    model, first, x = Model(hooks, operation), torch.randn(B, T, WIDTH), torch.randn(B, T, WIDTH)
    if bad is not None:
        x[BAD, 1, 1] = bad
    x = torch.cat([x[:BAD], x[BAD + 1 :]]) if without else x
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for batch in (first, x):
        model(batch).sin().sum().backward()
        clipped = capture.collect(Flat(1.0))
    return torch.cat([total.flatten() for total in clipped.raw_sums.values()])


@pytest.mark.parametrize("hooks", ["checkpoint", "save_on_cpu"])
@pytest.mark.parametrize("operation", ["scale", "conv", "distance"])
def test_one_record_that_is_no_number_is_left_out_alone(hooks, operation):
    others = _sum(hooks, operation, without=True)
    torch.testing.assert_close(_sum(hooks, operation, bad=float("nan")), others, rtol=1e-5, atol=1e-6)
    assert 0.01 < float((_sum(hooks, operation) - others).norm()) < 1.0001


def test_a_node_that_keeps_such_a_record_where_nobody_sees_it_is_refused():
    with pytest.raises(CaptureError, match="not finite"):
        _sum("save_on_cpu", "kept", bad=float("nan"))

"""Every rule equals a loop of single-example backward passes, whatever the shape."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hushgrad.testing.rules import check_rule

few = settings(max_examples=25, deadline=None)
size = st.integers(1, 6)
batch = st.sampled_from([0, 1, 2, 5])


@few
@given(batch, st.lists(st.integers(1, 9), max_size=2), size, size, st.booleans())
def test_linear(B, positions, d, p, bias):
    check_rule(lambda: nn.Linear(d, p, bias=bias), torch.randn(B, *positions, d))


@few
@given(batch, size)
def test_fallback(B, d):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.randn(d)), nn.Linear(d, 3)

        def forward(self, x):
            return self.inner(x * self.scale), (x * self.scale).sum(-1)

    check_rule(Scaled, torch.randn(B, d))

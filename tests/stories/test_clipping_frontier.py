"""Frontiers of models that nobody here wrote: precisions inside, experts with one example, ways without a gradient, stacks of zeros."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof import shares
from hushgrad.testing.rules import one_by_one, sum_of_sines

WIDTH = 8


def exact(model, x, *, tolerance=1e-9):
    """Two steps' clipped sums and norms are those of single passes."""
    rows = one_by_one(model, (x,), sum_of_sines)
    norms = sum(G.flatten(1).square().sum(1) for G in rows.values()).sqrt()
    clip = float(norms.median()) * 0.9
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    for _ in range(2):
        sum_of_sines(model(x)).backward()
        clipped = capture.collect(Flat(clip))
        torch.testing.assert_close(clipped.raw_norms, norms, rtol=tolerance, atol=tolerance)
        for name, G in rows.items():
            expected = torch.tensordot((clip / norms).clamp(max=1), G, dims=1)
            torch.testing.assert_close(clipped.raw_sums[name], expected, rtol=tolerance, atol=tolerance, msg=name)
    capture.detach()


class _Casts(nn.Module):
    """A double model that does a part of its work in single precision, as most models of language do with norms and states."""

    def __init__(self):
        super().__init__()
        self.first, self.decay = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = self.first(x).float()
        for _ in range(6):
            y = y * torch.exp(-self.decay.float().exp()) + y.sin()
        return y.double()


def test_rounding_is_that_of_the_lowest_precision_inside():
    torch.manual_seed(0)
    exact(_Casts().double(), torch.randn(5, 7, WIDTH).double() * 30, tolerance=1e-5)


COMPLEX = {  # x (B, T, d), a complex weight W (d, d) that is a view of a real parameter, and a bias b (d,)
    "rows": lambda x, W, b: x[:, 0] @ W,
    "positions": lambda x, W, b: (x @ W).sum(1),
    "columns": lambda x, W, b: (W @ x[:, 0].t()).t(),
    "with a bias": lambda x, W, b: torch.addmm(b, x[:, 0], W),
    "a layer": lambda x, W, b: F.linear(x[:, 0], W, b),
    "conjugates": lambda x, W, b: (x[:, 0].conj() @ W.conj()) * b,
    "adjoint": lambda x, W, b: x[:, 0] @ W.mH,
    "sums": lambda x, W, b: torch.einsum("btd,de->be", x, W),
    "spectrum": lambda x, W, b: torch.fft.ifft(torch.fft.fft(x.sum(1)) * b),
}


class _Complex(nn.Module):
    """What a refusal of complex parameters recommends: real ones, seen as complex numbers."""

    def __init__(self, how, seen):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH, 2)), nn.Parameter(torch.randn(WIDTH, 2))
        self.how, self.seen = how, seen

    def forward(self, x):
        made = self.how(torch.fft.fft(x), torch.view_as_complex(self.weight), torch.view_as_complex(self.bias))
        return torch.view_as_real(made).flatten(1) if self.seen == "both" else getattr(made, self.seen)


@pytest.mark.parametrize("seen", ["both", "real", "imag"])
@pytest.mark.parametrize("how", COMPLEX)
def test_products_of_complex_numbers_are_read_by_their_adjoint(how, seen):
    torch.manual_seed(len(how) + len(seen))
    exact(_Complex(COMPLEX[how], seen).double(), torch.randn(5, 3, WIDTH).double())


class _Experts(nn.Module):
    """Experts in one tensor. The first column of x is the expert of each token."""

    def __init__(self, experts=3):
        super().__init__()
        self.into, self.experts = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(experts, WIDTH, WIDTH))

    def forward(self, x):
        rows, chosen = self.into(x).flatten(0, 1), x[..., 0].flatten().long()
        made = torch.zeros_like(rows)
        for k in range(len(self.experts)):
            mine = (chosen == k).nonzero().flatten()
            made = made.index_add(0, mine, F.linear(rows[mine], self.experts[k]))
        return made.view_as(x)


@pytest.mark.parametrize("alone", [0, 2])
def test_an_expert_that_one_example_has_alone_is_read_as_the_others(alone):
    torch.manual_seed(0)
    x = torch.randn(4, 5, WIDTH).double()
    x[..., 0] = torch.arange(5) % 2
    x[alone, 0, 0] = 2
    exact(_Experts().double(), x)


class _Silent(nn.Module):
    """The same layer's output goes two ways, of which one has no gradient yet (a gate that begins at 0)."""

    def __init__(self):
        super().__init__()
        self.into, self.code = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        y = self.into(x)
        return y @ self.code + (y @ self.code).sin() * 0.0 + self.gate * y


def test_a_way_without_gradient_ends_where_those_like_it_do():
    torch.manual_seed(0)
    exact(_Silent().double(), torch.randn(4, 5, WIDTH).double())


class _OneToken(nn.Module):
    """Attention over a single token, whose query and key have a gradient of exactly 0."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(depth))

    def forward(self, x):
        for q, k, v in self.layers:
            x = x + (q(x) @ k(x).transpose(1, 2) / 3).softmax(-1) @ v(x)
        return x


def test_a_frontier_below_another_is_read_once(monkeypatch):
    torch.manual_seed(0)
    asked, pullback = [], shares.pullback
    monkeypatch.setattr(shares, "pullback", lambda *a: asked.append(1) or pullback(*a))
    exact(_OneToken(6).double(), torch.randn(3, 1, WIDTH).double())
    assert len(asked) <= 100  # each of the six in every pass; it was all that lie below each other, thousands


class _Still(nn.Module):
    """A norm behind a factor of 0, in a memory format in which torch cannot differentiate its weights alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.zero = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Parameter(torch.zeros(8, 1, 1))

    def forward(self, x):
        y = self.conv(x).contiguous(memory_format=torch.channels_last)
        return y + self.norm(y) * 0.0 + self.zero


def test_a_layer_without_gradient_is_run_again_in_any_memory_format():
    torch.manual_seed(0)
    exact(_Still().double(), torch.randn(3, 3, 4, 4).double())


def test_examples_of_length_zero_have_no_gradient():
    model = nn.Embedding(5, 3)
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    model(torch.zeros(2, 0, dtype=torch.long)).sum().backward()
    assert not capture.collect(Flat(1.0)).raw_sums["weight"].any()

"""Kept per-example gradients in several blocks: the same sums, norms and weights as in one."""

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat, PerLayer
from hushgrad.clipping.rules import linear
from hushgrad.clipping.sums import Pieces, Sum
from hushgrad.errors import NotIsolated
from hushgrad.testing import check_rule
from hushgrad.testing.rules import one_by_one, sum_of_sines

B, T, D, P = 7, 8, 3, 4  # T * T * (D + P) > 12 * D * P: gradients are kept


class Twice(nn.Module):
    """One weight on two paths, so that kept gradients meet each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


@pytest.fixture(params=[1, 2, 3, B])
def examples_per_piece(request, monkeypatch):
    monkeypatch.setattr(linear, "_PIECE", request.param * D * P)
    return request.param


def test_linear_in_pieces(examples_per_piece):
    check_rule(lambda: nn.Linear(D, P), torch.randn(B, T, D))
    check_rule(lambda: nn.Linear(D, P, bias=False), torch.randn(B, T, D))


def test_module_called_twice_in_pieces(examples_per_piece):
    check_rule(Twice, torch.randn(B, T, D))


def test_units_and_a_bad_example(examples_per_piece):
    torch.manual_seed(0)
    layer, x = nn.Linear(D, P).double(), torch.randn(B, T, D, dtype=torch.float64)
    expected = one_by_one(layer, (x,), sum_of_sines)
    ids = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    by_unit = {name: G.new_zeros(3, *G.shape[1:]).index_add_(0, ids, G) for name, G in expected.items()}
    capture = Capture(layer, loss_reduction="sum")
    capture.attach()
    capture.units(ids)
    sum_of_sines(layer(x)).backward()
    clipped = capture.collect(Flat(1e9))
    torch.testing.assert_close(clipped.raw_norms, sum(G.flatten(1).square().sum(1) for G in by_unit.values()).sqrt())
    bad = x.clone()
    bad[2, 1, 0] = float("nan")
    sum_of_sines(layer(bad)).backward()
    clipped = capture.collect(PerLayer(max_grad_norm=1e9))
    capture.detach()
    assert clipped.rejected == 1
    for name, G in expected.items():
        torch.testing.assert_close(clipped.raw_sums[name], G.sum(0) - G[2], rtol=1e-12, atol=1e-12)


def test_the_branch_is_taken_and_a_wrong_split_is_seen(monkeypatch):
    monkeypatch.setattr(linear, "_PIECE", 2 * D * P)
    seen = []

    def shuffled(self, G, weights, right=Sum.add_kept):
        if isinstance(G, Pieces) and len(G.parts) > 1:
            seen.append(len(G.parts))
            G = Pieces((G.parts[1], G.parts[0], *G.parts[2:]))  # examples 2, 3 get the weights of 0, 1
        right(self, G, weights)

    monkeypatch.setattr(Sum, "add_kept", shuffled)
    with pytest.raises((NotIsolated, AssertionError), match="weight"):  # the proof sees it, if it looks at one of the four
        check_rule(lambda: nn.Linear(D, P), torch.randn(B, T, D, generator=torch.Generator().manual_seed(0)))
    assert set(seen) == {4}

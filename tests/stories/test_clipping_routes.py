"""Rows that the data choose, read by the indices that the graph has saved: exact, for whatever batch comes after the proved one."""

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof import read_pass
from hushgrad.testing.rules import one_by_one, sum_of_sines

B, T, WIDTH, EXPERTS = 6, 5, 4, 3


class Sorted(nn.Module):
    """Tokens sorted by the expert that they choose, each scaled by its expert's gains, and put back; ``between`` meets the sorted rows."""

    def __init__(self, between=lambda rows: rows):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), between
        self.gains = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x):
        tokens = self.first(x).tanh().flatten(0, 1)
        chosen = tokens[:, :EXPERTS].argmax(1)
        order = chosen.argsort(stable=True)
        rows = self.between(tokens[order]) * self.gains[chosen[order]]
        return self.last((tokens + rows[order.argsort()]).view(len(x), -1, WIDTH)).mean(1)


class Relu(torch.autograd.Function):
    """A user's own, which has the name of a known one."""

    @staticmethod
    def forward(ctx, rows):
        return rows.flip(0)

    @staticmethod
    def backward(ctx, g):
        return g.flip(0)


def exact_later(model, monkeypatch):
    """The second batch, which is not proved, gives what its examples give alone; how often tags were asked in it."""
    asked = []
    tagged = read_pass.tagged
    monkeypatch.setattr(read_pass, "tagged", lambda *args, **kwargs: asked.append(1) or tagged(*args, **kwargs))
    model = model.double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    sum_of_sines(model(torch.randn(B, T, WIDTH).double())).backward()
    capture.collect(Flat(1.0))
    x = torch.randn(B, T, WIDTH).double()
    with capture.pause():
        rows = one_by_one(model, (x,), sum_of_sines)
    norms = sum(G.flatten(1).square().sum(1) for G in rows.values()).sqrt()
    asked.clear()
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(float(norms.median())))
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=1e-9, atol=1e-12)
    for name, G in rows.items():
        expected = torch.tensordot((norms.median() / norms).clamp(max=1), G, dims=1)
        torch.testing.assert_close(clipped.raw_sums[name], expected, rtol=1e-8, atol=1e-11)
    return len(asked)


def test_indices_tell_whose_row_it_is(monkeypatch):
    torch.manual_seed(0)
    assert exact_later(Sorted(), monkeypatch) == 0


@pytest.mark.parametrize(
    "between",
    [
        lambda rows: torch.cat([rows[:1], rows[1:]]),
        lambda rows: rows.flip(0).flip(0),
        lambda rows: rows.t().contiguous().t(),
        lambda rows: Relu.apply(Relu.apply(rows)),
    ],
    ids=["in two parts", "turned round", "transposed", "a known name"],
)
def test_what_is_not_known_to_keep_rows_is_asked_by_tags(between, monkeypatch):
    torch.manual_seed(0)
    assert exact_later(Sorted(between), monkeypatch) > 0


class Masked(nn.Module):
    """Attention with a learned bias and a mask of its own for each example: some of its probabilities have lost most of their bits."""

    def __init__(self):
        super().__init__()
        self.keys, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(T, T))

    def forward(self, x):
        mask = -100.0 * (torch.arange(T) > 2).expand(len(x), T, T)
        scores = self.keys(x) @ x.transpose(1, 2)
        return (scores + (self.bias + mask)).softmax(2) @ x


def test_numbers_too_small_to_be_scaled_do_not_move_the_frontier(monkeypatch):
    torch.manual_seed(0)
    seen = []
    watch = read_pass.watch
    monkeypatch.setattr(read_pass, "watch", lambda borders, *rest: seen.extend(borders) or watch(borders, *rest))
    model = Masked()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    sum_of_sines(model(torch.randn(B, T, WIDTH))).backward()
    capture.collect(Flat(1.0))
    assert {(border.node.name(), border.slot) for border in seen} == {("AddBackward0", 0)}  # where the bias meets the masks

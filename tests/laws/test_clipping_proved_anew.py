"""A pass that is proved on its own data has the sums and norms of a pass that was proved before, bit for bit: whatever its records are.

A record behind which everything is dead hides a layer from the proof of its batch, and others' roundings must not follow from that.
"""

import random

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.certificate import Certificate

WIDTH = 6
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "twice": lambda: nn.Sequential(nn.Linear(WIDTH, 9, bias=False), nn.Linear(9, WIDTH)),
    "convolution": lambda: nn.Conv1d(2, 2, 3, padding=1),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "tanh": nn.Tanh,
    "positions first": lambda: Turned(nn.GRU(WIDTH, WIDTH)),
}


class Turned(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(0, 1))[0].transpose(0, 1)


class Gated(nn.Module):
    """The drawn layers count for records with a positive first number."""

    def __init__(self, lot):
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in ("linear", *lot.sample(list(LAYERS), k=2))))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.layers(x) * (x[:, :1, :1] > 0))


def collected(capture, model, x, y):
    capture.examples(len(x), dim=0)
    (model(x) * y).sum().backward()
    return capture.collect(Flat(1.0))


def drawn(seed):
    """A model, a batch whose first, middle and last records are dead, and large losses whose two positions nearly cancel."""
    torch.manual_seed(seed)
    x, y = 0.1 + torch.rand(8, 2, WIDTH), torch.randn(8, 2, 3)
    x[:, 1] = x[:, 0] * (1 + 1e-6)
    y[:, 1] = -y[:, 0]
    x[[0, 4, 7], 0, 0] = -1.0
    return Gated(random.Random(seed)), x, 1e6 * y


@pytest.mark.parametrize("certified", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_proof_on_the_batch_itself_changes_no_bit(seed, certified):
    model, x, y = drawn(seed)
    made = []
    for first in (x.abs(), x):
        capture = Capture(model, loss_reduction="sum", certificate=Certificate(64, 64) if certified else None)
        capture.attach()
        if first is not x:
            collected(capture, model, first, y)
        made.append(collected(capture, model, x, y))
        capture.detach()
    known, anew = made
    assert torch.equal(known.raw_norms, anew.raw_norms)
    assert torch.equal(known.raw_weights, anew.raw_weights)
    assert all(torch.equal(known.raw_sums[name], anew.raw_sums[name]) for name in known.raw_sums)


class Now:
    """Draws the lot by which a whole proof is repeated."""

    random = staticmethod(lambda: 0.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tiny", [False, True])
def test_a_proof_that_is_repeated_on_records_without_gradients_forgets_nothing(seed, tiny):
    model, x, y = drawn(seed)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    before, known = collected(capture, model, x.abs(), y), capture._root.known
    (proved,), lot = known.every(), capture._root._lot
    capture._root._lot = Now()
    collected(capture, model, -x.abs()[: 3 if tiny else 8], y[: 3 if tiny else 8])
    capture._root._lot = lot
    (kept,) = known.every()
    assert kept.places == proved.places and kept.frontier == proved.frontier and kept.most >= proved.most
    after = collected(capture, model, x.abs(), y)
    assert torch.equal(before.raw_norms, after.raw_norms)
    assert all(torch.equal(before.raw_sums[name], after.raw_sums[name]) for name in before.raw_sums)

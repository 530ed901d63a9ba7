"""The examples that a proof runs alone may have no gradient where others have one: a batch is read by its rules all the same."""

import random

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat

WIDTH = 6


class Recurrent(nn.Module):
    def __init__(self, lot):
        super().__init__()
        self.first = lot.random() < 0.6
        self.inner = lot.choice([nn.RNN, nn.GRU, nn.LSTM])(WIDTH, WIDTH, batch_first=self.first)

    def forward(self, x):
        return self.inner(x)[0] if self.first else self.inner(x.transpose(0, 1))[0].transpose(0, 1)


class Shift(torch.autograd.Function):
    """A function whose tensors are not its first arguments, and which rolls the gradient of its shared one."""

    @staticmethod
    def forward(ctx, by, x, note, w):
        ctx.by = by
        return x + by * w

    @staticmethod
    def backward(ctx, g):
        return None, g, None, ctx.by * g.roll(1, 0)


class Add(Shift):
    """The same under a name of torch's own."""


class Shifted(nn.Module):
    def __init__(self, lot):
        super().__init__()
        self.function, self.w = lot.choice([Shift, Add]), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x):
        return self.function.apply(0.5, x, None, self.w)


LAYERS = {
    "linear": lambda lot: nn.Linear(WIDTH, WIDTH),
    "convolution": lambda lot: nn.Conv1d(2, 2, 3, padding=1),
    "norm": lambda lot: nn.LayerNorm(WIDTH),
    "attention": lambda lot: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "recurrent": Recurrent,
    "function": Shifted,
}


class Gated(nn.Module):
    """Layers that count for a record, each by a number of it."""

    def __init__(self, lot):
        super().__init__()
        names = ("linear", lot.choice(["recurrent", "function"]), lot.choice(list(LAYERS)))
        self.layers = nn.ModuleList(LAYERS[name](lot) for name in names)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = x
        for k, layer in enumerate(self.layers):
            h = layer(h) * (x[:, :1, k : k + 1] > 0)
        return self.head(h + x)


def alone(model, x, y):
    """The clipped gradients of single examples, added up."""
    made = 0.0
    for one, loss in zip(x.split(1), y.split(1), strict=True):
        found = torch.autograd.grad(
            (model(one) * loss).sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        g = torch.cat([t.flatten() for t in found])
        made = made + g / g.norm().clamp(min=1.0)
    return made


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_whose_surveyed_examples_are_dead_is_read(seed):
    lot = random.Random(seed)
    torch.manual_seed(seed)
    model, B = Gated(lot), lot.choice([4, 5, 8])
    x, y = 0.1 + torch.rand(B, 2, WIDTH), torch.randn(B, 2, 3)
    for k in range(len(model.layers)):
        x[
            [0, B // 2, B - 1, *lot.sample(range(B), lot.randrange(B - 3))], 0, k
        ] *= -1.0  # dead in one layer, perhaps not in others
        x[lot.choice([i for i in range(B) if i not in (0, B // 2, B - 1)]), 0] = 0.5
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    capture.examples(B, dim=0)
    (model(x) * y).sum().backward()
    found = torch.cat([t.flatten() for t in capture.collect(Flat(1.0)).raw_sums.values()])
    with capture.pause():
        torch.testing.assert_close(found, alone(model, x, y), rtol=1e-4, atol=1e-5)
    assert not any(structure.partly for structure in capture._root.known.every())

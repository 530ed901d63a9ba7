"""Where the terms of an output cancel, another order of summation is no influence; an influence beside it is seen as ever."""

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture
from hushgrad.errors import NotIsolated

EXAMPLES, WIDTHS = 12, (130, 500, 2000)


def cancelled(head, h):
    """The head's output for ``h`` becomes what rounding leaves of it."""
    with torch.no_grad():
        k = int(h.abs().argmax())
        head.weight[0, k] -= float(head.weight[0].double() @ h.double() / h[k].double())


def zeros(d):
    head = nn.Linear(d, 1, bias=False)
    cancelled(head, torch.ones(d))  # what stands for others when all inputs are 0
    return nn.Sequential(head), torch.zeros(EXAMPLES, d)


def ones(d):
    head = nn.Linear(d, 1, bias=False)
    cancelled(head, torch.ones(d))
    return nn.Sequential(head), torch.ones(EXAMPLES, d)


def biases(d):
    model, x = nn.Sequential(nn.Linear(5, d), nn.ReLU(), nn.Linear(d, 1, bias=False)), torch.zeros(EXAMPLES, 5)
    cancelled(model[2], model[:2](x)[0])
    return model, x


def tokens(d):
    model = nn.Sequential(nn.Embedding(10, d // 2), nn.Flatten(), nn.Linear(2 * (d // 2), 1, bias=False))
    x = torch.full((EXAMPLES, 2), 3)
    cancelled(model[2], model[:2](x)[0])
    return model, x


class Beside(nn.Module):
    """A little of everybody is added to what cancels."""

    def __init__(self, model, much):
        super().__init__()
        self.model, self.much = model, much

    def forward(self, x):
        return self.model(x) + self.much * x.double().sum().to(torch.float32)


def proved(model, x):
    capture = Capture(model)
    capture.attach()
    capture.examples(EXAMPLES)
    try:
        model(x).sum().backward()
    finally:
        capture.discard()
        capture.detach()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("made", [zeros, ones, biases, tokens])
def test_what_cancels_is_no_influence(made, seed):
    torch.manual_seed(seed)
    proved(*made(WIDTHS[seed % 3]))


@pytest.mark.parametrize("made", [zeros, ones, biases, tokens])
def test_an_influence_beside_what_cancels_is_refused(made):
    torch.manual_seed(0)
    model, x = made(500)
    with pytest.raises(NotIsolated):
        proved(Beside(model, 1e-4), x)

"""Sizes that coincide: a model that mixes examples and keeps something else apart, of which there are as many, is not read by that."""

from contextlib import suppress
from copy import deepcopy
from itertools import product

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated

MIXING = {
    "centred": lambda h: h - h.mean(0, keepdim=True),
    "centred, detached": lambda h: h - h.detach().mean(0, keepdim=True),
    "so far": lambda h: h.cumsum(0),
    "rolled": lambda h: h.roll(1, 0),
    "soft": lambda h: h.softmax(0),
    "largest": lambda h: h / (1 + h.detach().abs().amax(0, keepdim=True)),
    "the others": lambda h: h + h.flip(0),
}


class _Mixed(nn.Module):
    """Mixes dimension ``dim``; all others but the last stay apart."""

    def __init__(self, name, dim=0, width=2):
        super().__init__()
        self.name, self.dim, self.layer = name, dim, nn.Linear(width, width).double()

    def forward(self, x):
        return self.layer(MIXING[self.name](x.transpose(0, self.dim)).transpose(0, self.dim))


class _Features(nn.Module):
    """The same for a table of features, which nothing joins."""

    def __init__(self, name):
        super().__init__()
        self.name, self.scale = name, nn.Parameter(torch.tensor(1.5).double())

    def forward(self, x):
        return self.scale * MIXING[self.name](x)


def _norms(capture, x, **said):
    if said:
        capture.examples(**said)
    capture.model(x).sin().sum().backward()
    return capture.collect(Flat(1.0)).raw_norms


def _attached(model):
    capture = Capture(deepcopy(model), loss_reduction="sum")
    capture.attach()
    return capture


def _drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _alone(model, x, dim):
    return torch.cat([_norms(_attached(model), one, count=1, dim=dim) for one in x.split(1, dim)])


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("said", [{"dim": 0}, {"dim": None}, {}])
def test_positions_or_features_as_many_as_examples(name, said):
    torch.manual_seed(0)
    for B in (2, 3):
        for model, shape in ((_Mixed(name), (B, B, 2)), (_Mixed(name, width=B), (B, B, B)), (_Features(name), (B, B))):
            with pytest.raises((CaptureError, NotIsolated)):
                _norms(_attached(model), _drawn(*shape), **({"count": B} | said if said else {}))


@pytest.mark.parametrize("name", MIXING)
def test_what_one_example_shows_says_nothing_of_more(name):
    torch.manual_seed(0)
    for B, T in ((2, 1), (2, 2), (3, 3)):
        capture = _attached(_Mixed(name))
        with suppress(CaptureError, NotIsolated):
            _norms(capture, _drawn(1, 1, 2), count=1, dim=0)
        with pytest.raises((CaptureError, NotIsolated)):
            _norms(capture, _drawn(B, T, 2), count=B, dim=0)


@pytest.mark.parametrize("name", MIXING)
def test_positions_that_a_model_mixes_are_its_own_affair(name):
    torch.manual_seed(0)
    for B, T, dim in product((1, 2), (2, 3), (0, 1)):  # the examples are in dimension dim
        model = _Mixed(name, dim=1 - dim)
        x = _drawn(B, T, 2) if dim == 0 else _drawn(T, B, 2)
        torch.testing.assert_close(_norms(_attached(model), x, count=B, dim=dim), _alone(model, x, dim))


def test_a_loop_that_turns_its_batches_has_shown_it_by_a_batch_of_another_size():
    torch.manual_seed(0)
    model = _Mixed("centred")  # time first, though the loader deals examples first
    capture = _attached(model)
    for T, B in ((4, 3), (3, 3), (4, 4), (4, 2)):
        x = _drawn(T, B, 2)
        torch.testing.assert_close(_norms(capture, x, count=B, dim=0), _alone(model, x, 1))
    with pytest.raises(CaptureError, match="where the examples are said to be"):
        _norms(_attached(model), _drawn(3, 3, 2), count=3, dim=0)

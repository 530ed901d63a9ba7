"""Inputs that can be read in two ways: the model shows which is right, or the loader does, or they are refused."""

from collections import OrderedDict, UserDict, namedtuple
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo.examine import Verdict, examine
from zoo.specimen import Specimen

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.sampling.collate_checks import grown_dim, keeps_apart, sizes_apart

B = 4


def _layer():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def _norms(x, **said):
    model = _layer().double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    if said:
        capture.examples(B, **said)
    model(x).square().sum().backward()
    return capture.collect(Flat(1.0)).raw_norms


def _alone(x, dim):
    return torch.cat([_norms(one[None]) for one in x.double().unbind(dim)])


@pytest.mark.parametrize("dim", [0, 1])
def test_two_dimensions_that_a_model_treats_alike(dim):
    x = torch.randn(B, B, 5, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(_norms(x, dim=dim), _alone(x, dim))
    torch.testing.assert_close(_norms(x), _alone(x, 0))  # nobody counted them: the first
    with pytest.raises(CaptureError, match="which rows of an input of the shape"):
        _norms(x, dim=None)


def _stacked(dim):
    return lambda records: torch.stack(records, dim)


COLLATED = {
    "examples first": (_stacked(0), Verdict.EXACT),
    "time first": (_stacked(1), Verdict.EXACT),
    "joined": (torch.cat, Verdict.ATTRIBUTABLE),  # rows of one example need a dimension of their own
    "joined, window by window": (lambda records: torch.stack(records, 1).flatten(0, 1), Verdict.ATTRIBUTABLE),
}


@pytest.mark.parametrize("way", COLLATED)
def test_the_loader_knows_where_it_puts_the_examples(way):
    collate, verdict = COLLATED[way]

    def records(sizes):
        lot = torch.Generator().manual_seed(2)
        return [torch.randn(B, 5, generator=lot, dtype=torch.float64) for _ in range(B)]

    specimen = Specimen("own/rows", _layer, records, lambda model, x: model(x).square().sum(), collate=collate, reduction="sum")
    assert examine(specimen).verdict is verdict


def test_where_a_collate_function_puts_examples():
    records = [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)]
    assert [grown_dim(records, collate) for collate, _ in COLLATED.values()] == [0, 1, 0, None]


def test_a_collate_function_may_give_each_example_a_string_before_its_tensors():
    def named(records):
        return {"name": [f"r{i}" for i in range(len(records))], "x": torch.stack(records), "y": torch.stack(records)}

    records = [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)]
    assert grown_dim(records, named) == 0
    assert keeps_apart(records, named)
    assert not keeps_apart(records, lambda some: {**named(some), "y": torch.stack(some) - torch.stack(some).mean(0)})
    assert grown_dim(records, lambda some: {"boxes": list(some), "x": torch.stack(some)}) is None


class Named(dict):
    """A class of its own, which torch's trees do not open."""


Pair = namedtuple("Pair", "x y")
KINDS = [dict, UserDict, OrderedDict, Named, MappingProxyType, lambda made: Pair(**made), lambda made: (UserDict(made), 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_collate_function_returns_is_opened_whatever_class_it_has(kind):
    lot = torch.Generator().manual_seed(7)
    records = [torch.randn(2, 3, generator=lot) for _ in range(9)]

    def collate(some, mixed=0.0):
        x = torch.stack(some, 1)
        return kind({"x": x + mixed * x.mean(1, keepdim=True), "y": x[0, :, 0]})

    assert grown_dim(records, collate) == 1
    assert sizes_apart(collate(records), 1) == [(2, 3)]
    assert keeps_apart(records, collate)
    assert not keeps_apart(records, partial(collate, mixed=0.1))


def test_bags_are_counted():
    torch.manual_seed(0)
    model = nn.EmbeddingBag(9, 4, mode="mean").double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    F.mse_loss(model(torch.arange(8) % 9, torch.tensor([0, 3, 4])), torch.ones(3, 4).double(), reduction="sum").backward()
    assert len(capture.collect(Flat(1.0)).raw_norms) == 3


def test_an_evaluation_of_data_as_wide_as_the_batch_is_no_part_of_the_step():
    model, x = _layer().double(), torch.ones(5, 5).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    capture.examples(5)
    model.eval()
    model(torch.ones(9, 5).double())
    model.train()
    model(x).sum().backward()
    assert len(capture.collect(Flat(1.0)).raw_norms) == 5


def test_a_batch_that_a_model_takes_whole():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 3)

        def forward(self, batch):
            return self.bag(*batch)

    def joined(records):
        return torch.cat(records), torch.tensor([0, *map(len, records)]).cumsum(0)[:-1]

    records = [torch.arange(n) % 9 for n in (1, 4, 2, 3)]
    specimen = Specimen("own/bags", Bags, lambda _: records, lambda m, x: m(x).square().sum(), collate=joined, reduction="sum")
    assert examine(specimen).verdict is Verdict.EXACT


class _Fussy(nn.Module):
    """Takes leaves of the graph only, as speech models do that ask for the gradient of their input."""

    def forward(self, x):
        x.requires_grad = True
        return x * 2


def test_the_layer_to_blame_is_named_behind_one_that_cannot_be_called_alone():
    capture = Capture(nn.Sequential(_Fussy(), nn.Linear(3, 4), nn.BatchNorm1d(4)))
    capture.attach()
    with pytest.raises(NotIsolated, match=r"2 \(BatchNorm1d\).*replace_batchnorm"):
        capture.model(torch.randn(6, 3))

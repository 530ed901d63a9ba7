"""Parameters that begin at 0 hide nothing from a proof, and are as they were after it."""

import random

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat, runs
from hushgrad.clipping.proof.changed_weights import lifted
from hushgrad.testing.rules import one_by_one, sum_of_sines

WIDTH = 6


class _Adapted(nn.Module):
    """A frozen layer with an adapter whose last factors are 0, as LoRA's second matrix, a gate, or a scale."""

    def __init__(self, kinds):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias="bias" in kinds)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        nn.init.zeros_(self.up.weight if "up" in kinds else self.gate)
        if "minus" in kinds:
            with torch.no_grad():
                self.up.weight.neg_()

    def forward(self, x):
        return self.base(x).tanh() + self.up(self.down(x)) * self.gate


def _drawn(seed):
    lot = random.Random(seed)
    torch.manual_seed(seed)
    kinds = {kind for kind in ("up", "bias", "minus") if lot.random() < 0.6}
    layers = [_Adapted(kinds) for _ in range(lot.randint(1, 3))]
    return nn.Sequential(*layers).double(), torch.randn(lot.randint(4, 7), lot.randint(2, 5), WIDTH).double()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_below_zeros_is_told_in_the_first_pass(seed):
    model, x = _drawn(seed)
    before = [(p.detach().clone(), p._version) for p in model.parameters()]
    rows = one_by_one(model, (x,), sum_of_sines)
    norms = sum(G.reshape(len(x), -1).square().sum(1) for G in rows.values()).sqrt()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(float(norms.median())))
    torch.testing.assert_close(clipped.raw_norms, norms)
    (structure,) = capture._root.known.every()
    assert not structure.partly
    assert all(place.native for (site, _), place in structure.places.items() if site.path.endswith("down"))
    for p, (was, version) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.view(torch.int64), was.view(torch.int64)) and p._version == version
    capture.detach()


class _Looks(nn.Module):
    """Does something else as long as a parameter is 0."""

    def __init__(self):
        super().__init__()
        self.first, self.scale, self.extra = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(())), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x) + self.scale * x
        return y + self.extra(x).sin() if float(self.scale.detach()) == 0 else y.sin()


def test_a_model_that_looks_at_a_parameter_is_proved_as_it_is():
    torch.manual_seed(0)
    model, x = _Looks().double(), torch.randn(5, WIDTH).double()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    for scale in (0.0, 0.0, 0.3):
        model.scale.data.fill_(scale)
        with capture.pause():
            rows = one_by_one(model, (x,), sum_of_sines)
        norms = sum(G.reshape(len(x), -1).square().sum(1) for G in rows.values()).sqrt()
        sum_of_sines(model(x)).backward()
        torch.testing.assert_close(capture.collect(Flat(1.0)).raw_norms, norms)
    capture.detach()


def test_zeros_come_back_after_an_error():
    p, frozen = nn.Parameter(torch.zeros(3)), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ZeroDivisionError), lifted([p, frozen]):
        assert p.detach().abs().min() > 0 and not frozen.any()
        raise ZeroDivisionError
    assert not p.detach().any()


@pytest.mark.parametrize("seed", range(20))
def test_outputs_are_compared_alike_in_pieces(seed, monkeypatch):
    lot = torch.Generator().manual_seed(seed)
    a = torch.randn(7, 5, generator=lot)
    b = a + torch.randn(7, 5, generator=lot) * 10 ** -float(torch.randint(2, 7, (), generator=lot))
    whole = runs.same(a, b)
    monkeypatch.setattr(runs, "_PIECE", 1 + seed)
    assert runs.same(a, b) == whole

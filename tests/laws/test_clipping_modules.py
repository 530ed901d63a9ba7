"""Random small modules are exact or refused; a defect in what tells the rows apart is found by them."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_modules import examine
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof import read_pass, trials
from hushgrad.errors import NotIsolated
from hushgrad.testing.rules import one_by_one, sum_of_sines

_FLAT = Flat(1.0)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_a_random_module_is_exact_or_refused(number):
    verdict = examine(Random(number))
    assert verdict.word == ("refused" if verdict.mixes else "exact"), verdict.what


class _Largest(nn.Module):
    """Shared tables, and of what comes out the largest over all positions: each example has its own, by chance."""

    def __init__(self, T: int, D: int, *, gated: bool) -> None:
        super().__init__()
        self.table, self.gates, self.head = (
            nn.Embedding(T, D),
            nn.Parameter(torch.rand(T, D) + 0.5) if gated else None,
            nn.Linear(D, 2),
        )
        nn.init.uniform_(self.head.weight, 0.5, 1.0)

    def forward(self, x):
        h = x + self.table(torch.arange(x.shape[1]))
        return self.head(h if self.gates is None else h * self.gates[: x.shape[1]]).amax(1)


class _Soft(_Largest):
    """The same with a table that is reshaped before it meets the examples."""

    def forward(self, x):
        shares = self.table(torch.arange(x.shape[1])).softmax(0)
        return self.head(x * (shares.t().contiguous().t() if self.gates is not None else shares)[None]).amax(1)


@pytest.mark.parametrize("kind", [_Largest, _Soft])
@pytest.mark.parametrize("gated", [False, True])
def test_what_all_share_is_so_though_each_row_of_it_has_one_owner_by_chance(kind, gated):
    for seed in range(6):
        torch.manual_seed(seed)
        T = 3 + seed % 3
        model, x = kind(T, 2 + seed % 2, gated=gated).double(), torch.randn(T, T, 2 + seed % 2, dtype=torch.float64)
        x[torch.arange(T), torch.randperm(T)] += 8  # as many examples as positions, and each has another one
        single = one_by_one(model, (x,), sum_of_sines)
        capture = Capture(model, loss_reduction="sum", unused="zero" if kind is _Soft else "raise")
        capture.attach()
        capture.examples(T, dim=0)
        sum_of_sines(model(x)).backward()
        norms = torch.stack([G.flatten(1).square().sum(1) for G in single.values()]).sum(0).sqrt()
        torch.testing.assert_close(capture.collect(_FLAT).raw_norms, norms)
        capture.detach()


def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "broken", lambda *_: None)  # nothing is sealed
    monkeypatch.setattr(trials.Trials, "_switched", lambda *_: None)  # nor tried with other weights
    monkeypatch.setattr(read_pass, "routed", lambda *_: {})  # and rows that are moved are believed to stay
    assert any(examine(Random(number)).word == "wrong" for number in (4, 26))


class _Room(nn.Module):
    """Some examples take up room, of which there is enough for the first batch."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.layer = room, nn.Linear(3, 2)

    def forward(self, x):
        mine = x.detach()[:, 0] > 0
        return self.layer(x * (mine & (mine.cumsum(0) <= self.room)).to(x)[:, None])


@pytest.mark.parametrize("B", [4, 9, 16])
def test_room_that_only_some_examples_take_up_is_noticed_whoever_is_in_the_first_batch(B):
    for seed in range(6):
        torch.manual_seed(seed)
        few = seed % 3  # who take up room in the first batch
        x = torch.randn(B, 3)
        x[:, 0] = torch.where(torch.arange(B) < few, x[:, 0].abs(), -x[:, 0].abs())[torch.randperm(B)]
        model = _Room(room=max(1, few) + seed % 2)
        capture = Capture(model, loss_reduction="sum")
        capture.attach()
        capture.examples(B, dim=0)
        with pytest.raises(NotIsolated):
            model(x).sum().backward()
            capture.collect(_FLAT)
        capture.detach()

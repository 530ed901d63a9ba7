"""Branches that a proof has not taken: on a number that somebody's data hold, on a counter that nobody sees, on a seed made of the data.

One record moves the clipped sum by at most C, whenever the branch is taken first; or the pass is refused.
"""

import random

import numpy as np
import pytest
import torch
from test_clipping_neighbours import REFUSED, SEEDS, C, Sorted, Two, clipped, drawn, gap
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof.fixed_randomness import draw_from, host_draws
from hushgrad.errors import NotIsolated

# Numbers that the forward looks for -------------------------------------------------------------------------------------------


def _looks(lot):
    """A question about the whole batch, drawn at random: is this number anywhere?"""
    value = lot.choice([0.0, -1.0, 7.0, -999.0, round(lot.uniform(-9, 9), 2)])
    found = lot.choice(
        [
            lambda x: (x == value).any(),
            lambda x: ((x > value - 0.05) & (x < value + 0.05)).any(),
            lambda x: (x == value).sum() > 0,
            lambda x: ~(x != value).all(),
            lambda x: (x == value).all(1).any(),
        ]
    )
    return value, found


class _Looking(nn.Module):
    def __init__(self, found, *, branch):
        super().__init__()
        self.a, self.b, self.found, self.branch = nn.Linear(6, 8), nn.Linear(8, 3), found, branch

    def forward(self, x):
        more = (5.0 if self.found(x) else 0.0) if self.branch else torch.where(self.found(x), 5.0, 0.0)
        return self.b(self.a(x).tanh() + more)


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_number_that_the_forward_looks_for(seed, branch):
    value, found = _looks(random.Random(seed))
    bad = drawn(seed, 12, 6)
    bad[4] = value
    torch.manual_seed(seed)
    assert gap(_Looking(found, branch=branch), [(drawn(seed + 1, 12, 6),)], (bad,), 4) <= 1.0001


class _Tokens(nn.Module):
    """A token that the first batch does not have; ``how`` says what it does to everybody."""

    def __init__(self, how):
        super().__init__()
        self.table, self.b, self.how = nn.Embedding(20, 8), nn.Linear(8, 3), how

    def forward(self, ids):
        return self.b(self.table(ids).tanh().mean(1) + self.how(ids))


_TOKENS = {
    "any": lambda ids: torch.where((ids == 19).any(), 0.1, 10.0),
    "a branch": lambda ids: 0.1 if (ids == 19).any() else 10.0,
    "the largest": lambda ids: torch.where(ids.max() > 18, 0.1, 10.0),
    "how many": lambda ids: 1.0 + (ids == 19).sum(),
    "the longest": lambda ids: (ids != 19).sum(1).min(),
    "a number": lambda ids: 0.1 if int((ids == 19).sum()) else 10.0,
}


@pytest.mark.parametrize("how", _TOKENS)
def test_a_token_that_the_first_batch_does_not_have(how):
    torch.manual_seed(0)
    ids = torch.randint(0, 19, (12, 5))
    bad = ids.clone()
    bad[3, 2:] = 19
    assert gap(_Tokens(_TOKENS[how]), [(ids,)], (bad,), 3) <= 1.0001


def test_answers_that_were_proved_are_not_proved_again(monkeypatch):
    """Padding in some batches and not in others: two proofs, whatever comes then."""
    model = _Tokens(lambda ids: torch.where(ids == 0, 0.5, 1.0).mean(1, keepdim=True) if (ids == 0).any() else 1.0)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    proofs, prove = [], capture._root._trials.proved
    monkeypatch.setattr(capture._root._trials, "proved", lambda *args: proofs.append(1) or prove(*args))
    torch.manual_seed(0)
    for k in range(8):
        ids = torch.randint(1, 20, (6, 5))
        ids[0, 3:] *= k % 2
        clipped(capture, model, (ids,))
    capture.detach()
    assert len(proofs) <= 2


# Counters that nobody sees ----------------------------------------------------------------------------------------------------

_COUNT = {"n": 0}


class _Box:
    def __init__(self):
        self.n = 0


def _counters():
    box, cell = _Box(), [0]
    box.inside = _Box()

    def held():
        box.inside.n += 1
        return box.inside.n

    def listed():
        cell[0] += 1
        return cell[0]

    def of_all():
        _COUNT["n"] += 1
        return _COUNT["n"]

    return {"held": held, "listed": listed, "of all": of_all}


@pytest.mark.parametrize("where", ["held", "listed", "of all"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_branch_that_a_hidden_counter_opens(where, seed):
    lot = random.Random(seed)
    count, _COUNT["n"] = _counters()[where], 0
    mixing = lot.choice([lambda x: x - x.detach().mean(0), lambda x: x / x.detach().abs().amax(), lambda x: x.cummax(0).values])
    begins = lot.choice([lambda n: n > 60, lambda n: n % 61 == 0, lambda n: 60 < n < 70])

    class Late(Two):
        def forward(self, x):
            return super().forward(mixing(x) if begins(count()) else x)

    x = drawn(seed, 12, 6)
    bad = x.clone()
    bad[2] *= 1e3
    model = Late(lambda h: h)
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    moved = 0.0
    try:
        for _ in range(40):
            moved = max(
                moved, float((clipped(capture, model, (bad,)) - clipped(capture, model, (x[torch.arange(12) != 2],))).norm())
            )
    except REFUSED:
        pass
    capture.detach()
    assert moved <= 1.0001 * C


def test_a_loop_over_examples_is_proved_once(monkeypatch):
    """The order of its functions follows from how many there are."""

    class Loop(Two):
        def forward(self, x):
            return torch.stack([super(Loop, self).forward(row[None])[0] for row in x])

    model = Loop(lambda h: h)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    proofs, prove = [], capture._root._trials.proved
    monkeypatch.setattr(capture._root._trials, "proved", lambda *args: proofs.append(1) or prove(*args))
    for n in (6, 5, 8, 7, 4):
        clipped(capture, model, (drawn(n, n, 6),))
    capture.detach()
    assert len(proofs) <= 5


# Seeds ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_a_seed_that_follows_from_the_data(own):
    generator = torch.Generator()

    def dropped(h):
        seed = int(h.detach().abs().sum() * 1e4)
        if not own:
            torch.manual_seed(seed)
            return nn.functional.dropout(h)
        return h * (torch.rand(h.shape[1:], generator=generator.manual_seed(seed)) > 0.5)

    x = drawn(0, 12, 6)
    assert gap(Two(dropped), [(x,)], (drawn(1, 12, 6),), 3) <= 1.0001


def test_one_that_does_not_is_taken():
    generator = torch.Generator()
    model = Two(lambda h: h * (torch.rand(h.shape[1:], generator=generator.manual_seed(3)) > 0.5))
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    assert clipped(capture, model, (drawn(0, 12, 6),)).norm() > 0
    capture.detach()


# Data that a model does not take ------------------------------------------------------------------------------------------------


class Refusing(RuntimeError, KeyError):
    """Some library's own exception."""


@pytest.mark.parametrize("seed", SEEDS)
def test_an_exception_hides_nothing_else(seed):
    """A model that checks its inputs still shows what others do to it, as far as it takes them."""
    lot = random.Random(seed)
    error = lot.choice([ValueError, Refusing, ZeroDivisionError, Exception, NotImplementedError])
    largest, above = lot.choice([1e3, 1e5]), lot.uniform(20, 40)

    def checked(x):
        if not x.isfinite().all() or x.abs().max() > largest or (x == 0).all(1).any():
            raise error("no such inputs, please")
        return x * torch.where(x.detach().abs().max() > above, 0.1, 10.0)

    class Checked(Two):
        def forward(self, x):
            return super().forward(checked(x))

    bad = drawn(seed, 12, 6)
    bad[5] = bad[5].sign() * 50
    torch.manual_seed(seed)
    assert gap(Checked(lambda h: h), [(drawn(seed + 1, 12, 6),)], (bad,), 5) <= 1.0001


def _by_slices(h, order):
    return torch.cat([h[i : i + 1] for i in order.tolist()])


def _by_rows(h, order):
    rows = h.unbind(0)
    return torch.stack([rows[i] for i in order.tolist()])


_MOVED = {way.__name__: (way, lambda h, o, way=way: way(h, o.argsort())) for way in (_by_slices, _by_rows)}


@pytest.mark.parametrize("way", _MOVED)
def test_an_order_that_cannot_be_shown_is_told_by_tags(way):
    """Its data may not be shuffled by the proof: the key has one value in the first batch, and must be among those that there are."""

    class Keyed(Sorted):
        def forward(self, x, key):
            if not torch.isin(key, torch.arange(7, 40)).all():
                raise ValueError("no such key")
            return super().forward(x, key)

    torch.manual_seed(0)
    model = Keyed(*_MOVED[way], False).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    clipped(capture, model, (drawn(1, 8, 6).double(), torch.full((8,), 7)))
    x, key = drawn(2, 12, 6).double() * torch.logspace(-2, 2, 12)[:, None].double(), 7 + torch.randperm(12)
    capture.examples(12)
    model(x, key).square().sum().backward()
    found = capture.collect(Flat(C)).raw_norms
    capture.detach()
    for i in range(12):
        model.zero_grad()
        model(x[i : i + 1], key[i : i + 1]).square().sum().backward()
        alone = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        torch.testing.assert_close(found[i], alone, rtol=1e-8, atol=1e-12)


# Gradients of 0 -----------------------------------------------------------------------------------------------------------------


class _Halved(torch.autograd.Function):
    """A backward of its own, that looks for an example without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * torch.where((g == 0).flatten(1).all(1).any(), 0.01, 1.0)


def test_an_example_without_a_gradient_changes_nobody_elses():
    capture = Capture(model := Two(_Halved.apply), loss_reduction="sum")
    capture.attach()
    with pytest.raises(REFUSED):
        clipped(capture, model, (drawn(0, 12, 6),))
    capture.detach()


class _Sometimes(nn.Module):
    """Leaves out layers by Python's or numpy's generator; ``mixes``: and lets examples influence each other, sometimes."""

    def __init__(self, draw, *, mixes=False):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)
        self.draw, self.mixes = draw, mixes

    def forward(self, x):
        for layer in self.layers:
            if self.draw() < 0.7:
                x = x + layer(x).tanh()
        if self.mixes and self.draw() < 0.3:
            x = x - x.detach().mean(0)
        return self.head(x)


@pytest.mark.parametrize("draw", [random.random, np.random.random_sample])
def test_random_numbers_of_other_generators(draw):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = _Sometimes(draw).double()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    for step in range(12):
        x, began = drawn(step, 5, 6).double(), host_draws()
        model(x).sin().sum().backward()
        norms = capture.collect(Flat(1.0)).raw_norms
        after, alone = host_draws(), []
        for one in x.split(1):
            draw_from(began)
            with capture.pause():
                grads = torch.autograd.grad(model(one).sin().sum(), list(model.parameters()), allow_unused=True)
            alone.append(torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt())
        torch.testing.assert_close(norms, torch.stack(alone))
        draw_from(after)


@pytest.mark.parametrize("draw", [random.random, np.random.random_sample])
def test_a_branch_that_such_a_number_opens_is_proved_when_it_is_taken(draw):
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    model = _Sometimes(draw, mixes=True).double()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    with pytest.raises(NotIsolated):
        for step in range(40):
            model(drawn(step, 5, 6).double()).sin().sum().backward()
            capture.collect(Flat(1.0))


class _Turns(nn.Module):
    """Two layers take turns, by a counter; ``mixes``: in one of five passes examples influence each other."""

    def __init__(self, *, mixes=False):
        super().__init__()
        self.a, self.b, self.head, self.passes, self.mixes = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), 0, mixes

    def forward(self, x):
        self.passes += 1
        if self.mixes and self.passes % 5 == 4:
            x = x - x.detach().mean(0)
        return self.head((self.a if self.passes % 2 else self.b)(x).tanh())


def test_layers_that_take_turns():
    torch.manual_seed(3)
    model = _Turns().double()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    for step in range(12):
        x = drawn(step, 5, 6).double()
        model(x).sin().sum().backward()
        norms, alone = capture.collect(Flat(1.0)).raw_norms, []
        for one in x.split(1):
            model.passes = step
            with capture.pause():
                grads = torch.autograd.grad(model(one).sin().sum(), list(model.parameters()), allow_unused=True)
            alone.append(torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt())
        torch.testing.assert_close(norms, torch.stack(alone))
    capture = Capture(_Turns(mixes=True).double(), loss_reduction="sum", unused="zero")
    capture.attach()
    with pytest.raises(REFUSED):
        for step in range(6):
            capture.model(drawn(step, 5, 6).double()).sin().sum().backward()
            capture.collect(Flat(1.0))

"""What a loop or a collate function does to a batch is seen to leave examples apart, or the guarantee says who vouches for it."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from hushgrad import Plan, make_private
from hushgrad.train.loss_tracking import PREPARED, VOUCHED
from hushgrad.train.row_views import rows_at

PLAN = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=32, steps=3)


def _notes(prepare=lambda x: x, answer=lambda out, y: (out, y), evaluate=False, parts=None, **options):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, PLAN)
    loss = private.loss(nn.CrossEntropyLoss())
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    for batch in private.loader(data, **options):
        optimizer.zero_grad()
        for x, y in [batch] if parts is None else batch.split(parts):
            if evaluate:
                model(torch.randn(5, 6)).sum()
            loss(*answer(model(prepare(x)), y)).backward()
        optimizer.step()
    return private.spent().notes


def _centred_in_place(x):
    x -= x.mean(0)
    return x


UNTOUCHED = {
    "as it is": lambda x: x,
    "a view": lambda x: x.view(-1, 2, 3).flatten(1),
    "a copy": lambda x: x.clone(),
    "there and back": lambda x: x.double().float(),
}
MIXED = {
    "mixup": lambda x: 0.5 * x + 0.5 * x.roll(1, 0),
    "centred": lambda x: x - x.mean(0),
    "centred in place": _centred_in_place,
    "another order": lambda x: x.flip(0),
    "the largest": lambda x: x / x.abs().max(),
    "the first one's row": lambda x: x[:1].expand(len(x), -1),
    "rows that overlap": lambda x: x.as_strided(x.shape, (5, 1)),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_is_not_changed_needs_nobody_to_vouch_for_it(name):
    assert _notes(UNTOUCHED[name]) == ()


@pytest.mark.parametrize("name", MIXED)
def test_what_the_loop_makes_of_a_batch_is_vouched_for(name):
    assert _notes(MIXED[name]) == (PREPARED,)


def test_a_batch_is_looked_at_in_every_step():
    passes = iter(range(3))
    assert _notes(lambda x: x - x.mean(0) if next(passes) == 2 else x.clone()) == (PREPARED,)


def test_rows_of_other_parts_are_vouched_for():
    assert _notes(lambda x: x if x._base is None else x._base[: len(x)], parts=4) == (PREPARED,)


def _view(draw, x):
    """One of the views that torch makes."""
    dim = draw.randrange(x.dim())
    kind = draw.choice(["narrow", "transpose", "expand", "flatten", "unflatten", "step", "select", "unfold"])
    if kind == "narrow":
        first = draw.randrange(x.shape[dim])
        return x.narrow(dim, first, draw.randint(1, x.shape[dim] - first))
    if kind == "transpose":
        return x.transpose(dim, draw.randrange(x.dim()))
    if kind == "expand":
        return x[None].expand(draw.choice([1, 4, 6]), *x.shape)
    if kind == "flatten" and x.dim() > 1 and x.is_contiguous():
        return x.flatten(0, 1)
    if kind == "unflatten" and x.shape[dim] % 2 == 0:
        return x.unflatten(dim, (2, -1))
    if kind == "unfold":
        return x.unfold(dim, min(2, x.shape[dim]), 1)
    return x.select(dim, 0) if kind == "select" and x.dim() > 1 else x[(slice(None),) * dim + (slice(None, None, 2),)]


def _truth(view, owners):
    """Where the rows of a view are those of the same example, as the numbers in its memory say."""
    found = set()
    for k in range(min(2, view.dim())):
        each, rest = divmod(view.shape[k], len(owners))
        whose = view.movedim(k, 0).reshape(view.shape[k], -1)
        for order in (torch.arange(4).repeat_interleave(each), torch.arange(4).repeat(each)) if each and not rest else ():
            found |= {k} if bool((whose == order[:, None]).all()) else set()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_view_is_said_to_keep_its_rows_only_if_it_does(seed):
    draw, kept = random.Random(seed), 0
    for _ in range(300):
        x = torch.arange(4)[:, None, None].expand(4, 2, 6).contiguous()
        x, dim = draw.choice([(x, 0), (x.transpose(0, 1), 1), (x.transpose(0, 1).contiguous(), 1), (x.flatten(1), 0)])
        view = x
        for _ in range(draw.randint(1, 3)):
            view = _view(draw, view)
        found = {*rows_at(view, x, dim)}
        assert found <= _truth(view, range(4)), (view.shape, view.stride(), x.stride())
        kept += bool(found)
    assert kept > 50


def test_so_is_what_it_makes_of_outputs_and_targets():
    assert _notes(answer=lambda out, y: (out - out.mean(0), y)) == (PREPARED,)
    assert _notes(answer=lambda out, y: (out, y.roll(1))) == (PREPARED,)


def test_evaluations_and_micro_batches_are_told_apart():
    assert _notes(evaluate=True) == () == _notes(parts=3)
    assert _notes(MIXED["centred"], parts=3) == (PREPARED,)


def _mixup(records):
    x, y = default_collate(records)
    by = torch.rand(())
    return [by * x + (1 - by) * x.roll(1, 0), y]


@pytest.mark.parametrize(
    ("collate", "notes"),
    [
        (lambda records: [2 * default_collate(records)[0], default_collate(records)[1]], ()),
        (_mixup, (PREPARED,)),
        (
            lambda records: [default_collate(records)[0] - default_collate(records)[0].mean(0), default_collate(records)[1]],
            (PREPARED,),
        ),
    ],
    ids=["doubled", "mixup", "centred"],
)
def test_collate_functions_keep_records_apart_or_somebody_vouches(collate, notes):
    assert _notes(collate_fn=collate) == notes


def test_a_resumed_run_still_says_so():
    model = nn.Linear(6, 3)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAN, key=bytes(range(32)))
    assert private.state_dict()["batches_prepared"] is False
    private.losses.handed.prepared = True
    assert private.state_dict()["batches_prepared"] is True


def test_what_a_proof_computed_is_let_go_before_the_pass_of_the_batch():
    """A graph that lives on holds what it needs, labels among it; a run would watch these as the model's own, and prove every step anew."""
    made, alive = [], []

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, labels):
            gc.collect()
            alive.append(sum(reference() is not None for reference in made))
            logits = self.linear(x)
            loss = nn.functional.cross_entropy(logits, labels)
            made.append(weakref.ref(loss))
            return {"loss": loss, "logits": logits}

    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(steps=3, noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=20)
    private = make_private(model, optimizer, plan, key=bytes(32))
    for x, y in private.loader(TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)):
        optimizer.zero_grad()
        model(x, labels=y)["loss"].backward()
        assert alive[-1] == 0
        optimizer.step()
    assert len(alive) > 10  # there was a proof


ANSWERS = {
    "as it is": (lambda out: out, ()),
    "a view": (lambda out: out.view(-1, 8).view(out.shape), ()),
    "centred": (lambda out: out - out.mean(0), (PREPARED,)),
    "in place": (lambda out: out.mul_(out.detach().abs().max()), (PREPARED,)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_large_outputs_are_known_and_are_not_kept_alive(name, monkeypatch):
    """A vocabulary's scores are as large as all that a part of a batch leaves behind; whoever trains has let go of them before backward."""
    monkeypatch.setattr("hushgrad.train.loss_tracking.LARGE", 16)
    model, (answer, notes) = nn.Linear(3, 8), ANSWERS[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, PLAN)
    loss = private.loss(nn.CrossEntropyLoss())
    for x, y in private.loader(TensorDataset(torch.randn(32, 3), torch.arange(32) % 8)):
        out = model(x)
        made, reference = loss(answer(out), y), weakref.ref(out)
        del out
        assert private.steps == 0 or name != "as it is" or reference() is None  # a first batch is tried, which leaves circles
        made.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.spent().notes == notes


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.by, self.epoch = nn.Linear(6, 3), 1.0, 0

    def forward(self, x, by=1.0, names=()):
        return self.linear(x) * by * self.by


def _said(step, model=_Scaled, loss=lambda out, y, by=1.0: nn.functional.cross_entropy(out, y) * by, collate_fn=default_collate):
    """What a guarantee says of three steps that a loop takes so."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    private = make_private(made, optimizer, PLAN)
    losses = [private.loss(loss), private.loss(lambda out, y: 2 * nn.functional.cross_entropy(out, y))]
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    for k, batch in enumerate(private.loader(data, collate_fn=collate_fn)):
        optimizer.zero_grad()
        step(made, losses, batch, k)
        optimizer.step()
    return private.spent().notes


def _set(**attributes):
    def step(m, losses, batch, k):
        for name, value in attributes.items():
            setattr(m, name, value(batch[0], k))
        losses[0](m(batch[0]), batch[1]).backward()

    return step


def _named(records):
    return [*default_collate(records), [str(float(x[0])) for x, _ in records]]


LOOPS = {
    "a constant of the model": (lambda m, f, b, k: f[0](m(b[0], by=0.5), b[1]).backward(), ()),
    "a number of the batch": (lambda m, f, b, k: f[0](m(b[0], by=b[0].std().item()), b[1]).backward(), (PREPARED,)),
    "an array of the batch": (lambda m, f, b, k: f[0](m(b[0], names=[b[0].numpy().std(0)]), b[1]).backward(), (PREPARED,)),
    "a constant of the loss": (lambda m, f, b, k: f[0](m(b[0]), b[1], 0.5).backward(), ()),
    "a number of the loss": (lambda m, f, b, k: f[0](m(b[0]), b[1], b[0].std().item()).backward(), (PREPARED,)),
    "a word of the loss": (lambda m, f, b, k: f[0](m(b[0]), b[1], k == 1).backward(), (PREPARED,)),
    "an evaluation with other numbers": (lambda m, f, b, k: (m(b[0], by=k), f[0](m(b[0]), b[1]).backward()), ()),
    "an attribute": (_set(by=lambda x, k: float(x.std())), (PREPARED,)),
    "an epoch": (_set(by=lambda x, k: 0.5, epoch=lambda x, k: k), (PREPARED,)),  # 0.5 was 1.0
    "a count": (_set(epoch=lambda x, k: k), ()),
    "one of two losses": (lambda m, f, b, k: f[k == 1](m(b[0]), b[1]).backward(), (VOUCHED,)),
    "a gradient of the batch": (lambda m, f, b, k: f[0](m(b[0]), b[1]).backward(b[0].std()), (VOUCHED,)),
    "a gradient of 1": (lambda m, f, b, k: f[0](m(b[0]), b[1]).backward(torch.tensor(1.0)), ()),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_no_tensor_is_vouched_for_where_it_changes(name):
    step, notes = LOOPS[name]
    assert _said(step) == notes


def test_what_the_loader_hands_out_beside_tensors_is_known():
    assert _said(lambda m, f, b, k: f[0](m(b[0], names=b[2]), b[1]).backward(), collate_fn=_named) == ()


@pytest.mark.parametrize("where", ["output", "view", "loss"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_the_loop_on_outputs_and_losses_are_vouched_for(where, late):
    def step(m, losses, batch, k):
        x, y = batch
        out = m(x)
        view = out.view(out.shape)
        hooked = {"output": out, "view": view}
        if not late and where != "loss":
            hooked[where].register_hook(lambda g: g * x.std())
        hooked["loss"] = loss = losses[0](view if where == "view" else out, y)
        if late or where == "loss":
            hooked[where].register_hook(lambda g: g * x.std())
        loss.backward()

    assert _said(step) == (VOUCHED,)

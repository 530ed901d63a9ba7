"""Micro-batches that wait in a list are told apart by what they are, not by when they were cut."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.sampling.batch_loader import stamp
from hushgrad.train import Plan, make_private
from hushgrad.train.loss_tracking import PREPARED

N = 24


def _run(loop, *, dicts=False, own_loss=False):
    torch.manual_seed(0)
    x, y = torch.randn(N, 5), torch.randint(2, (N,))
    data = [{"input": a, "label": b} for a, b in zip(x, y, strict=True)] if dicts else TensorDataset(x, y)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=4)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=3)
    loss = private.loss(F.cross_entropy) if own_loss else F.cross_entropy

    def passed(part):
        inputs, target = (part["input"], part["label"]) if dicts else part
        loss(model(inputs), target).backward()

    try:
        for batch in private.loader(data):
            loop(batch, passed)
            private.optimizer.step()
    finally:
        private.detach()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _one_by_one(batch, passed):
    for part in batch.split(4):
        passed(part)


def _listed(batch, passed):
    for part in list(batch.split(4)):
        passed(part)


def _backwards(batch, passed):
    for part in reversed(list(batch.split(4))):
        passed(part)


@pytest.mark.parametrize("dicts", [False, True])
@pytest.mark.parametrize("own_loss", [False, True])
def test_a_list_of_parts_is_as_good_as_a_loop(dicts, own_loss):
    expected = _run(_one_by_one, dicts=dicts, own_loss=own_loss)
    assert torch.equal(_run(_listed, dicts=dicts, own_loss=own_loss), expected)
    torch.testing.assert_close(_run(_backwards, dicts=dicts, own_loss=own_loss), expected)


def _first_again(batch, passed):
    parts = list(batch.split(4))
    for _ in parts:
        passed(parts[0])


def _skipped(batch, passed):
    for part in list(batch.split(4))[1:]:
        passed(part)


def _changed(batch, passed):
    for x, y in list(batch.split(4)):
        passed((x + 0.1, y))


def _first_for_all(batch, passed):
    first = None
    for part in batch.split(4):
        first = part if first is None else first
        passed(first if part.examples == 4 else part)


@pytest.mark.parametrize("loop", [_first_again, _skipped, _changed, _first_for_all])
def test_parts_that_are_repeated_left_out_or_exchanged_are_refused(loop):
    with pytest.raises((CaptureError, NotIsolated)):
        _run(loop)


@pytest.mark.parametrize("size, chosen_by", [(None, 12), (4, 4), (100, 12)])
def test_formulas_are_chosen_by_public_numbers_whatever_a_batch_has(size, chosen_by):
    """By the plan's batch size, or the size of micro-batches: batches of other sizes, empty ones too, change nothing."""
    x, y = torch.randn(N, 5), torch.randint(2, (N,))
    model = nn.Linear(5, 2)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=6)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=3)
    sizes, seen = set(), set()
    for batch in private.loader(TensorDataset(x, y)):
        sizes.add(batch.examples)
        for part in [batch] if size is None else batch.split(size):
            seen.add(private._capture._tape.most)
            F.cross_entropy(model(part[0]), part[1]).backward()
        private.optimizer.step()
    assert len(sizes) > 1 and seen == {chosen_by}


@pytest.mark.parametrize("users", [False, True])
def test_parts_that_were_passed_leave_nothing_behind(users):
    """A logical batch of thousands in small parts holds no more than one of a few parts: norms of many parts lie in one tensor."""
    count, size = 1024, 4
    x, alive = torch.randn(count, 5), []
    model = nn.Linear(5, 1)
    level = {"unit": "user"} if users else {}
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=count, dataset_size=10**4, steps=4, **level)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=3)
    owners = torch.arange(count) // 2 if users else None
    batch = stamp([x], step=0, examples=count, units=owners, issue=private._on_issue)
    private._on_issue(batch)
    for part in batch.split(size):
        model(part[0]).mean().backward()
        alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) if part.part in (100, 250) else 0)
    private.optimizer.step()
    private.detach()
    assert alive[250] - alive[100] < 150  # less than one for each part


def _each(batch, passed):
    for i in range(0, len(batch[0]), 3):
        passed((batch[0][i : i + 3], batch[1][i : i + 3]))


def _whole_and_part(batch, passed):
    passed(batch)
    passed((batch[0][:2], batch[1][:2]))


def _first(batch, passed):
    passed((batch[0][:4], batch[1][:4]))


@pytest.mark.parametrize("loop", [_each, _whole_and_part, _first])
def test_parts_that_are_cut_by_hand_are_refused_with_the_way_to_cut_them(loop):
    with pytest.raises(CaptureError, match=r"batch\.split\(size\)"):
        _run(loop)


def _turned_in_place(batch):
    batch["input"][:] = batch["input"].flip(0)


def _replaced(batch):
    batch["input"] = batch["input"] - batch["input"].mean(0)


def _copied(batch):
    batch["input"] = batch["input"].clone()


@pytest.mark.parametrize(("change", "notes"), [(_turned_in_place, {PREPARED}), (_replaced, {PREPARED}), (_copied, set())])
def test_what_a_loop_makes_of_a_batch_before_it_is_cut_is_vouched_for(change, notes):
    torch.manual_seed(0)
    data = [{"input": torch.randn(5), "label": torch.tensor(i % 2)} for i in range(N)]
    model = nn.Linear(5, 2)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=2)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    loss = private.loss(F.cross_entropy)
    for batch in private.loader(data):
        change(batch)
        for part in batch.split(4):
            loss(model(part["input"]), part["label"]).backward()
        private.optimizer.step()
    assert set(private.spent().notes) == notes
    private.detach()

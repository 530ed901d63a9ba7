"""K augmented copies of a record are one record: their mean gradient is clipped, and nothing else changes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import hushgrad
from hushgrad import sampling
from hushgrad.errors import ArgumentError

COMMON = {"delta": 1e-5, "batch_size": 8, "dataset_size": 24, "max_grad_norm": 0.7}


class Jittered(Dataset):
    """Reads a record with a random shift, and remembers what it dealt; reading the ``odd`` one leaves other random states behind."""

    def __init__(self, odd=None):
        self.odd = odd
        rng = torch.Generator().manual_seed(4)
        self.x, self.y = torch.randn(24, 3, generator=rng), torch.randint(2, (24,), generator=rng)
        self.dealt = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i] + torch.randn(3) + torch.from_numpy(np.random.standard_normal(3)).float() + random.random()
        if i == self.odd:
            random.seed(3), np.random.seed(4), torch.manual_seed(5)
            x = -5 * x
        self.dealt.append((i, x))
        return x, self.y[i]


def model():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def gradient(net, x, y):
    loss = F.cross_entropy(net(x[None]), y[None])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def steps(plan, parts=None, certified=False, odd=None):
    """The gradients that the optimizer sees, and what was dealt for each."""
    data, net, seen = Jittered(odd), model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    private = hushgrad.make_private(net, optimizer, plan, seed=1, loss_reduction="sum" if certified else "mean")
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in net.parameters()])))
    loss = private.loss(F.cross_entropy, per_example=certified)
    dealt = []
    batches = iter(private.loader(data))
    for _ in range(plan.steps):
        data.dealt.clear()
        batch = next(batches)
        dealt.append(list(data.dealt))
        optimizer.zero_grad()
        for part in [batch] if parts is None else batch.split(parts):
            if part.examples:
                x, y = part
                loss(net(x), y).backward()
        optimizer.step()
    return data, seen, dealt


@pytest.mark.parametrize("copies", [1, 2, 5])
@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize("certified", [False, True])
def test_the_mean_over_the_copies_is_clipped(copies, parts, certified):
    plan = hushgrad.Plan.dpsgd(noise_multiplier=0.0, steps=3, augmentations=copies, certified=certified, **COMMON)
    data, seen, dealt = steps(plan, parts, certified)
    net = model()
    for found, every in zip(seen, dealt, strict=True):
        read = every[: copies * len({i for i, _ in every})]  # the rest fills up, with weight 0
        means = {i: torch.stack([gradient(net, x, data.y[i]) for j, x in read if j == i]) for i, _ in read}
        assert all(len(rows) == copies for rows in means.values())
        clipped = [m.mean(0) * min(1.0, 0.7 / float(m.mean(0).norm())) for m in means.values()]
        assert torch.allclose(found, torch.stack(clipped).sum(0) / 8, atol=1e-5)


def test_copies_differ_and_are_the_same_when_a_step_is_dealt_again():
    plan = hushgrad.Plan.dpsgd(noise_multiplier=0.0, steps=2, augmentations=3, **COMMON)
    first, second = steps(plan)[2], steps(plan)[2]
    for one, two in zip(first, second, strict=True):
        assert [i for i, _ in one] == [i for i, _ in two]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True))
        shifts = {tuple(x.tolist()) for _, x in one}
        assert len(shifts) == 3 * len({i for i, _ in one})  # the rest fills up


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("odd", [0, 7, 23])
def test_a_record_that_leaves_other_random_states_behind_moves_the_sum_by_its_own_share(copies, odd):
    """Replaced by one whose reading starts all generators anew: at a fixed key the others are read as before."""
    plan = hushgrad.Plan.dpsgd(noise_multiplier=0.0, steps=2, augmentations=copies, **COMMON | {"batch_size": 24})
    (_, plain, dealt), (_, other, redealt) = steps(plan), steps(plan, odd=odd)
    for one, two in zip(dealt, redealt, strict=True):
        assert all(torch.equal(a, b) == (i != odd) for (i, a), (_, b) in zip(one, two, strict=True))
    assert all(0 < float((a - b).norm()) * 24 <= 2 * 0.7 * (1 + 1e-4) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("copies", [1, 3])
def test_processes_that_share_a_batch_share_no_random_numbers(copies):
    """With common ones a record more, which moves others to another process, would change which records are augmented alike."""
    drawn = []

    def collate(examples):
        drawn.append(float(torch.rand(())))
        return torch.stack([x for x, _ in examples])

    def rows(rank, world):
        data, sampler = Jittered(), sampling.Poisson(rate=1.0, steps=1)
        shared = {"rank": rank, "world_size": world, "copies": copies, "collate_fn": collate}
        list(sampling.loader(data, sampler, rng_key=bytes(32), seeds=bytes(range(32)), **shared))
        return {(i, k): x for k in range(copies) for i, x in data.dealt[k::copies]}

    whole, halves = rows(0, 1), rows(0, 2) | rows(1, 2)
    assert whole.keys() == halves.keys() and all(torch.equal(whole[place], halves[place]) for place in whole)
    assert len(set(drawn)) == len(drawn) - 1  # the first of one process is the first of two


class OwnGenerator(Jittered):
    """Draws from a generator that goes on from record to record."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        return self.x[i] + torch.from_numpy(self.rng.standard_normal(3)).float(), self.y[i]


class SeldomOwn(OwnGenerator):
    """Does so for every third record only."""

    def __getitem__(self, i):
        return super().__getitem__(i) if i % 3 == 1 else (self.x[i], self.y[i])


class OwnObjects(OwnGenerator):
    """Hands out something that becomes a tensor when a batch is made of it."""

    def __getitem__(self, i):
        return SimpleNamespace(row=super().__getitem__(i))


class Objects(Jittered):
    def __getitem__(self, i):
        return SimpleNamespace(row=super().__getitem__(i))


def opened(records):
    return default_collate([record.row for record in records])


def shifted_in_turn(records):
    x, y = default_collate(records)
    return x + torch.stack([torch.rand(()) for _ in x])[:, None], y


def shifted_in_one_draw(records):
    x, y = default_collate(records)
    return x + torch.from_numpy(np.random.standard_normal(x.shape)), y


def shifted_together(records):
    x, y = default_collate(records)
    return x + random.random(), y


VOUCHED = {
    "draws": (Jittered, default_collate, False),
    "own generator": (OwnGenerator, default_collate, True),
    "own generator, seldom": (SeldomOwn, default_collate, True),
    "objects": (Objects, opened, False),
    "own generator, objects": (OwnObjects, opened, True),
    "draws for each row": (Jittered, shifted_in_turn, True),
    "draws for all rows": (Jittered, shifted_in_one_draw, True),
    "draws what all share": (Jittered, shifted_together, False),
}


@pytest.mark.parametrize("case", VOUCHED)
def test_a_data_set_whose_own_generator_goes_on_is_vouched_for(case):
    """So is a collate function that draws on from row to row: one record less moves the numbers of those that follow."""
    plan, net = hushgrad.Plan.dpsgd(noise_multiplier=1.0, steps=1, augmentations=2, **COMMON), model()
    private = hushgrad.make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), plan, key=bytes(32))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    kind, collate, vouched = VOUCHED[case]
    private.loader(kind(), collate_fn=collate)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert private.losses.handed.prepared is vouched


def test_a_batch_of_nobody_leaves_the_random_states_as_they_were():
    """Else whoever is record 0, which shows a batch's shapes, would choose the dropout of all later steps."""
    sampler, before = sampling.Poisson(rate=1e-9, steps=2), torch.get_rng_state()
    options = {"rng_key": bytes(32), "seeds": bytes(range(32)), "generator": torch.Generator()}
    for batch in sampling.loader(Jittered(odd=0), sampler, **options):
        assert not batch.examples
        assert torch.equal(before, torch.get_rng_state())


def test_the_accounting_is_that_of_one_copy():
    one, many = (hushgrad.Plan.dpsgd(epsilon=3.0, steps=10, augmentations=k, **COMMON) for k in (1, 8))
    assert one.event() == many.event()
    assert "augmentations" not in one.to_json()
    assert hushgrad.Plan.from_json(many.to_json()) == many
    assert one.digest != many.digest
    with pytest.raises(ArgumentError, match="augmentations"):
        hushgrad.Plan.dpsgd(epsilon=3.0, steps=10, augmentations=0, **COMMON)


def test_data_that_read_the_same_every_time_are_refused():
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, steps=2, augmentations=3, **COMMON)
    net = model()
    private = hushgrad.make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), plan, seed=1)
    with pytest.raises(ArgumentError, match="augments at random"):
        private.loader(torch.utils.data.TensorDataset(torch.zeros(24, 3), torch.zeros(24)))

"""K augmented copies of a record are one record: their mean gradient is clipped, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hushgrad
from hushgrad.errors import ArgumentError

COMMON = {"delta": 1e-5, "batch_size": 8, "dataset_size": 24, "max_grad_norm": 0.7}


class Jittered(Dataset):
    """Reads a record with a random shift, and remembers what it dealt."""

    def __init__(self):
        rng = torch.Generator().manual_seed(4)
        self.x, self.y = torch.randn(24, 3, generator=rng), torch.randint(2, (24,), generator=rng)
        self.dealt = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i] + torch.randn(3)
        self.dealt.append((i, x))
        return x, self.y[i]


def model():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def gradient(net, x, y):
    loss = F.cross_entropy(net(x[None]), y[None])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def steps(plan, parts=None, certified=False):
    """The gradients that the optimizer sees, and what was dealt for each."""
    data, net, seen = Jittered(), model(), []
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
        size, own = len(every) // copies, len({i for i, _ in every})
        read = [pair for k in range(copies) for pair in every[k * size : k * size + own]]  # the rest fills up, with weight 0
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
        assert len(shifts) == len(one)


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

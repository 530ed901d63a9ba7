"""A data set that reads other records for one is told, from what it asks of its tensors, arrays and lists."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hushgrad import Plan, make_private
from hushgrad.sampling.rows_read import reads_one_row
from hushgrad.sampling.seeds import Seeds
from hushgrad.train.loss_tracking import PREPARED

COUNT, SEEDS = 9, Seeds(bytes(32))


class _Data(Dataset):
    def __init__(self, x, read, more=None):
        self.x, self.y, self.read, self.more = x, list(range(len(x))), read, more
        self.count, self.kept, self.mean = 0, {}, torch.zeros(3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.count += 1
        return self.read(self, i)


HELD = {
    "a tensor": lambda: torch.randn(COUNT, 3),
    "an array": lambda: np.random.default_rng(0).normal(size=(COUNT, 3)),
    "a list": lambda: [*torch.randn(COUNT, 3)],
}
APART = {
    "its row": lambda d, i: (torch.as_tensor(d.x[i]) - d.mean, d.y[i]),
    "its row, drawn noise": lambda d, i: torch.as_tensor(d.x[i]) + torch.randn(3),
    "a slice": lambda d, i: d.x[i : i + 1],
    "kept after the first time": lambda d, i: d.kept.setdefault(i, d.x[i]),
    "another order": lambda d, i: d.x[(5 * i + 2) % COUNT],
    "sizes": lambda d, i: (d.x[i], len(d.x), np.shape(d.y[i])),
}
MIXED = {
    "the next one": lambda d, i: torch.as_tensor(d.x[i]) + torch.as_tensor(d.x[(i + 1) % COUNT]),
    "two at once": lambda d, i: d.x[max(0, i - 1) : i + 1] if i else d.x[:2],
    "one at random": lambda d, i: torch.as_tensor(d.x[i]) + torch.as_tensor(d.x[int(torch.randint(COUNT, ()))]),
    "the last label": lambda d, i: (d.x[i], d.y[i] / d.y[-1]),
    "all labels": lambda d, i: (d.x[i], sum(1 for y in d.y if y > 3)),
}
MEANS = {
    "a tensor": lambda d, i: d.x[i] - d.x.mean(0),
    "an array": lambda d, i: d.x[i] / d.x.max(),
    "a list": lambda d, i: d.x[i] - torch.stack([*d.x]).mean(0),
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", APART)
def test_one_row_for_one_record_is_fine(name, held):
    data = _Data(HELD[held](), APART[name])
    assert reads_one_row(data, SEEDS)
    assert reads_one_row(Subset(data, [4, 0, 7]), SEEDS)
    assert type(data.x[0]) is type(HELD[held]()[0])
    assert data.count == 0


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", [*MIXED, "a mean"])
def test_other_rows_are_seen(name, held):
    """In a batch of 16 such a data set let one record move the sum by up to 3.6 clip norms."""
    data = _Data(HELD[held](), MIXED[name] if name in MIXED else MEANS[held])
    assert not reads_one_row(data, SEEDS)
    assert not reads_one_row(Subset(data, [4, 0, 7]), SEEDS)


@pytest.mark.parametrize("seed", range(5))
def test_so_many_rows_as_it_reads(seed):
    draw = random.Random(seed)
    for _ in range(20):
        most = draw.choice([1, 1, 2, 5])
        steps = draw.sample(range(COUNT), most)
        data = _Data(
            HELD[draw.choice([*HELD])](), lambda d, i, steps=steps: [torch.as_tensor(d.x[(i + k) % COUNT]) for k in steps]
        )
        inside = TensorDataset(torch.randn(COUNT, 2))
        outer = _Data([0] * COUNT, lambda d, i: (d.more[0][i], d.more[1][i]), more=(data, inside))
        assert reads_one_row(outer, SEEDS) == (most == 1)


@pytest.mark.parametrize("name", ["its row", "the next one"])
def test_the_guarantee_says_so(name):
    read = (lambda d, i: d.x[i]) if name == "its row" else (lambda d, i: d.x[i] + d.x[(i + 1) % COUNT])
    model = torch.nn.Linear(3, 1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=3, dataset_size=COUNT, steps=1)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    private.loader(_Data(torch.randn(COUNT, 3), read))
    assert (PREPARED in private.spent().notes) == (name != "its row")

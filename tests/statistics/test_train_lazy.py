"""Lazy tables have the eager run's distribution wherever they are read; wrong ones are noticed.

Every record's gradient is zero, so a row moves by noise alone. Between two reads of a row its increment must be Gaussian with
variance sum (lr_t std)² over the steps between them, and increments must be independent: a chi-square test of their squares and
a normal test of the products of neighbours, each at false-alarm rate 1e-9 (fixed keys: it passes always or never).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from hushgrad.release.lazy import LazyTable
from hushgrad.train import Plan, make_private

ALARM = 1e-9
ROWS, WIDTH, SEEDS = 6, 800, 2  # few wide tables: every number is drawn by itself, and each run is proved anew
RATES = (0.5, 0.5, 0.1, 0.8, 0.0, 0.02, 0.3, 0.3)  # of the steps: a schedule, with a pause
READ = {0: range(8), 1: range(8), 2: (3,), 3: (0, 6), 4: (), 5: ()}  # row: steps that read it (4 and 5: never)
STD = 1.5 * 0.5 / 4


def _values(seed: int, lazy: bool) -> dict[int, list[np.ndarray]]:
    """Each row as it was at the beginning, at every step that read it, and at the end."""
    torch.manual_seed(seed)
    table = nn.Embedding(ROWS, WIDTH)
    start = table.weight.detach().double().numpy().copy()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    plan = Plan.dpsgd(noise_multiplier=1.5, delta=1e-5, max_grad_norm=0.5, batch_size=4, dataset_size=40, steps=len(RATES))
    private = make_private(table, optimizer, plan, seed=seed, lazy_tables=lazy)
    values = {row: [start[row]] for row in READ}
    for step, rate in enumerate(RATES):
        ids = [row for row, steps in READ.items() if step in steps]
        read = table(torch.tensor([ids, ids]))
        for k, row in enumerate(ids):
            values[row].append(read[0, k].detach().double().numpy().copy())
        (0.0 * read).sum().backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for row in READ:  # the last step of the plan has settled them
        values[row].append(table.weight[row].detach().double().numpy().copy())
    private.detach()
    return values


def _accepts(lazy: bool = True) -> bool:
    squares = products = 0.0
    numbers = pairs = 0
    for seed in range(SEEDS):
        for row, values in _values(seed, lazy).items():
            marks = [0, *READ[row], len(RATES)]
            white = []
            for k, (first, last) in enumerate(pairwise(marks)):
                std = STD * np.sqrt(np.sum(np.square(RATES[first:last])))
                increment = values[k + 1] - values[k]
                if std == 0.0:  # read twice between two steps that moved nothing
                    if np.abs(increment).max() > 0:
                        return False
                    continue
                white.append(increment / std)
            squares += sum(float(np.sum(w**2)) for w in white)
            numbers += sum(w.size for w in white)
            neighbours = list(pairwise(white))
            products += sum(float(np.sum(a * b)) for a, b in neighbours)
            pairs += sum(a.size for a, _ in neighbours)
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], numbers)
    return bool(low <= squares <= high) and abs(products) < stats.norm.isf(ALARM / 2) * np.sqrt(pairs)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_rows_that_are_read_never_once_and_often_move_as_in_the_eager_run(lazy):
    assert _accepts(lazy)


def _without_rate(self, raw_sum, std, step):
    self.step = step
    self.owed.add_(std**2)


def _rate_not_squared(self, raw_sum, std, step):
    self.step = step
    self.owed.add_(self.group["lr"] * std**2)


def _only_the_last_step(self, raw_sum, std, step):
    self.step = step
    self.owed.fill_((self.group["lr"] * std) ** 2)


def _one_address(self, raw_sum, std, step):
    self.owed.add_((self.group["lr"] * std) ** 2)  # every draw of a row is at step 0


def _nothing(self, *_):
    return None


DEFECTS = {
    "forgets the learning rate": {"update": _without_rate},
    "learning rate not squared": {"update": _rate_not_squared},
    "forgets the steps between": {"update": _only_the_last_step},
    "draws twice at one address": {"update": _one_address},
    "reads rows that owe": {"_before_forward": _nothing, "_after_forward": _nothing},
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_one_is_rejected(monkeypatch, defect):
    for method, wrong in DEFECTS[defect].items():
        monkeypatch.setattr(LazyTable, method, wrong)
    assert not _accepts()

"""A model that treats every row by itself, and ignores what tells whose the rows are, is not read as if rows were examples."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from hushgrad import Plan, make_private
from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError

TOLD = {
    "whose": lambda c: torch.arange(len(c)).repeat_interleave(c),
    "counts": lambda c: c,
    "bounds": lambda c: nn.functional.pad(c.cumsum(0), (1, 0)),
    "ends": lambda c: c.cumsum(0),
    "begins": lambda c: c.cumsum(0) - c,
}


class _RowByRow(nn.Module):
    def __init__(self, scalar=False):
        super().__init__()
        self.linear, self.scalar = nn.Linear(3, 2), scalar

    def forward(self, x, told=None):
        y = self.linear(x)
        return y.square().sum() if self.scalar else y


def _counts(lot, examples):
    """As many rows as examples, of which some have none and the last has its own."""
    while True:
        counts = [0] * examples
        for _ in range(examples):
            counts[lot.randrange(examples)] += 1
        if max(counts) > 1 and counts[-1]:
            return torch.tensor(counts)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("kind", TOLD)
def test_as_many_rows_as_examples_are_no_examples_if_an_ignored_input_may_tell_otherwise(kind, earlier, announced):
    lot = Random(f"{kind} {earlier} {announced}")
    for scalar in (False, True) if not earlier else (False,):
        counts = _counts(lot, lot.randint(3, 7))
        capture = Capture(model := _RowByRow(scalar), loss_reduction="sum")
        capture.attach()
        batches = [torch.ones_like(counts)] * earlier + [counts]
        with pytest.raises(CaptureError, match="ignores an input"):
            for k, its in enumerate(batches):
                if announced:
                    capture.examples(len(its))
                model(torch.randn(len(its), 3), TOLD[kind](its)).sum().backward()
                assert k < len(batches) - 1
                assert len(capture.collect(Flat(1.0)).raw_norms) == len(its)


@pytest.mark.parametrize("kind", TOLD)
def test_who_says_where_the_examples_are_is_believed(kind):
    counts = _counts(Random(kind), 6)
    capture = Capture(model := _RowByRow(), loss_reduction="sum")
    capture.attach()
    capture.examples(6, dim=0)
    model(torch.randn(6, 3), TOLD[kind](counts)).sum().backward()
    assert len(capture.collect(Flat(1.0)).raw_norms) == 6


def test_a_loader_with_one_row_for_each_record_says_so():
    model = _RowByRow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=4, steps=2)
    private = make_private(model, optimizer, plan)
    loss = private.loss(nn.CrossEntropyLoss())
    data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.tensor([0, 0, 1, 3]) % 2, torch.tensor([2, 0, 1, 1]))
    for x, y, classes in private.loader(data):
        loss(model(x, classes), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.steps == 2

"""Numbers, words and arrays that a collate function makes of all records of a batch are vouched for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from hushgrad import Plan, make_private
from hushgrad.train.loss_tracking import PREPARED


class _Reads(nn.Module):
    """Takes a batch as a whole, or what is in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x, y=None, by=1.0, names=()):
        if isinstance(x, (dict, list, tuple)):
            x, _, by, _ = x.values() if isinstance(x, dict) else x
        return self.linear(x) * torch.as_tensor(by)


def _with_number(number, kind):
    def collate(records):
        x, y = default_collate(records)
        made = {"x": x, "y": y, "by": number(x, y), "names": [str(i) for i in y.tolist()]}
        return made if kind is dict else kind(made.values())

    return collate


NUMBERS = {
    "a constant": (lambda x, y: 0.5, ()),
    "the largest": (lambda x, y: float(x.max()), (PREPARED,)),
    "a count": (lambda x, y: int(y.sum()), (PREPARED,)),
    "an array": (lambda x, y: x.numpy().std(0)[:3], (PREPARED,)),
    "the number of records": (lambda x, y: len(y), (PREPARED,)),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", [dict, list, tuple])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_a_batch_holds_for_all_its_records_is_vouched_for_however_it_is_given(name, kind, steps):
    number, notes = NUMBERS[name]
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    for given in (lambda b: ((b,), {}), lambda b: ((), b) if kind is dict else (tuple(b), {})):
        model, plan = _Reads(), Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=32, dataset_size=32, steps=steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = make_private(model, optimizer, plan)
        loss = private.loss(nn.CrossEntropyLoss())
        for batch in private.loader(data, collate_fn=_with_number(number, kind)):
            args, kwargs = given(batch)
            loss(model(*args, **kwargs), batch["y"] if kind is dict else batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert private.spent().notes == notes

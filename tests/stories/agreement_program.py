"""Two processes of which the second is given something else, or finds something that the first does not."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hushgrad.errors import HushgradError
from hushgrad.train import Plan, make_private

PLAN = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "batch_size": 16, "dataset_size": 32, "steps": 8}
PLANS = {
    "clip norm": {"max_grad_norm": 100.0},
    "batch": {"batch_size": 8},
    "noise": {"noise_multiplier": 1e-6},
    "steps": {"steps": 9},
}
OTHERS = {"number": "as ever", "code": "as ever", "augmented": "augmented", "unseeded": "unseeded"}  # what process 0 is given


def _private(what: str = "", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    if what == "model":
        model[1] = nn.ReLU()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if what == "lr" else 0.1)
    users = {"unit": "user"} if options.pop("users", False) else {}
    more = {"unused": "zero"} if what == "options" else {}
    return make_private(model, optimizer, Plan.dpsgd(**{**PLAN, **PLANS.get(what, {}), **users}), **more)


class _Ordered(Dataset):
    """Records whose order follows from a number in the data set, or from the code that reads it: both leave its content as it is."""

    def __init__(self, what: str, data: Dataset) -> None:
        self.what, self.data, self.first = "", data, 5 if what == "number" else 0
        self.read = (lambda i: 31 - i) if what == "code" else (lambda i: i)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int):
        return self.data[self.read((number + self.first) % 32)]


class _Noisy(_Ordered):
    """Records that are augmented as they are read: from torch's generator, or from one that nobody can set."""

    def __init__(self, unseeded: bool) -> None:
        super().__init__("", _data())
        self.unseeded = unseeded

    def __getitem__(self, number: int):
        x, y = super().__getitem__(number)
        return x + (torch.tensor(list(os.urandom(4))) if self.unseeded else torch.randn(4)), y


def _data(what: str = "") -> Dataset:
    if what in ("number", "code", "as ever"):
        return _Ordered(what, _data())
    if what in ("augmented", "unseeded"):
        return _Noisy(what == "unseeded")
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(7 if what == "data" else 3))
    y = (x[:, 0] > 0).long()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)) if what == "order" else torch.arange(32)
    return TensorDataset(x[order], y[order])


def _begun(what: str, odd: bool) -> str:
    """How a run is refused in which process 1 is given another thing; empty if it is not."""
    given, owners = (what if odd else OTHERS.get(what, "")), [i if what == "groups" and odd else 31 - i for i in range(32)]
    users = what.startswith("groups")
    groups = {"groups": owners} if users and not (what == "groups or none" and odd) else {}
    try:
        private = _private(given, users=users)
    except HushgradError as error:
        return str(error)
    try:
        private.loader(_data(given), **groups)
    except HushgradError as error:
        return str(error)
    else:
        return " ".join(private.spent().notes)
    finally:
        private.detach()


def _taken(what: str, odd: bool) -> list:
    """Epsilon and notes after five steps, of which process 1 took some in a way of its own."""
    private, data = _private(), _data()
    model, loss = private.model, private.loss(nn.functional.cross_entropy)
    batches = iter(private.loader(data))
    for step in range(5):
        x, y = data[:4] if what == "foreign" and odd else next(batches)
        if odd and step == 2 and what == "data":
            data.tensors[0][5:9] += 3.0
        if odd and step == 4 and what == "optimizer":
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
        if odd and step == 4 and what == "late":
            private._capture.not_isolated, private._capture.late = "A repeated proof failed.", True
        vouched = odd and (what == "foreign" or (step == 4 and what == "loss"))
        try:
            if not (odd and step == 4 and what == "late"):
                (nn.functional.cross_entropy(model(x), y) if vouched else loss(model(x), y)).backward()
            private.optimizer.step()
        except HushgradError:
            break
    spent = private.spent()
    private.detach()
    return [spent.epsilon, [note for note in spent.notes]]


def main(options: dict) -> dict:
    odd = dist.get_rank() == 1
    return {
        "begun": {what: _begun(what, odd) for what in options["begun"]},
        "taken": {what: _taken(what, odd) for what in options["taken"]},
    }

"""The data of a run stay what they were when it began: also where the object stays the same and its content does not."""

from __future__ import annotations

import math
import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from hushgrad.errors import ArgumentError
from hushgrad.sampling.data_digest import identity_of
from hushgrad.train import Checkpoint, Plan, make_private

N = 40
DRAW = torch.Generator().manual_seed(3)
X, Y = torch.randn(N, 4, generator=DRAW), torch.randint(2, (N,), generator=DRAW)
ORDER = torch.randperm(N, generator=DRAW)


class Held(Dataset):
    """A data set that a user writes: ``take(self, i)`` gives a record."""

    def __init__(self, take=None, **held):
        self.take = take
        vars(self).update(held)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.take(self, i)


class Named(Dataset):
    """Its records are the program's variables."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return HERE[i], Y[i]


HERE = X


def _pairs(x):
    return [(x[i], int(Y[i])) for i in range(N)]


def _shuffled(tensor):
    tensor[:] = tensor[ORDER].clone()


def _frame():
    return pytest.importorskip("pandas").DataFrame(X.numpy().copy())


def _of_frame(data, i):
    return torch.from_numpy(data.frame.iloc[i].to_numpy().copy()), Y[i]


def _set_here():
    global HERE
    HERE = X[ORDER]


# what is made, and how it changes without becoming another object
CHANGES = {
    "a tensor in place": (lambda: TensorDataset(X.clone(), Y), lambda d: _shuffled(d.tensors[0])),
    "a tensor through its array": (lambda: TensorDataset(X.clone(), Y), lambda d: d.tensors[0].numpy()[::2].fill(1.0)),
    "an order that is an attribute": (
        lambda: Held(lambda d, i: (X[d.order[i]], Y[d.order[i]]), order=torch.arange(N)),
        lambda d: setattr(d, "order", ORDER),
    ),
    "a shuffled list": (lambda: _pairs(X), lambda d: random.Random(0).shuffle(d)),
    "the indices of a subset": (
        lambda: Subset(TensorDataset(X, Y), list(range(N))),
        lambda d: setattr(d, "indices", ORDER.tolist()),
    ),
    "an array in place": (
        lambda: Held(lambda d, i: (torch.from_numpy(d.x[i]), Y[i]), x=X.numpy().copy()),
        lambda d: d.x[::2].fill(1.0),
    ),
    "another frame": (
        lambda: Held(_of_frame, frame=_frame()),
        lambda d: setattr(d, "frame", d.frame.sample(frac=1, random_state=0)),
    ),
    "labels in a dict": (
        lambda: Held(lambda d, i: (X[i], d.labels[i]), labels=dict(enumerate(Y.tolist()))),
        lambda d: d.labels.update({0: 1 - d.labels[0]}),
    ),
    "a data set inside": (
        lambda: ConcatDataset([TensorDataset(X[:20].clone(), Y[:20]), TensorDataset(X[20:].clone(), Y[20:])]),
        lambda d: d.datasets[1].tensors[0].fill_(1.0),
    ),
    "a variable of the program": (Named, lambda d: _set_here()),
}


def _read(data, i):
    data.seen[i] = record = data.seen.get(i, (X[i], Y[i]))
    return record


def _kept(data, i):
    data.rows[i] = X[i] if data.rows[i] is None else data.rows[i]
    return data.rows[i], Y[i]


def _counted(data, i):
    data.reads += 1
    data.log.append(i)
    return X[i] + 0 * data.rng.random(), Y[i]


# what changes as it is read and gives the same records
READERS = {
    "a cache": lambda: Held(_read, seen={}),
    "a cache with places": lambda: Held(_kept, rows=[None] * N),
    "counters, a log, a generator": lambda: Held(_counted, reads=0, log=[], rng=np.random.RandomState(0)),
}


def _run():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=4, dataset_size=N, epochs=3)
    return make_private(model, optimizer, plan, seed=1)


def _steps(private, data, count, each=lambda: None, **options):
    for x, y in islice(private.loader(data, **options), count):
        nn.functional.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        each()


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setitem(globals(), "HERE", X)
    monkeypatch.setattr(Shared, "table", X)
    monkeypatch.setitem(STORE, "rows", X)


@pytest.mark.parametrize("what", CHANGES)
def test_the_same_object_with_other_content_is_refused_in_mid_run(what):
    make, change = CHANGES[what]
    private, data = _run(), make()
    _steps(private, data, 10)
    change(data)
    with pytest.raises(ArgumentError, match="were changed while it went on"):
        private.loader(data)
    assert math.isinf(private.spent().epsilon)


@pytest.mark.parametrize("what", ["a tensor in place", "an order that is an attribute"])
def test_what_changes_inside_one_loop_costs_everything(what):
    make, change = CHANGES[what]
    private, data = _run(), make()
    _steps(private, data, 30, lambda: change(data) if private.steps == 10 else None)
    assert math.isinf(private.spent().epsilon) and "were changed" in str(private.spent())


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("what", READERS)
def test_a_data_set_that_keeps_what_it_reads_goes_on(what, durable, tmp_path):
    private, data = _run(), READERS[what]()
    checkpoint = Checkpoint(tmp_path, private) if durable else None
    for _ in range(3):
        _steps(private, data, 10)
    assert checkpoint is None or not checkpoint.resumed
    assert math.isfinite(private.spent().epsilon) and "has come to hold more" in str(private.spent())


def test_reading_that_changes_the_records_is_said_before_the_first_step_unless_they_are_named():
    def take(data, i):
        data.counts[i] += 1
        return X[i], Y[i]

    data, private = Held(take, counts=np.zeros(N)), _run()
    with pytest.raises(ArgumentError, match='needs identity="name, version"'):
        _steps(private, data, 1)
    assert private.steps == 0
    private = _run()
    _steps(private, data, 5, identity="patients, 3")
    _steps(private, data, 25, identity="patients, 3")
    assert math.isfinite(private.spent().epsilon)


def test_groups_that_change_in_place_are_refused():
    groups = [i // 2 for i in range(N)]
    model = nn.Linear(4, 2)
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, batch_size=4, dataset_size=N // 2, steps=9, unit="user")
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=1)
    data = TensorDataset(X, Y)
    _steps(private, data, 3, groups=groups)
    groups.reverse()
    with pytest.raises(ArgumentError, match="data groups"):
        private.loader(data, groups=groups)


class Shared(Named):
    """Its records are the class's, behind a property."""

    table = X

    @property
    def rows(self):
        return STORE["rows"]

    def __getitem__(self, i):
        return self._row(i), Y[i]

    def _row(self, i):
        return self.rows[i] + self.table[i]


STORE = {"rows": X}

CHANGES_SEEN = {
    **{what: CHANGES[what] for what in ("labels in a dict", "a variable of the program")},
    "a table of the class": (Shared, lambda d: setattr(Shared, "table", X[ORDER])),
    "a store of the program": (Shared, lambda d: STORE.update(rows=X[ORDER])),
}


class InFolder(Held):
    def __getitem__(self, i):
        return self._read(i), self.labels[i]

    def _read(self, i):
        return torch.load(f"{self.folder}/{i}.pt")


def test_records_in_a_folder_that_is_read_are_unseen(tmp_path):
    """Also where labels lie in memory; a folder that reading does not name is a setting."""
    assert not identity_of(InFolder(folder=str(tmp_path), labels=[0] * N), b"k")["seen"]
    assert identity_of(Held(root=str(tmp_path), labels=[0] * N), b"k")["seen"]


@pytest.mark.parametrize("what", CHANGES_SEEN)
def test_the_identity_of_data_looks_into_dicts_and_named_variables(what):
    make, change = CHANGES_SEEN[what]
    data = make()
    before = identity_of(data, b"k")
    assert before["seen"] and before == identity_of(make(), b"k")
    change(data)
    assert identity_of(data, b"k") != before


@pytest.mark.parametrize("set_epoch", [False, True])
def test_a_number_that_orders_the_records_and_changes_in_mid_run_is_told(set_epoch):
    """Round robin promises how often a record takes part; a data set that reorders itself by its epoch breaks that."""

    class Epochs(torch.utils.data.Dataset):
        epoch = reads = 0

        def __init__(self):
            self.x, self.epoch, self.reads = torch.arange(64.0).view(16, 4), 0, 0

        def __len__(self):
            return 16

        def __getitem__(self, i):
            self.reads += 1  # of its own: says nothing
            return self.x[(i + 5 * self.epoch) % 16], self.x[i, :1] * 0

    data, model = Epochs(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, epochs=2)
    private = make_private(model, optimizer, plan, seed=0)
    for x, y in private.loader(data):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if set_epoch and private.steps == 4:
            data.epoch = 1
    assert ("changed while the run went on" in str(private.spent())) == set_epoch

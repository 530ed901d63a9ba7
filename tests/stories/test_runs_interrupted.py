"""Programs that go on where they were interrupted, forked, restored or shared by threads: no row of noise has two values."""

from __future__ import annotations

import collections
import os
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError, CaptureError, HushgradError
from hushgrad.release import journal_history, journal_place
from hushgrad.release.core import Release
from hushgrad.train import Checkpoint, Plan, make_private

F = nn.functional
PLAN = dict(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, steps=12)
g = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(64, 6, generator=g), torch.randint(2, (64,), generator=g))


class Life:
    """One life of a run, with dropout: a step that is taken again comes out differently."""

    def __init__(self, folder, rows, key=None):
        self.model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
        self.optimizer, self.rows = torch.optim.SGD(self.model.parameters(), lr=0.1), rows
        self.private = make_private(self.model, self.optimizer, Plan.dpsgd(**PLAN), key=key)
        self.optimizer.register_step_pre_hook(self._handed_out)
        self.checkpoint = None if folder is None else Checkpoint(folder, self.private)

    def _handed_out(self, *_):
        grads = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.rows[self.private.key.fingerprint, self.private.steps - 1].add(grads.numpy().tobytes())

    def one(self):
        x, y = next(iter(self.private.loader(DATA)))
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def to(self, step):
        while self.private.steps < step:
            self.one()
        return self


class Interrupt:
    """Ctrl-C at line ``number`` of what is between a journal's entry and its charge."""

    def __init__(self, number):
        self.left, self.happened = number, False

    def __call__(self, frame, event, arg):
        return self._line if "hushgrad" in frame.f_code.co_filename and frame.f_code.co_name != "__del__" else None

    def _line(self, frame, event, arg):
        self.left -= event == "line"
        if not self.left:
            sys.settrace(None)
            self.happened = True
            raise KeyboardInterrupt
        return self._line


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
def test_interrupted_at_any_line_of_a_release_and_gone_on_with_no_row_has_two_values(tmp_path, monkeypatch):
    """The cell is run again, and later the folder is resumed: the second life must not repeat what the first did not release."""
    refused = 0
    for number in range(2, 400, 5):
        rows, interrupt = collections.defaultdict(set), Interrupt(number)

        first = Life(tmp_path / str(number), rows).to(1)
        first.checkpoint.save()
        first.to(2)
        take = first.private._take

        def interrupted(noised, interrupt=interrupt, take=take):
            sys.settrace(interrupt)
            try:
                take(noised)
            finally:
                sys.settrace(None)

        with monkeypatch.context() as patch:
            patch.setattr(first.private, "_take", interrupted)
            try:
                first.one()
            except KeyboardInterrupt:
                first.optimizer.zero_grad()
        if not interrupt.happened:
            break
        for life in (lambda life=first: life, lambda: Life(tmp_path / str(number), rows)):  # noqa: B023
            try:
                life().to(5)
            except HushgradError:
                refused += 1
        assert all(len(values) == 1 for values in rows.values()), number
    assert number > 30 and refused > 3


def test_a_forked_process_gives_no_row_of_a_lazy_table_noise_of_its_own():
    model = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(8, 2))
    ids = torch.randint(30, (64, 2), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, Plan.dpsgd(**PLAN), lazy_tables=True)
    for x, y in private.loader(TensorDataset(ids, DATA.tensors[1])):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if private.steps == 2:
            break

    def in_child():
        read, write = os.pipe()
        if not os.fork():
            try:
                with torch.no_grad():
                    model(torch.arange(30).view(15, 2))
                os.write(write, b"read")
            except ArgumentError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.wait()
        return os.read(read, 1000).decode()

    assert "settle() lazy tables before a fork" in in_child()
    private.settle()
    assert in_child() == "read"


@pytest.mark.parametrize("birth", [None, 1])
def test_a_journal_that_was_put_back_is_known_by_its_birth_where_the_disk_gives_it_the_same_number(tmp_path, monkeypatch, birth):
    first = Life(tmp_path, collections.defaultdict(set)).to(2)
    first.private.detach()
    if birth is not None:  # another file, with this one's number
        for room in (journal_place, journal_history):
            monkeypatch.setattr(room, "born", lambda file: birth)
    again = Life(tmp_path, collections.defaultdict(set)).to(3)
    assert any("copied or put back" in note for note in again.private.spent().notes) == (birth is not None)


def test_a_state_without_a_journal_is_vouched_for():
    first = Life(None, collections.defaultdict(set), key=bytes(range(32))).to(2)
    state, weights = first.private.state_dict(), first.model.state_dict()
    again = Life(None, collections.defaultdict(set), key=bytes(range(32)))
    again.model.load_state_dict(weights)
    again.private.load_state_dict(state)
    assert any("without a journal" in note for note in again.to(3).private.spent().notes)
    assert not any("without a journal" in note for note in first.to(3).private.spent().notes)


@pytest.mark.parametrize("durable", [False, True])
def test_of_two_threads_in_one_step_one_releases_it(tmp_path, monkeypatch, durable):
    rows = collections.defaultdict(set)
    life = Life(tmp_path if durable else None, rows).to(2)
    original, begun = Release.witness, []

    def meanwhile(self, *arguments):
        if not begun:
            begun.append(True)
            other = threading.Thread(target=life.one)
            other.start()
            other.join()
        return original(self, *arguments)

    monkeypatch.setattr(Release, "witness", meanwhile)
    with pytest.raises(CaptureError, match="another thread"):
        life.one()
    assert life.private.steps == 3 and all(len(values) == 1 for values in rows.values())
    assert life.private.spent().epsilon < 10

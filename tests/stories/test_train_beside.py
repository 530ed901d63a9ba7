"""An ordinary optimizer that steps beside a private run: the guarantee says what cannot be seen."""

from __future__ import annotations

import copy
import shutil

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.guard import checks

PLAN = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=32, steps=4)
DATA = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2)
NOTE = "Another optimizer, without privacy, stepped while this run was dealing its batches"


def _step(model, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def _noted(private):
    return any(note.startswith(NOTE) for note in private.spent().notes)


def _run(twin=False):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = copy.deepcopy((model, optimizer)) if twin else None
    return make_private(model, optimizer, PLAN, seed=1), other


def test_a_copy_that_steps_on_the_batches_is_noted_and_not_forgotten(tmp_path):
    private, twin = _run(twin=True)
    checkpoint = Checkpoint(tmp_path, private)
    for number, batch in enumerate(private.loader(DATA)):
        _step(private.model, private.optimizer, batch)
        assert _noted(private) == (number > 1)
        if number == 1:
            _step(*twin, batch)
        if number == 2:
            checkpoint.save()
            break
    private.detach()
    again, _ = _run()
    Checkpoint(tmp_path, again)
    assert _noted(again)


def test_what_steps_before_the_first_batch_or_is_private_itself_is_not_noted():
    private, twin = _run(twin=True)
    _step(*twin, DATA[:8])  # trained before: public, or paid for elsewhere
    second, _ = _run()
    for one, two in zip(private.loader(DATA), second.loader(DATA), strict=True):
        _step(private.model, private.optimizer, one)
        _step(second.model, second.optimizer, two)
    assert not _noted(private) and not _noted(second)
    private.detach()
    second.detach()
    _step(private.model, private.optimizer, DATA[:8])
    assert not _noted(private)


def test_a_copy_of_a_private_model_is_an_ordinary_one_and_noted():
    private, _ = _run()
    batches = iter(private.loader(DATA))
    batch = next(batches)
    _step(private.model, private.optimizer, batch)
    twin = copy.deepcopy((private.model, private.optimizer))
    before = [p.clone() for p in twin[0].parameters()]
    assert not _noted(private)
    _step(*twin, batch)
    assert _noted(private) and not all(torch.equal(a, b) for a, b in zip(before, twin[0].parameters(), strict=True))
    private.detach()


def test_a_run_that_was_taken_over_stands_in_nobody_s_way(tmp_path):
    """Its journal is another life's: an ordinary optimizer beside it steps, and the life that goes on has the note."""
    first, twin = _run(twin=True)
    checkpoint = Checkpoint(tmp_path, first)
    batch = next(iter(first.loader(DATA)))
    _step(first.model, first.optimizer, batch)
    checkpoint.save()
    second, _ = _run()
    Checkpoint(tmp_path, second)  # takes the folder over
    _step(*twin, batch)
    assert _noted(first) and _noted(second)


def test_a_run_whose_folder_is_gone_stands_in_nobody_s_way(tmp_path):
    """It can release nothing any more, and an ordinary optimizer beside it steps."""
    private, twin = _run(twin=True)
    Checkpoint(tmp_path / "run", private)
    batch = next(iter(private.loader(DATA)))
    shutil.rmtree(tmp_path / "run")
    _step(*twin, batch)
    assert _noted(private)


def test_the_audit_s_second_form_of_a_run_is_no_other_model():
    private, twin = _run(twin=True)
    checks(twin[1])
    for batch in private.loader(DATA):
        _step(private.model, private.optimizer, batch)
        _step(*twin, batch)
    assert not _noted(private)

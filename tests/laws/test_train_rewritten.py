"""What the loop writes into batches and outputs where torch counts no version: by ``.data``, by numpy, by a view of either."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad import Plan, make_private
from hushgrad.train.loss_tracking import PREPARED

STEPS, BATCH = 6, 8


def _by_data(t, new):
    t.data.copy_(new)


def _by_numpy(t, new):
    t.detach().numpy()[:] = new.numpy()


def _by_a_view(t, new):
    t.view(len(t), -1).data.copy_(new.view(len(t), -1))


def _one_row(t, new):
    t.data[-1] = new[-1]


WAYS = [_by_data, _by_numpy, _by_a_view, _one_row]
WHAT = ["inputs", "targets", "outputs", "outputs after the loss", "inputs after the loss"]


def _notes(write, what, when, parts=None, own=None):
    """What the guarantee says of a loop that writes so, in these steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=BATCH, dataset_size=BATCH, steps=STEPS)
    private = make_private(model, optimizer, plan)
    loss = private.loss(own or nn.CrossEntropyLoss())
    x = torch.randn(BATCH, 6)
    x[0, 0] = torch.nan if own else 1.0
    for step, batch in enumerate(private.loader(TensorDataset(x, torch.randint(3, (BATCH,))))):
        optimizer.zero_grad()
        for x, y in [batch] if parts is None else batch.split(parts):

            def now(name, t, step=step):
                if name == what and step in when:
                    write(t, t.detach().roll(1, 0) + (1 if t.is_floating_point() else 0))

            now("inputs", x)
            now("targets", y)
            out = model(x)
            now("outputs", out)
            made = loss(out, y)
            now("outputs after the loss", out)
            now("inputs after the loss", x)
            made.backward()
        optimizer.step()
    notes = private.spent().notes
    private.detach()
    return notes


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("write", WAYS)
def test_what_the_loop_writes_without_a_version_is_vouched_for(write, what, parts):
    """Inputs that were centred by ``x.numpy()`` moved the sum by 5 clip norms if one record was removed."""
    at = random.Random(f"{write.__name__} {what} {parts}").randrange(STEPS)
    assert PREPARED in _notes(write, what, {at}, parts)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("write", WAYS)
def test_large_tensors_are_compared_in_some_steps_and_in_the_first(write, what, monkeypatch):
    monkeypatch.setattr("hushgrad.train.loss_tracking.FEW", 0)
    monkeypatch.setattr("hushgrad.train.loss_tracking.LARGE", 16 if "loss" in what else 1 << 18)
    assert PREPARED in _notes(write, what, {*range(STEPS)})


@pytest.mark.parametrize("few", [0, 1 << 14])
@pytest.mark.parametrize("parts", [None, 3])
def test_nothing_is_said_where_nothing_is_written(few, parts, monkeypatch):
    monkeypatch.setattr("hushgrad.train.loss_tracking.FEW", few)
    assert _notes(_by_data, "nothing", set(), parts) == ()


def test_no_number_is_as_it_was():
    assert _notes(_by_data, "nothing", set(), own=lambda out, y: nn.functional.cross_entropy(out.nan_to_num(), y)) == ()

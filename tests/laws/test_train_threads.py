"""The number of torch's threads is part of what a run was looked at under: another one in mid-run is noticed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.train import Checkpoint, Plan, Private, make_private
from hushgrad.train.invariant_sizes import InvariantSizes


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))


def _made(**plan: Any) -> Private:
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    made = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=24, steps=4, **plan)
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), made, seed=5)


def _passes(private: Private, x: torch.Tensor, y: torch.Tensor) -> None:
    private.optimizer.zero_grad()
    private.loss(nn.functional.cross_entropy)(private.model(x), y).backward()


@pytest.mark.parametrize("plan", [{}, {"certified": True}], ids=["ordinary", "certified"])
def test_a_step_under_other_threads_is_refused_and_may_be_made_good(plan: dict[str, Any]) -> None:
    private, data = _made(**plan), _data()
    for x, y in private.loader(data):
        _passes(private, x, y)
        if private.steps == 1:
            torch.set_num_threads(2)
            with pytest.raises(CaptureError, match=r"Expected 1 of torch's threads.*set_num_threads\(1\)"):
                private.optimizer.step()
            assert private.steps == 1
            torch.set_num_threads(1)
            _passes(private, x, y)
        private.optimizer.step()
    assert private.steps == 4


def test_a_batch_under_other_threads_is_refused_before_its_passes() -> None:
    private = _made()
    batches = iter(private.loader(_data()))
    torch.set_num_threads(2)
    with pytest.raises(CaptureError, match="there are 2 now"):
        next(batches)


def test_where_no_size_was_looked_for_any_number_will_do() -> None:
    torch.manual_seed(0)
    own = InvariantSizes.of(nn.LayerNorm(3))
    torch.set_num_threads(2)
    own.require_threads()
    assert own.threads is None


@pytest.mark.parametrize("known", [True, False], ids=["known", "of an earlier version"])
def test_a_state_without_a_journal_is_resumed_under_its_own_threads(known: bool) -> None:
    first, data = _made(), _data()
    for x, y in first.loader(data):
        _passes(first, x, y)
        first.optimizer.step()
        if first.steps == 2:
            break
    state = first.state_dict(with_key=True)
    if not known:
        del state["threads"]
    first.detach()
    torch.set_num_threads(2)
    second = _made()
    if known:
        with pytest.raises(ArgumentError, match=r"Expected 1 of torch's threads.*Checkpoint"):
            second.load_state_dict(state)
        assert second.steps == 0
    else:
        second.load_state_dict(state)
        assert second.steps == 2


def test_a_journal_compares_what_comes_out_instead(tmp_path: Any) -> None:
    first, data = _made(), _data()
    checkpoint = Checkpoint(tmp_path / "run", first)
    for x, y in first.loader(data):
        _passes(first, x, y)
        first.optimizer.step()
        if first.steps == 2:
            break
    checkpoint.save()
    first.detach()
    torch.set_num_threads(2)
    second = _made()
    Checkpoint(tmp_path / "run", second)
    assert second.steps == 2

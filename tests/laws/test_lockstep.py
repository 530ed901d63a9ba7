"""Sharded models: the isolation check is repeated, since a model may change what it does in the middle of a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture
from hushgrad.errors import NotIsolated
from hushgrad.release.placement.lockstep import CheckedTogether
from hushgrad.release.placement.world import World


class Centres(nn.Module):
    """Subtracts the mean of the batch, if ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on, self.passes = nn.Linear(3, 2), False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out = self.layer(x)
        return out - out.mean(0) if self.on else out


def _checked(model: nn.Module) -> tuple[Capture, CheckedTogether]:
    capture = Capture(model)
    return capture, CheckedTogether(model, World(), capture)


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_begins_to_mix_is_seen(batch, training):
    torch.manual_seed(0)
    model = Centres().train(training)
    capture, gate = _checked(model)
    for _ in range(batch - 1):
        gate.before(4)
        model(torch.randn(4, 3))
    model.on = True
    gate.before(4)
    with pytest.raises(NotIsolated):
        model(torch.randn(4, 3))
    assert capture.not_isolated and capture.late  # what was released before is covered by no theorem


def test_it_costs_little_and_waits_for_batches_of_two():
    torch.manual_seed(0)
    model = Centres()
    _, gate = _checked(model)
    gate.before(1)
    model(torch.randn(1, 3))
    assert model.passes == 1  # not yet
    checked = []
    for batch in range(2, 200):
        before = model.passes
        gate.before(4)
        model(torch.randn(4, 3))
        if model.passes > before + 1:
            checked.append(batch)
    assert checked == [2, 20]
    model.eval()  # layers may do something else
    before = model.passes
    gate.before(4)
    model(torch.randn(4, 3))
    assert model.passes > before + 1

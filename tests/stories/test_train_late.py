"""A proof that is repeated and fails: nobody knows since when, so what was released is covered by no theorem."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping.thresholds import REPEAT_ONE_IN
from hushgrad.errors import NotIsolated
from hushgrad.train import Plan, make_private

GATE = [0.0]


class _Opaque(torch.autograd.Function):
    """What numpy does nobody sees but a proof."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.detach().numpy()
        return torch.from_numpy(rows + rows.mean(0) if GATE[0] else rows.copy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Opaque.apply(self.first(x)).tanh())


def _trained(lots: list[int], *, opens: int | None) -> Any:
    """Steps at which so much of the proof is repeated as these lots say; before step ``opens`` a way opens."""
    torch.manual_seed(0)
    GATE[0] = 0.0
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, max_grad_norm=1.0, batch_size=8, dataset_size=64, steps=20)
    private = make_private(model, optimizer, plan, seed=0)
    lot, drawn = private._capture._root._lot, iter(lots)
    lot.random = lambda: (next(drawn, 9) + 0.5) / (4 * REPEAT_ONE_IN)
    try:
        for step, (x,) in enumerate(private.loader(torch.utils.data.TensorDataset(torch.randn(64, 4)))):
            GATE[0] = 1.0 if step == opens else GATE[0]
            model(x).pow(2).mean(1).sum().backward()
            optimizer.step()
            if step == 6:
                break
    except NotIsolated:
        return private, True
    return private, False


@pytest.mark.parametrize("lot", [0, 1])
def test_a_repeated_proof_that_fails_takes_the_guarantee_back(lot: int) -> None:
    private, refused = _trained([9, 9, 9, lot], opens=2)
    assert refused
    spent = private.spent()
    assert math.isinf(spent.epsilon)
    assert "later look failed" in str(private.ledger.event())
    assert "later look failed" in private.state_dict()["books"]["broken"]


def test_a_repeated_proof_that_holds_changes_nothing() -> None:
    private, refused = _trained([9, 1, 0, 1], opens=None)
    assert not refused
    assert math.isfinite(private.spent().epsilon)


def test_a_pass_of_another_kind_that_is_refused_says_nothing_of_those_before() -> None:
    private, _ = _trained([], opens=None)
    GATE[0] = 1.0
    with pytest.raises(NotIsolated):
        private.model.double()
        private._capture.examples(3)
        private.model(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    assert math.isfinite(private.spent().epsilon)

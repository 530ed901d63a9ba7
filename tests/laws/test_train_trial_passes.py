"""Trial passes leave no trace, whatever the model writes in its forward."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from hushgrad.train.trial_passes import aside


class _Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.config, self.seen, self.passes = (
            nn.Linear(3, 3),
            nn.BatchNorm1d(3),
            SimpleNamespace(kind=None),
            [],
            0,
        )
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.config.kind = "found"
        self.seen.append(len(x))
        self.mean += x.mean(0) + random.random() + np.random.rand()
        self.last = x
        return nn.functional.dropout(self.norm(self.layer(x)), 0.5)


def _held(model: _Writing) -> tuple[object, ...]:
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    buffers = {name: t.tolist() for name, t in model.named_buffers()}
    return model.passes, vars(model.config).copy(), [*model.seen], hasattr(model, "last"), model.norm.training, buffers, draws


def test_they_leave_no_trace() -> None:
    model = _Writing()
    before = _held(model)
    with aside(model):
        out = model(torch.randn(4, 3))
        assert _held(model) != before
    assert _held(model) == before
    assert not out.requires_grad

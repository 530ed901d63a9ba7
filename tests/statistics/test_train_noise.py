"""The noise that reaches the optimizer has the variance that the accountant was told, and a wrong one is noticed.

Each check is a chi-square test of N independent numbers at false-alarm rate 1e-9 (fixed keys: it passes always or never).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.noise import BLT
from hushgrad.release.core import Release
from hushgrad.sampling import RoundRobin
from hushgrad.train import Plan, make_private

ALARM = 1e-9


def _released(plan: Plan, dim: int = 2000) -> np.ndarray:
    """(steps, dim): what the optimizer is given when every record's gradient is zero: the noise alone."""
    model = nn.Linear(dim, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = make_private(model, optimizer, plan, key=bytes(range(32)))
    rows = []
    optimizer.register_step_pre_hook(lambda *_: rows.append(model.weight.grad.flatten().double().numpy().copy()))
    for (x,) in private.loader(TensorDataset(torch.zeros(40, dim))):
        if len(x):
            model(x).sum().backward()
        optimizer.step()
    private.detach()
    return np.stack(rows)


def _accepts(rows: np.ndarray, std: float) -> bool:
    """Two-sided chi-square test of the sum of squares of independent numbers."""
    statistic = float(np.sum((rows / std) ** 2))
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], rows.size)
    return bool(low <= statistic <= high)


def _dpsgd(noise_multiplier: float = 1.3) -> Plan:
    return Plan.dpsgd(noise_multiplier=noise_multiplier, delta=1e-5, max_grad_norm=0.5, batch_size=8, dataset_size=40, steps=15)


def test_independent_noise_has_the_plans_variance_whatever_the_batch():
    rows = _released(_dpsgd())
    assert _accepts(rows, 1.3 * 0.5 / 8)
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(correlations).max() < stats.norm.isf(ALARM / len(correlations)) / np.sqrt(rows.shape[1])


def test_correlated_noise_is_white_after_the_strategy():
    """C (released rows) = noise_multiplier clip / batch_size x Z: apply C and test for independent numbers."""
    sampler = RoundRobin(batch_size=8, dataset_size=40, epochs=3)
    plan = Plan.dpftrl(
        noise_multiplier=1.3, delta=1e-5, max_grad_norm=0.5, batch_size=8, dataset_size=40, sampling=sampler, noise=BLT(buffers=2)
    )
    rows = _released(plan)
    white = plan.noise.strategy(plan.steps) @ rows
    assert _accepts(white, 1.3 * 0.5 / 8)
    assert not _accepts(rows, 1.3 * 0.5 / 8)  # the rows themselves are correlated: the test can tell


@pytest.mark.parametrize("defect", ["half", "unscaled", "seeded twice"])
def test_wrong_noise_is_rejected(monkeypatch, defect):
    honest, first = Release._add, {}
    change = {"half": lambda z: 0.5 * z, "unscaled": lambda z: 8 * z, "seeded twice": lambda z: z.clone()}[defect]

    def mutated(self, step, buffers):
        drawn = first
        if defect != "seeded twice" or not first:
            drawn = {name: torch.zeros_like(total) for name, total in buffers.items()}
            honest(self, step, drawn)
            first.update(drawn)
        for name, total in buffers.items():
            total.add_(change(drawn[name]))

    monkeypatch.setattr(Release, "_add", mutated)
    rows = _released(_dpsgd())
    if defect == "seeded twice":
        assert np.allclose(rows[0], rows[1])
        with pytest.raises(AssertionError):
            test_independent_noise_has_the_plans_variance_whatever_the_batch()
    else:
        assert not _accepts(rows, 1.3 * 0.5 / 8)

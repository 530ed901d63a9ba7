"""The spellings that programs outside this repository rely on; more parameters are fine, other names are not."""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad import accounting, denoise, estimators, events, noise, testing


def run(plan: hushgrad.Plan) -> hushgrad.Guarantee:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = hushgrad.make_private(model, optimizer, plan, key=secrets.token_bytes(32))
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    for x, y in private.loader(data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return private.spent()


def test_five_lines_with_a_budget_or_with_a_noise_multiplier():
    common = {"delta": 1e-5, "max_grad_norm": 1.0, "batch_size": 10, "dataset_size": 40}
    assert run(hushgrad.Plan.dpsgd(epsilon=3.0, epochs=1, **common)).epsilon <= 3.0
    assert run(hushgrad.Plan.dpsgd(noise_multiplier=1.0, steps=4, denoise=denoise.Laplacian(sigma=1.0), **common)).epsilon > 0
    assert run(hushgrad.Plan.dpftrl(epsilon=5.0, epochs=2, noise=noise.BLT(buffers=2), **common)).epsilon <= 5.0


def test_accounting():
    event = events.Gaussian(noise_multiplier=1.1).sampled(rate=0.01) * 1000 + events.Gaussian(noise_multiplier=9.0)
    lower, upper = accounting.epsilon_interval(event, delta=1e-5)
    assert lower <= upper <= accounting.epsilon(event, delta=1e-5) * (1 + 1e-4)
    sigma = accounting.calibrate(lambda s: events.Gaussian(noise_multiplier=s) * 10, epsilon=1.0, delta=1e-5)
    assert hushgrad.epsilon(events.Gaussian(noise_multiplier=sigma) * 10, delta=1e-5) <= 1.0


def test_noise():
    like = torch.empty(3, 5)
    assert torch.equal(noise.Source(seed=1).z(0, 2, like), noise.Source(seed=1).z(0, 2, like))
    assert noise.Source(key=bytes(32)).z(7, 0, like).shape == like.shape
    once = events.Once()
    mechanism = noise.BLT.optimal(steps=64, buffers=2, loss="mean", participation=once)
    error = mechanism.error(steps=64, participation=once)
    assert error.lower_bound <= error.rmse <= error.max
    assert mechanism.sensitivity(steps=64, participation=once) >= 1.0


def test_denoise():
    assert denoise.Laplacian(sigma=1.0, scope="tensor").smooth(torch.ones(7)).shape == (7,)
    assert abs(denoise.gamma(1.0, 1000) - 0.447) < 1e-3
    assert 0 < denoise.beta(1.0, 1000) < 1


def test_estimators():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    model = estimators.DPLogisticRegression(epsilon=1.0, delta=1e-6, data_norm=1.0, random_state=0).fit(X, X[:, 0] > 0)
    assert model.guarantee_.epsilon == 1.0


def test_planner_and_assert_private():
    plans = hushgrad.plan_for(epsilon=2.0, delta=1e-5, dataset_size=1000, batch_size=50, epochs=2, memory=10**6)
    assert isinstance(plans, list)
    assert all(isinstance(plan, hushgrad.Plan) for plan in plans)
    testing.assert_private(
        hushgrad.Plan.dpgd(noise_multiplier=8.0, delta=1e-5, dataset_size=100, steps=8), epsilon=3.0, delta=1e-5
    )

"""The comparison of mechanisms trains all seeds at once; each is what a loop over examples gives, with the mechanism's noise."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hushgrad.noise import Banded
from hushgrad.sampling.draws import Draws
from hushgrad.train import Plan

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("sklearn")
from accuracy import mechanisms

ABOUT = {"delta": 1e-5, "batch_size": 20, "dataset_size": 100, "max_grad_norm": 0.5}


def rows(n: int = 100):
    x = np.random.default_rng(0).normal(size=(n, 4))
    return np.concatenate([x, np.ones((n, 1))], axis=1), (x[:, 0] > 0).astype(float)


def test_without_noise_it_is_a_loop_over_examples():
    plan = Plan.dpsgd(noise_multiplier=0.0, steps=8, **ABOUT)
    x, y = rows()
    w = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    deal = plan.sampler.dealer(len(x), Draws(mechanisms.key_of(3)))
    for step in range(plan.steps):
        total = torch.zeros(2, 5, dtype=torch.float64)
        for i in deal(step):
            loss = nn.functional.cross_entropy((w @ torch.from_numpy(x[i])).unsqueeze(0), torch.tensor([int(y[i])]))
            (g,) = torch.autograd.grad(loss, w)
            total += g * min(1.0, 0.5 / float(g.norm()))
        w = (w - 2.0 / 20 * total).detach().requires_grad_()
    found = mechanisms.trained(plan, [1.0, 2.0], (x, y), range(3, 5))[0, 1]
    np.testing.assert_allclose(found, w.detach().numpy(), atol=1e-12)


@pytest.mark.parametrize("noise", [None, Banded.square_root(bands=3)], ids=["independent", "banded"])
def test_without_gradients_it_is_the_mechanisms_noise(noise):
    """40,000 numbers: their deviation is off by more than 2.5 % with probability below 1e-11 (here the seeds are fixed)."""
    about = {"noise_multiplier": 1.0, "steps": 6, **ABOUT}
    plan = Plan.dpsgd(**about) if noise is None else Plan.dpftrl(**about, noise=noise, sampling="cyclic_poisson")
    x, y = np.zeros((100, 5)), rows()[1]
    w = mechanisms.trained(plan, [1.0], (x, y), range(4000))
    expected = np.linalg.norm(plan.noise.noising(6).sum(0)) * 0.5 / 20
    assert w.std() == pytest.approx(expected, rel=0.025)


@pytest.mark.parametrize("forgotten", [0.0, 0.2, 1.0])
def test_the_last_iterates_noise_is_that_of_the_matrices(forgotten):
    """Against N = C^-1 itself: the last row of (kept powers) N."""
    noise = Banded.square_root(bands=3)
    plan = Plan.dpftrl(noise_multiplier=2.0, steps=6, noise=noise, sampling="cyclic_poisson", **ABOUT)
    kept = (1.0 - forgotten) ** np.arange(6)[::-1]
    assert mechanisms.last_noise(plan, forgotten) == pytest.approx(2.0 * np.linalg.norm(kept @ plan.noise.noising(6)), rel=1e-12)

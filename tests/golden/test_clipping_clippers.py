"""Clippers against other libraries and the accountant."""

import math

import pytest
import torch
from torch import nn

from hushgrad import accounting
from hushgrad.clipping import Adaptive, Automatic, Flat, PerLayer, clipped_sum
from hushgrad.events import Gaussian, Relation


def test_adaptive_agrees_with_opacus(monkeypatch):
    """Opacus 1.6, optimizers/adaclipoptimizer.py: the noise on the gradient and one move of the clip norm.

    Its count is not centred and is divided by the batch's own size; for a batch of the expected size the moves are the same.
    """
    from opacus.optimizers import adaclipoptimizer

    stds = []
    monkeypatch.setattr(
        adaclipoptimizer, "_generate_noise", lambda std, reference, **_: stds.append(std) or torch.zeros_like(reference)
    )
    model = nn.Linear(2, 1, bias=False)
    peer = adaclipoptimizer.AdaClipDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
        max_clipbound=1e8, min_clipbound=1e-8, unclipped_num_std=5.0, max_grad_norm=0.7, expected_batch_size=100,
    )  # fmt: skip
    norms = torch.linspace(0.1, 2.1, 100)
    model.weight.grad_sample = torch.stack([norms, torch.zeros(100)], 1).unsqueeze(1)
    peer.clip_and_accumulate()
    peer.add_noise()
    peer.update_max_grad_norm()
    clip = Adaptive(0.7, batch_size=100, quantile=0.5, learning_rate=0.2, count_noise=5.0)
    assert stds == pytest.approx([clip.gradient_noise(1.0) * 0.7, clip.count_noise])
    assert clip.moved(clip.raw_count(norms)).max_grad_norm == pytest.approx(float(peer.max_grad_norm))
    expected = clip.weights(norms.square()) @ norms
    assert float(model.weight.grad[0, 0]) == pytest.approx(float(expected), rel=1e-4)


def test_the_default_count_noise_costs_half_a_percent_at_a_batch_of_100():
    """With z = 1, sigma_b = 100 / 20: (1 - 10⁻²)^(-1/2)."""
    assert Adaptive(1.0, batch_size=100).gradient_noise(1.0) == pytest.approx(1 / math.sqrt(0.99))


@pytest.mark.parametrize("relation", list(Relation))
def test_both_releases_cost_what_one_gaussian_costs(relation):
    clip, z = Adaptive(1.0, batch_size=100, count_noise=1.5), 1.2
    pair = Gaussian(clip.gradient_noise(z)) + clip.count_event()
    found, expected = (accounting.epsilon(event * 10, delta=1e-5, relation=relation) for event in (pair, Gaussian(z)))
    assert found == pytest.approx(expected, rel=1e-3)
    unsplit = accounting.epsilon((Gaussian(z) + clip.count_event()) * 10, delta=1e-5, relation=relation)
    assert unsplit > expected * 1.02  # what forgetting the count would hide


def test_values_by_hand():
    """A linear model without bias on unit vectors: G_i = x_i, so norms are 3 and 0.5."""
    model = nn.Linear(2, 1, bias=False).double()
    batch = (torch.tensor([[3.0, 0.0], [0.0, 0.5]]).double(),)
    sums = {
        "flat": (Flat(1.0), [1.0, 0.5]),
        "automatic": (Automatic(1.0, stability=0.5), [3 / 3.5, 0.5]),
        "per layer": (PerLayer(2.0), [2.0, 0.5]),
        "adaptive": (Adaptive(0.25, batch_size=10), [0.25, 0.25]),
    }
    for name, (clipper, expected) in sums.items():
        clipped = clipped_sum(model, lambda out: out.sum(), batch, clipper, loss_reduction="sum")
        assert clipped.raw_norms.tolist() == [3.0, 0.5], name
        assert clipped.raw_sums["weight"][0].tolist() == pytest.approx(expected), name

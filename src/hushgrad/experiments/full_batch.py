"""Full-batch private gradient descent of linear classifiers, many runs at once in one pass over the data.

The norm of an example's gradient is ‖p - y‖ ‖x‖, so clipping per example costs nothing. The noise is given, and calibrated by a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hushgrad.train import Average

_PART = 10_000  # examples at a time: what fits into a processor's cache


@dataclass(frozen=True)
class Descent:
    """One run: learning rate, smoothing σ over the picture that a row is, noise on the mean of clipped gradients, and its seed."""

    rate: float
    sigma: float
    noise: float
    seed: int


def descended(data: TensorDataset, runs: Sequence[Descent], *, clip: float, steps: Iterable[int], average: Average) -> Tensor:
    """Weights (run, class, input): the ``average`` of the iterates 0, 1, ... of ``steps``, from zero and without a bias.

    Without a bias: its gradient would take most of each example's clip norm, and classes are nearly balanced.
    """
    steps = list(steps) if not isinstance(steps, Sequence) else steps
    inputs, labels = data.tensors
    norms, d = inputs.norm(dim=1), inputs.shape[1]
    rngs = [torch.Generator().manual_seed(run.seed) for run in runs]
    rate, noise, sigma = (torch.tensor([vars(run)[name] for run in runs])[:, None, None] for name in ("rate", "noise", "sigma"))
    weights = torch.zeros(len(runs), 10, d)
    kept = weights
    for step in steps:
        gradient = _mean_clipped(weights, inputs, labels, norms, clip)
        gradient += noise * torch.stack([torch.randn(10, d, generator=rng) for rng in rngs])
        weights = weights - rate * _smoothed(gradient, sigma)
        kept = torch.lerp(kept, weights, average.weight(step, len(steps)))
    return kept


def _mean_clipped(weights: Tensor, inputs: Tensor, labels: Tensor, norms: Tensor, clip: float) -> Tensor:
    total = torch.zeros(weights.shape[0] * 10, inputs.shape[1])
    flat = weights.flatten(0, 1)
    for x, y, norm in zip(inputs.split(_PART), labels.split(_PART), norms.split(_PART), strict=True):
        residual = torch.softmax((x @ flat.T).view(len(x), -1, 10), dim=2)
        residual[torch.arange(len(y)), :, y] -= 1
        size = residual.norm(dim=2) * norm[:, None]
        residual *= (clip / size.clamp(min=1e-12)).clamp(max=1.0)[:, :, None]
        total.addmm_(residual.flatten(1).T, x)
    return (total / len(inputs)).view_as(weights)


def _smoothed(gradient: Tensor, sigma: Tensor) -> Tensor:
    """A_σ⁻¹ on the square picture that each row is; runs with σ = 0 as they are."""
    if not bool(sigma.any()):
        return gradient
    side = math.isqrt(gradient.shape[-1])
    line = 2 - 2 * torch.cos(2 * math.pi * torch.arange(side) / side)
    divisor = 1 + sigma[..., None] * (line[:, None] + line[None, : side // 2 + 1])
    pictures = gradient.unflatten(-1, (side, side))
    return torch.fft.irfft2(torch.fft.rfft2(pictures) / divisor, s=(side, side)).flatten(-2)

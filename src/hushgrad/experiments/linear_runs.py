"""Two recipes for a linear classifier, many runs at once as one stack of weights; the noise is given, and calibrated elsewhere.

The norm of an example's gradient is ‖p - y‖ ‖(x, 1)‖, so clipping per example costs nothing. First the recipe of DP-LSSGD's table 2 and
figure 4: batches of 128, which all runs of one seed share, 50 epochs, step size a/t. Then full-batch gradient descent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad.train import Average

DELTA, REGULARISATION, CLIP = 1e-5, 1e-4, 1.0
_PART = 10_000  # examples at a time: what fits into a processor's cache

# Table 2, test accuracy in per cent by epsilon: σ = 0, σ = 3, and the noise (on the mean gradient) in the authors' program.
_TABLE2 = {0.3: (81.74, 85.11, 0.1162), 0.2: (78.92, 82.22, 0.1739), 0.1: (73.49, 77.13, 0.3471)}


def table2(epsilon: float, sigma: float) -> float:
    """The figures printed in the paper."""
    return _TABLE2[epsilon][0 if sigma == 0 else 1]


def authors_noise(epsilon: float) -> float:
    """The standard deviation in the authors' program, per coordinate of the mean gradient."""
    return _TABLE2[epsilon][2]


@dataclass(frozen=True)
class Setting:
    """One run: smoothing σ, step size a/t, noise's standard deviation on the mean gradient; clipped "example" or "batch" wise."""

    sigma: float
    a: float
    noise: float
    clip: str = "example"

    def __post_init__(self) -> None:
        _check.one_of(("example", "batch"), clip=self.clip)


def theorem2(epsilon: float, *, n: int, b: int, steps: int, constant: float = 20.0) -> tuple[float, bool]:
    """(noise of theorem 2 at its best mu, whether its condition on alpha holds for any mu) with G = 1."""
    best, allowed = math.inf, False
    for k in range(1, 1000):
        mu = k / 1000
        alpha = math.log(1 / DELTA) / ((1 - mu) * epsilon) + 1
        best = min(best, math.sqrt(constant * steps * alpha / (mu * n * n * epsilon)))
        allowed |= alpha <= math.log(mu * n**3 * epsilon / (5 * b**3 * steps * alpha + mu * b * n * n * epsilon))
    return best, allowed


def normalised(data: TensorDataset) -> TensorDataset:
    """Pixels minus 0.1307, divided by 0.3081, as in the authors' program, flattened."""
    images, labels = data.tensors
    return TensorDataset((images.flatten(1) - 0.1307) / 0.3081, labels)


def lipschitz(data: TensorDataset) -> float:
    """The largest gradient norm that an example can have under the logistic loss: sqrt(2) max ‖(x, 1)‖."""
    return math.sqrt(2.0 * float(data.tensors[0].square().sum(dim=1).max() + 1))


def spectrum(sigma: Tensor, d: int) -> Tensor:
    """Eigenvalues of A_σ for real Fourier transforms of length d, a row for each σ."""
    return 1 + 2 * sigma[:, None] * (1 - torch.cos(2 * math.pi * torch.arange(d // 2 + 1) / d))


def train_together(data: TensorDataset, settings: Sequence[Setting], *, batch: int, steps: Iterable[int], seed: int) -> Tensor:
    """Weights (setting, class, input and a 1) after the ``steps`` 1, 2, ... on Poisson batches of ``batch`` expected examples.

    Batch-clipped runs follow the authors' program: the mean gradient is clipped instead of each example's, weight and bias
    apart, and the step size is refreshed once per epoch only.
    """
    inputs, labels = torch.cat([data.tensors[0], torch.ones(len(data), 1)], dim=1), data.tensors[1]
    n, d, runs = len(data), inputs.shape[1], len(settings)
    rng = torch.Generator().manual_seed(seed)
    per_example = torch.tensor([s.clip == "example" for s in settings])
    column = {name: torch.tensor([vars(s)[name] for s in settings]) for name in ("a", "noise", "sigma")}
    smoothed = (column["sigma"] > 0).nonzero()[:, 0]
    divisors = spectrum(column["sigma"][smoothed], 10 * (d - 1))
    weights, norms = torch.zeros(runs, 10, d), inputs.norm(dim=1)
    for t in steps:
        chosen = (torch.rand(n, generator=rng) < batch / n).nonzero()[:, 0]
        gradient = _gradients(weights, inputs[chosen], labels[chosen], norms[chosen], per_example, batch)
        gradient += torch.randn(weights.shape, generator=rng) * column["noise"][:, None, None]
        gradient.add_(weights, alpha=REGULARISATION)
        signal = gradient[smoothed, :, :-1].flatten(1)
        gradient[smoothed, :, :-1] = torch.fft.irfft(torch.fft.rfft(signal) / divisors, n=signal.shape[1]).view(-1, 10, d - 1)
        refreshed = max(1, (t - 1) // (n // batch) * (n // batch))
        rate = torch.where(per_example, column["a"] / t, column["a"] / refreshed)
        weights -= rate[:, None, None] * gradient
    return weights


def _gradients(weights: Tensor, x: Tensor, y: Tensor, norms: Tensor, per_example: Tensor, batch: int) -> Tensor:
    """Sums over the batch divided by ``batch``: of clipped gradients, or clipped themselves."""
    residual = torch.softmax(torch.einsum("rkd,bd->rbk", weights, x), dim=2)
    residual[:, torch.arange(len(y)), y] -= 1
    factor = (CLIP / (residual.norm(dim=2) * norms).clamp(min=1e-12)).clamp(max=1.0)
    residual *= torch.where(per_example[:, None], factor, torch.ones(())).unsqueeze(2)
    mean = torch.einsum("rbk,bd->rkd", residual, x) / batch
    for part in (mean[..., :-1], mean[..., -1:]):  # tensor by tensor, as in the authors' program
        factor = (CLIP / part.flatten(1).norm(dim=1).clamp(min=1e-12)).clamp(max=1.0)
        part *= torch.where(per_example, torch.ones(()), factor)[:, None, None]
    return mean


def correct(weights: Tensor, data: TensorDataset) -> list[float]:
    """Test accuracy of each run, in per cent."""
    inputs, labels = data.tensors
    inputs = torch.cat([inputs, torch.ones(len(data), 1)], dim=1)
    return [100.0 * float(((inputs @ w.T).argmax(1) == labels).float().mean()) for w in weights]


# Full-batch gradient descent ----------------------------------------------------------------------------------------------


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

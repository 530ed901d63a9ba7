"""Adam's direction with the privacy noise taken out of its second moment (DP-AdamBC)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise._c_kernels import FUSED, Moments, fits
from hushgrad.denoise.base import Denoiser, NoiseInfo, working_dtype

_TINY = 1e-16  # the square of Adam's usual eps
_PIECE = 1 << 15  # elements per pass: four tensors of this length fit in a core's own cache


@dataclass(frozen=True, kw_only=True)
class DebiasedSecondMoment(Denoiser):
    r"""Adam's direction m̂_t / sqrt(max(v̂_t - s̄²_t, floor)): the noise no longer dominates the denominator.

    Under DP noise E[g²] = (signal)² + s², and s² is usually the larger part, so that DP-Adam divides every coordinate by about s
    and becomes DP-SGD with momentum. Here v̂ is corrected by the same running mean s̄²_t of the known noise variances s_t²; this
    is exact for correlated noise too, since the expectation of v̂ needs the variance of each row and no covariance.

    **Use it with** ``torch.optim.SGD(lr=...)`` **without momentum.** A denoiser hands over gradients, and Adam feeds one and the
    same gradient to both of its moments, so none can correct the second alone; hence this one keeps both moments itself and hands
    over the finished direction.

    ``floor`` is the paper's absolute constant; None takes one standard error of v̂ under independent noise,
    s̄² sqrt(2 (1-β₂)(1+β₂ᵗ) / ((1+β₂)(1-β₂ᵗ))), below which the corrected moment is not distinguishable from zero. With s = 0 the
    direction is Adam's.

    **Formal guarantee.** Post-processing, so no privacy is spent. State: two copies of the parameters.

    >>> info = NoiseInfo(std=0.0, step=0, max_grad_norm=1.0)
    >>> [round(x, 4) for x in DebiasedSecondMoment()({"w": torch.tensor([3.0, -0.2])}, info, {})["w"].tolist()]
    [1.0, -1.0]

    Reference: Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)",
    AAAI 2024, arXiv:2312.14334, Algorithm 1.
    """

    papers = (
        _papers.Paper(
            "tang2024adambc",
            "Tang, Qiaoyue and Shpilevskiy, Frederick and L{\\'e}cuyer, Mathias",
            "{DP-AdamBC}: Your {DP-Adam} Is Actually {DP-SGD} (Unless You Apply Bias Correction)",
            "AAAI",
            arxiv="2312.14334",
        ),
    )

    betas: tuple[float, float] = (0.9, 0.999)
    floor: float | None = None

    never_grows = False  # it sets the scale on purpose

    def __post_init__(self) -> None:
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            _check.fail("betas", self.betas, "to be two numbers", "Adam's own are (0.9, 0.999).")
        betas = tuple(
            _check.between(0, 1, closed="left", betas=beta, remedy="Adam's own are (0.9, 0.999).") for beta in self.betas
        )
        object.__setattr__(self, "betas", betas)
        if self.floor is not None:
            remedy = "floor=None takes one standard error of the second moment."
            object.__setattr__(self, "floor", _check.positive(floor=self.floor, remedy=remedy))

    needs_noise_std = True  # the noise's variance is what is subtracted

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """The direction for plain SGD: both moments are updated, corrected for their start, and the second for the noise."""
        steps = int(state.get("steps", 0)) + 1
        noise = float(state.get("noise", 0.0))
        noise += (1 - self.betas[1]) * (info.std**2 - noise)
        state.update(steps=steps, noise=noise)
        with torch.no_grad():
            return {name: self._one(name, grad, steps, noise, state) for name, grad in grads.items()}

    def _floor(self, steps: int, variance: float) -> float:
        if self.floor is not None:
            return self.floor
        decayed = self.betas[1] ** steps
        relative = 2 * (1 - self.betas[1]) * (1 + decayed) / ((1 + self.betas[1]) * (1 - decayed))
        return max(variance * math.sqrt(relative), _TINY)

    def _one(self, name: str, grad: Tensor, steps: int, noise: float, state: dict[str, Any]) -> Tensor:
        value = grad.detach().to(working_dtype(grad)).reshape(-1)
        for moment in ("mean", "square"):
            if f"{moment}.{name}" not in state:
                state[f"{moment}.{name}"] = torch.zeros_like(value).view(grad.shape)
        out = torch.empty_like(value)
        moments = self._moments(steps, noise)
        tensors = value, state[f"mean.{name}"].view(-1), state[f"square.{name}"].view(-1), out
        if FUSED is not None and fits(*tensors):
            FUSED.direction(*tensors, moments)
            return out.view(grad.shape).to(grad.dtype)
        # Eight operations per element: piece by piece they stay in the cache, and memory is crossed once.
        for piece in zip(*(torch.split(t, _PIECE) for t in tensors), strict=True):
            g, mean, square, target = piece
            _direction(g, mean, square, target, moments)
        return out.view(grad.shape).to(grad.dtype)

    def _moments(self, steps: int, noise: float) -> Moments:
        beta1, beta2 = self.betas
        start1, start2 = 1 - beta1**steps, 1 - beta2**steps
        floor = start2 * self._floor(steps, noise / start2)
        # Both corrections for the start are one factor, taken out of the root.
        return Moments(1 - beta1, 1 - beta2, noise, floor, math.sqrt(start2) / start1)


def _direction(g: Tensor, mean: Tensor, square: Tensor, out: Tensor, moments: Moments) -> None:
    mean.lerp_(g, moments.fresh1)
    square.mul_(1 - moments.fresh2).addcmul_(g, g, value=moments.fresh2)
    torch.sub(square, moments.noise, out=out).clamp_min_(moments.floor).rsqrt_()
    out.mul_(mean).mul_(moments.factor)

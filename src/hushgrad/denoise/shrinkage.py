"""Shrinkage: estimators that know the noise's standard deviation and pull a noisy gradient towards zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hushgrad import _check, _papers
from hushgrad._precision import widest
from hushgrad.denoise.base import Denoiser, NoiseInfo, working_dtype


@dataclass(frozen=True, kw_only=True)
class JamesStein(Denoiser):
    r"""Positive-part James-Stein: (1 - (d - 2) s² / ‖y‖²)₊ y, per tensor or over the whole gradient.

    **Formal guarantee.** Post-processing. For independent Gaussian noise of standard deviation s within the row (true of every
    mechanism here: rows are correlated over the steps, not over the coordinates) and d >= 3, the mean squared error is below that
    of y itself for every true gradient. With d <= 2, or s = 0, the input comes back bit for bit.

    >>> info = NoiseInfo(std=1.0, step=0, max_grad_norm=1.0)
    >>> JamesStein()({"w": torch.tensor([2.0, 0.0, 0.0, 0.0])}, info, {})["w"]
    tensor([1., 0., 0., 0.])

    Reference: Balle and Wang, "Improving the Gaussian mechanism", ICML 2018, section 4 (its James-Stein estimator).
    """

    papers = (_papers.BALLE_2018_IMPROVING,)

    per: str = "tensor"
    expected = _check.each(per=partial(_check.one_of, ("tensor", "global")))

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(), cls(per="global"))

    needs_whole_tensor = True  # the factor is a function of the whole tensor's norm and size

    @property
    def needs_all_tensors(self) -> bool:
        """Under "global" the factor is one for all tensors."""
        return self.per == "global"

    needs_noise_std = True  # the factor is a function of the noise's variance

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            squares = {name: _square(grad) for name, grad in grads.items()}
            if self.per == "tensor":
                return {name: _shrunk(grad, squares[name], grad.numel(), info.std) for name, grad in grads.items()}
            total, size = sum(s.cpu() for s in squares.values()), sum(grad.numel() for grad in grads.values())
            return {name: _shrunk(grad, torch.as_tensor(total).to(grad.device), size, info.std) for name, grad in grads.items()}


def _square(grad: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad.detach().to(working_dtype(grad)))
    return widest(norm).square()


def _shrunk(grad: Tensor, square: Tensor, size: int, std: float) -> Tensor:
    if size <= 2 or std == 0:
        return grad.clone()
    # 0 / 0 for an all-zero gradient would be NaN; any factor leaves it at zero.
    factor = (1 - (size - 2) * std**2 / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp_min(0)
    return (grad.to(working_dtype(grad)) * factor.to(working_dtype(grad))).to(grad.dtype)


@dataclass(frozen=True, kw_only=True)
class SoftThreshold(Denoiser):
    r"""Soft threshold: sign(y) (|y| - λ)₊ with λ = ``scale`` x s sqrt(2 ln d), d the size of the tensor.

    Of d pure-noise coordinates the largest is about s sqrt(2 ln d), so what survives is signal; for a gradient with k large
    coordinates the squared error is of order k s² ln d instead of d s². A dense gradient below λ is erased: mind ``scale``.

    **Formal guarantee.** Post-processing. With s = 0, ``scale=0`` or d = 1 the input comes back bit for bit.

    >>> info = NoiseInfo(std=1.0, step=0, max_grad_norm=1.0)
    >>> SoftThreshold()({"w": torch.tensor([3.0, 0.5, 0.2, 0.1])}, info, {})["w"]
    tensor([1.3349, 0.0000, 0.0000, 0.0000])

    Reference: Balle and Wang, "Improving the Gaussian mechanism", ICML 2018, section 4; Donoho, 1995, for the threshold.
    """

    papers = (
        _papers.BALLE_2018_IMPROVING,
        _papers.Paper(
            "donoho1995denoising",
            "Donoho, David L.",
            "De-Noising by Soft-Thresholding",
            "IEEE Transactions on Information Theory",
            kind="article",
        ),
    )

    scale: float = 1.0
    expected = _check.each(scale=partial(_check.non_negative, "Use scale=0 for no threshold; 1 is the universal one."))

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(scale=0.5),)

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        return (cls(scale=0.0),)

    needs_whole_tensor = True  # the threshold is a function of the whole tensor's size

    needs_noise_std = True  # the threshold is a multiple of the noise's standard deviation

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: self._one(grad, info.std) for name, grad in grads.items()}

    def _one(self, grad: Tensor, std: float) -> Tensor:
        threshold = self.scale * std * math.sqrt(2 * math.log(max(grad.numel(), 1)))
        if threshold == 0:
            return grad.clone()
        return torch.nn.functional.softshrink(grad.detach().to(working_dtype(grad)), threshold).to(grad.dtype)

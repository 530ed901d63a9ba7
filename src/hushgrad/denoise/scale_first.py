"""Scale, then privatise: noise in proportion to the factor by which an adaptive optimizer will divide it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise.base import Denoiser, NoiseInfo, working_dtype


def inverse_sizes(state: dict[str, Any], prefix: str, eps: float) -> dict[str, Tensor] | None:
    """S = k / (sqrt(v) + ``eps`` r) for the v that stand under ``prefix`` in ``state``; None if all of them are 0.

    r is the root mean square of all sqrt(v), and k is such that s ⊙ sqrt(v) has the norm of sqrt(v): a typical gradient keeps its norm,
    so that a clip norm and a learning rate keep their meaning under the scales.
    """
    squares = {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
    total = sum(float(v.double().sum()) for v in squares.values())
    count = sum(v.numel() for v in squares.values())
    if not total > 0 or not math.isfinite(total):
        return None
    floor = eps * math.sqrt(total / count)
    sizes = {name: v.sqrt() for name, v in squares.items()}
    made = {name: (size + floor).reciprocal() for name, size in sizes.items()}
    scaled = sum(float((made[name] * size).double().square().sum()) for name, size in sizes.items())
    return {name: s.mul_(math.sqrt(total / scaled)) for name, s in made.items()}


_SQUARE = "square."


@dataclass(frozen=True, kw_only=True)
class ScaleThenPrivatise(Denoiser):
    r"""Gradients are divided by the second moments of the steps before, clipped, given their noise, and multiplied back.

    Adam divides each coordinate by sqrt(v). Noise of one size for all coordinates then dominates v wherever gradients are small. Here

        h_t = [sum_i clip_C(s_t ⊙ g_i) + noise] / batch_size,    g̃_t = h_t / s_t,    s_t = k / (sqrt(v_{t-1}) + ``eps`` rms(sqrt(v_{t-1})))

    with v_t = β v_{t-1} + (1 - β) g̃_t²: noise is as large as the optimizer takes the coordinate to be, which is also what correlated
    noise wants, since after Adam's division it is of one size again from step to step. k is such that a gradient of the usual shape keeps
    its norm, so that the clip norm keeps its meaning; larger ``eps`` makes all coordinates more alike. The first step is not scaled.

    **Use it with** ``torch.optim.Adam(betas=(..., beta))`` or another adaptive optimizer with the same β; it gets g̃_t.

    **Formal guarantee.** s_t is a function of earlier releases. Given them, an example's part of the sum is clip_C(s_t ⊙ g_i), of norm at
    most C, and the mechanism adds the same noise as in any step; dividing by s_t is post-processing. So T steps are the adaptive
    composition that ``plan.event()`` describes, those of DP-SGD. State: one copy of the parameters; each example's gradient is
    formed, see :mod:`hushgrad.clipping.preconditioned`.

        >>> import torch
        >>> denoiser, state = ScaleThenPrivatise(eps=0.1), {}
        >>> info = NoiseInfo(std=0.0, step=0, max_grad_norm=1.0)
        >>> g = denoiser({"w": torch.tensor([4.0, 1.0])}, info, state)
        >>> [round(s, 3) for s in denoiser.scales(state)["w"].tolist()]
        [0.793, 2.635]

    Reference: Ganesh, McMahan and Thakurta, "On design principles for private adaptive optimizers", 2025, arXiv:2507.01129, algorithm 8
    (its eps is absolute and its k is 1).
    """

    papers = (
        _papers.Paper(
            "ganesh2025design",
            "Ganesh, Arun and McMahan, H. Brendan and Thakurta, Abhradeep",
            "On Design Principles for Private Adaptive Optimizers",
            arxiv="2507.01129",
            kind="misc",
        ),
    )

    beta: float = 0.999
    eps: float = 1.0

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return cls(), cls(beta=0.5, eps=0.1)

    def __post_init__(self) -> None:
        beta = _check.between(0, 1, closed="left", beta=self.beta, remedy="Adam's own is 0.999.")
        remedy = "Without it a coordinate that was never seen would get no noise at all, and no gradient."
        self._keep(beta=beta, eps=_check.positive(eps=self.eps, remedy=remedy))

    never_grows = False  # clipping bounds the norm in the scaled space only

    def scales(self, state: dict[str, Any]) -> dict[str, Tensor] | None:
        """Scales that are large where released gradients were small; None before the first step."""
        return inverse_sizes(state, _SQUARE, self.eps)

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """Scale the gradients back, and update the second moments."""
        scales, out = self.scales(state), {}
        for name, g in grads.items():
            value = g.detach().to(working_dtype(g))
            value = value.clone() if scales is None else value / scales[name]
            square = state.get(_SQUARE + name)
            state[_SQUARE + name] = value.square() if square is None else square.lerp(value.square(), 1 - self.beta)
            out[name] = value.to(g.dtype) if value.dtype is not g.dtype else value
        return out

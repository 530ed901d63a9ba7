"""DP2: adaptive steps with a preconditioner that is computed from earlier releases and kept for several steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise.base import Denoiser, NoiseInfo, working_dtype
from hushgrad.denoise.scale_first import inverse_sizes

_SUM, _SQUARE = "sum.", "square."


@dataclass(frozen=True, kw_only=True)
class DelayedPreconditioner(Denoiser):
    r"""DP2-RMSProp: ``delay`` plain steps, whose noisy gradients are averaged; then ``used`` steps that are scaled by that average.

    With v ← β v + (1 - β)(mean of the last ``delay`` plain noisy gradients)², an adaptive step releases

        g̃_t = [sum_i clip_C(s ⊙ g_i) + noise] / batch_size,     s = k / (sqrt(v) + ``eps`` rms(sqrt(v)))

    and passes g̃_t on unchanged: the direction of RMSProp. Averaging over the delay leaves 1/``delay`` of the noise's variance in v, and
    scaling *before* clipping and noise lets rare coordinates, which noise of one size drowns, come through. k is such that a gradient
    of the usual shape keeps its norm, so that one clip norm and one learning rate serve both kinds of steps; ``ratio`` = r clips the
    adaptive ones at r C instead, with r times the noise.

    **Use it with** ``torch.optim.SGD``, with or without momentum.

    **Formal guarantee.** s is a function of earlier releases. Given them, an example's part of the sum is clip_C(s ⊙ g_i / r), of norm at
    most C, to which the mechanism adds the same noise as in any step; multiplying by r is post-processing. So T steps are the adaptive
    composition that ``plan.event()`` describes, those of DP-SGD. Dividing by s *after* the noise would be private as well, but
    scale the noise of small coordinates up; clipping before scaling would need another sensitivity. State: two copies of the
    parameters; each example's gradient is formed, see :mod:`hushgrad.clipping.preconditioned`.

        >>> import torch
        >>> denoiser, state = DelayedPreconditioner(delay=1), {}
        >>> info = NoiseInfo(std=0.0, step=0, max_grad_norm=1.0)
        >>> denoiser.scales(state), denoiser({"w": torch.tensor([4.0, 1.0])}, info, state)["w"].tolist()
        (None, [4.0, 1.0])
        >>> [round(s, 3) for s in denoiser.scales(state)["w"].tolist()]
        [0.793, 2.635]

    Reference: Li, Zaheer, Liu, Reddi, McMahan and Smith, "Differentially private adaptive optimization with delayed preconditioners",
    ICLR 2023, arXiv:2212.00309, algorithm 1 (its eps is absolute, its k is 1, and each kind of step has a clip norm of its own).
    """

    papers = (
        _papers.Paper(
            "li2023delayed",
            "Li, Tian and Zaheer, Manzil and Liu, Ziyu and Reddi, Sashank and McMahan, H. Brendan and Smith, Virginia",
            "Differentially Private Adaptive Optimization with Delayed Preconditioners",
            "ICLR",
            arxiv="2212.00309",
        ),
    )

    delay: int = 20
    used: int | None = None
    beta: float = 0.9
    eps: float = 0.1
    ratio: float = 1.0

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(delay=1), cls(delay=2, used=1, beta=0.5, ratio=0.5))

    def __post_init__(self) -> None:
        delay = _check.positive_int(delay=self.delay)
        self._keep(
            delay=delay,
            used=delay if self.used is None else _check.positive_int(used=self.used),
            beta=_check.between(0, 1, closed="left", beta=self.beta),
            eps=_check.positive(
                eps=self.eps, remedy="Without it a coordinate that was never seen would get noise without bound."
            ),
            ratio=_check.positive(ratio=self.ratio),
        )

    never_grows = False  # it sets the scale on purpose

    def _adaptive(self, state: dict[str, Any]) -> bool:
        """Whether the next step is scaled."""
        return bool(state.get("step", 0) % (self.delay + (self.used or 0)) >= self.delay)

    def scales(self, state: dict[str, Any]) -> dict[str, Tensor] | None:
        """The scales of an adaptive step; None in a plain step."""
        made = inverse_sizes(state, _SQUARE, self.eps) if self._adaptive(state) else None
        return None if made is None else {name: s.div_(self.ratio) for name, s in made.items()}

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """Plain gradients are returned, and enter the mean of their phase; adaptive ones are returned times the ratio."""
        if self._adaptive(state):
            state["step"] += 1
            return {name: g * self.ratio for name, g in grads.items()}
        step = state.get("step", 0)
        first, last = self._place(step)
        for name, g in grads.items():
            value = g.detach().to(working_dtype(g))
            total = value.clone() if first else state[_SUM + name] + value
            if last:
                mean = total / self.delay
                square = state.get(_SQUARE + name)
                state[_SQUARE + name] = mean.square() if square is None else square.lerp(mean.square(), 1 - self.beta)
            state[_SUM + name] = total
        state["step"] = step + 1
        return {name: g.clone() for name, g in grads.items()}

    def _place(self, step: int) -> tuple[bool, bool]:
        """Whether a plain step is the first, and the last, of its phase."""
        place = step % (self.delay + (self.used or 0))
        return place == 0, place == self.delay - 1

"""DiSK: a simplified Kalman filter over the steps, and the exponential average that it corrects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise.base import Denoiser, NoiseInfo, Probe, working_dtype


def _averaged(kappa: float, grads: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Tensor]:
    """m_t = (1 - κ) m_{t-1} + κ g_t, started at m_0 = g_0; the mean is kept in at least float32 and never handed out itself."""
    if kappa == 1:
        return {name: grad.clone() for name, grad in grads.items()}
    out = {}
    for name, grad in grads.items():
        key = f"mean.{name}"
        if key in state:
            state[key].lerp_(grad.to(state[key].dtype), kappa)
            out[name] = state[key].to(grad.dtype, copy=True)
        else:
            state[key] = grad.detach().to(working_dtype(grad), copy=True)
            out[name] = grad.clone()
    return out


_NO_FILTER = "Use kappa=1 for no filtering; 0.7 is common, and smaller is smoother."
_gain = partial(_check.between, 0, 1, closed="right", remedy=_NO_FILTER)
_positive = partial(_check.positive, "Kalman.one_probe(kappa) chooses the gamma that needs one pass per step.")


@dataclass(frozen=True)
class Kalman(Denoiser):
    r"""DiSK: predict the gradient from the last estimate and the curvature along the last step, correct it by the new one.

    With d_t = x_t - x_{t-1} and c = (1 - κ) / (κ γ), step t asks one query, combined per example before it is clipped,

        g_t = 1/B Σ_i clip( c ∇f_i(x_t + γ d_t) + (1 - c) ∇f_i(x_t) ) + noise,      m_t = (1 - κ) m_{t-1} + κ g_t,

    and hands m_t to the optimizer (m_0 = g_0). Without clipping and noise this is (1 - κ)(m_{t-1} + H d_t) + κ ∇F(x_t) with the
    finite difference H d_t = (∇F(x_t + γ d_t) - ∇F(x_t)) / γ: on a quadratic, m_t = ∇F(x_t) exactly. Independent noise of
    variance s² settles at s² κ / (2 - κ).

    | case | probes |
    |---|---|
    | ``kappa=1`` | one, at x_t: the identity, no closure needed |
    | first step | one, at x_t |
    | γ = (1 - κ)/κ, as :meth:`one_probe` chooses | one, at x_t + γ d_t |
    | otherwise | two |

    **Formal guarantee.** The combined per-example gradient is clipped to the same norm, so the sensitivity and the noise are
    those of plain DP-SGD; x_t, d_t and m are functions of earlier releases. The price is time: two passes per step.

    >>> state = {}
    >>> [p.coefficient for p in Kalman(0.5, 0.5).probes({"w": torch.zeros(1)}, state)]
    [1.0]
    >>> _ = Kalman(0.5, 0.5)({"w": torch.ones(1)}, NoiseInfo(std=1.0, step=0, max_grad_norm=1.0), state)
    >>> [p.coefficient for p in Kalman(0.5, 0.5).probes({"w": torch.ones(1)}, state)]
    [2.0, -1.0]

    Reference: Zhang et al., "DiSK: Differentially private optimizer with simplified Kalman filter for noise reduction",
    arXiv:2410.03883, the algorithm of its title.
    """

    papers = (
        _papers.Paper(
            "zhang2024disk",
            "Zhang, Xinwei and others",
            "{DiSK}: Differentially Private Optimizer with Simplified {Kalman} Filter for Noise Reduction",
            arxiv="2410.03883",
            kind="misc",
        ),
    )

    kappa: float = 0.7
    gamma: float = 0.5
    expected = _check.each(kappa=_gain, gamma=_positive)

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(), cls.one_probe(0.6))

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        return (cls(1.0), cls.one_probe(1.0))

    @classmethod
    def one_probe(cls, kappa: float = 0.7) -> Kalman:
        """The form with γ = (1 - κ)/κ, where c = 1 and the probe at x_t drops out: one pass per step, as in plain DP-SGD."""
        kappa = _gain(kappa=kappa)
        return cls(kappa, (1 - kappa) / kappa if kappa < 1 else 1.0)

    @property
    def needs_closure(self) -> bool:
        """The gradient is asked away from the parameters, so the passes run inside ``optimizer.step(closure)``."""
        return self.kappa < 1

    def probes(self, params: dict[str, Tensor], state: dict[str, Any]) -> list[Probe]:
        """The step's probes; a second call before ``__call__`` (a failed step that is retried) returns the same."""
        if self.kappa == 1:
            return [Probe()]
        with torch.no_grad():
            if not state.get("asked"):
                self._move(params, state)
            shift = {name: state[f"shift.{name}"].clone() for name in params if f"shift.{name}" in state}
        if not shift:
            return [Probe()]
        weight = (1 - self.kappa) / (self.kappa * self.gamma)
        if math.isclose(weight, 1.0, rel_tol=1e-12):
            return [Probe(1.0, shift)]
        return [Probe(weight, shift), Probe(1 - weight)]

    def _move(self, params: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Record γ (x_t - x_{t-1}) as this step's shift, and x_t as the next step's origin."""
        moved: dict[str, Any] = {f"last.{name}": param.detach().clone() for name, param in params.items()}
        for name, param in params.items():
            if (last := state.get(f"last.{name}")) is not None:
                moved[f"shift.{name}"] = (param.detach() - last).mul_(self.gamma)
        state.update(moved, asked=1)  # in one update: a call that is interrupted is repeated, and must not find half of it

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        state.pop("asked", None)
        for key in [key for key in state if key.startswith("shift.")]:
            del state[key]
        with torch.no_grad():
            return _averaged(self.kappa, grads, state)


@dataclass(frozen=True)
class ExponentialAverage(Denoiser):
    r"""The lecture's recursion as it was published: m_t = κ g_t + (1 - κ) m_{t-1}, m_0 = g_0.

    The lecture writes, for a quadratic loss with ∇L(w) = C w,

        κ (C w_t + z_t) + (1 - κ)(C w_{t-1} + z̃_{t-1}) = C w_t + noise,

    which lacks the term (1 - κ) C (w_t - w_{t-1}): the old estimate is one of the *old* gradient, so the average lags behind by
    that Hessian-vector product. :class:`Kalman` supplies it by a finite difference; without it this is an exponential average,
    cheap (one pass, no closure) and biased towards the past in proportion to the step length.

    **Formal guarantee.** Post-processing. Independent noise of variance s² settles at s² κ / (2 - κ).

    >>> average, state, info = ExponentialAverage(0.5), {}, NoiseInfo(std=0.0, step=0, max_grad_norm=1.0)
    >>> [average({"w": torch.tensor([g])}, info, state)["w"].item() for g in (4.0, 0.0, 0.0)]
    [4.0, 2.0, 1.0]

    Reference: the missing term is derived in Zhang et al., "DiSK", arXiv:2410.03883.
    """

    papers = (_papers.ZHANG_2024_DOPPLER,)

    kappa: float = 0.7
    expected = _check.each(kappa=_gain)

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(0.3),)

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        return (cls(1.0),)

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            return _averaged(self.kappa, grads, state)

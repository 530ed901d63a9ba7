"""DOPPLER: a linear low-pass filter over the steps, corrected for its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise.base import Denoiser, NoiseInfo, working_dtype

_HORIZON = 10_000  # steps of the response to a constant that are checked


@dataclass(frozen=True)
class LowPass(Denoiser):
    r"""A recursive low-pass filter over the steps, normalised by its own response to a constant gradient.

        m_t = -Σ_{i>=1} a_i m_{t-i} + Σ_{j>=0} b_j g_{t-j},     c_t = the same recursion fed with 1,     out_t = m_t / c_t,

    so that a constant gradient comes out unchanged from the first step on (Adam's bias correction, for any filter). ``a`` starts
    at a_1 (a_0 = 1 is implied), ``b`` at b_0. ``LowPass((), (1,))`` is the identity; the default is momentum 0.9.

    **Formal guarantee.** Post-processing, so no privacy is spent. The filter is checked to be stable (its poles lie inside the
    unit circle) and to respond positively to a constant. State: ``len(a) + len(b) - 1`` copies of the parameters.

    >>> state, info = {}, NoiseInfo(std=0.0, step=0, max_grad_norm=1.0)
    >>> [round(LowPass()({"w": torch.tensor([g])}, info, state)["w"].item(), 4) for g in (2.0, 2.0, 0.0)]
    [2.0, 2.0, 1.262]

    Reference: Zhang et al., "DOPPLER: Differentially private optimizers with low-pass filter", NeurIPS 2024.
    """

    papers = (_papers.ZHANG_2024_DOPPLER,)

    a: tuple[float, ...] = (-0.9,)
    b: tuple[float, ...] = (0.1,)

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(), cls((-0.5, -0.2), (0.2, 0.1, 0.05)))

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        return (cls((), (1.0,)),)

    def __post_init__(self) -> None:
        for name, values in (("a", self.a), ("b", self.b)):
            _check.instance((tuple, list), remedy="Write the coefficients as a tuple.", **{name: values})
            object.__setattr__(self, name, tuple(_check.number("", **{name: value}) for value in values))
        if not self.b:
            _check.fail("b", self.b, "to hold at least b_0", "LowPass((), (1,)) is the identity.")
        largest = max(np.abs(np.roots((1.0, *self.a))), default=0.0)
        if largest >= 1:
            found = f"to give a stable filter, but a pole has modulus {largest:.6g}"
            _check.fail("a", self.a, found, "Poles must be inside the unit circle.")
        if self._lowest_response() <= 1e-6:
            _check.fail("b", self.b, "to pass a constant gradient with a positive sign at every step", "b=(1 + sum(a),) does.")

    def _lowest_response(self) -> float:
        from scipy.signal import lfilter  # not at the top, so that importing the package does not load scipy.signal

        steps = np.asarray(lfilter(self.b, (1.0, *self.a), np.ones(_HORIZON)))
        return float(min(steps.min(), sum(self.b) / (1 + sum(self.a))))

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        gain = self._gain(state)
        with torch.no_grad():
            return {name: self._one(name, grad, gain, state) for name, grad in grads.items()}

    def _gain(self, state: dict[str, Any]) -> float:
        """c_t by the same recursion, on numbers: inputs were 1 since the first step and 0 before."""
        seen = int(state.get("seen", 0))
        gain = sum(b for j, b in enumerate(self.b) if j <= seen) - sum(
            a * state.get(f"gain{i}", 0.0) for i, a in enumerate(self.a, 1)
        )
        for i in range(len(self.a), 1, -1):
            state[f"gain{i}"] = state.get(f"gain{i - 1}", 0.0)
        if self.a:
            state["gain1"] = gain
        state["seen"] = seen + 1
        return float(gain)

    def _one(self, name: str, grad: Tensor, gain: float, state: dict[str, Any]) -> Tensor:
        value = grad.detach().to(working_dtype(grad))
        inputs = [state.pop(f"input{j}.{name}") for j in range(1, len(self.b)) if f"input{j}.{name}" in state]
        outputs = [state.pop(f"output{i}.{name}") for i in range(1, len(self.a) + 1) if f"output{i}.{name}" in state]
        # The oldest output is dropped after this step in any case, so its memory takes the new one.
        full = len(outputs) == len(self.a) > 0
        new = outputs[-1].mul_(-self.a[-1]).add_(value, alpha=self.b[0]) if full else value * self.b[0]
        for a, past in zip(self.a, outputs[:-1] if full else outputs, strict=False):
            new.add_(past, alpha=-a)
        for b, past in zip(self.b[1:], inputs, strict=False):
            new.add_(past, alpha=b)
        if len(self.b) > 1:
            inputs.insert(0, value.clone())
        outputs = [new, *(outputs[:-1] if full else outputs)]
        state.update({f"input{j}.{name}": past for j, past in enumerate(inputs[: len(self.b) - 1], 1)})
        state.update({f"output{i}.{name}": past for i, past in enumerate(outputs[: len(self.a)], 1)})
        return (new / gain).to(grad.dtype)

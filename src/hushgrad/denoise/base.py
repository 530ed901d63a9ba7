"""Denoisers: post-processing of privatised gradients. It costs no privacy budget."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from hushgrad._value import Value

__all__ = ["Denoiser", "NoiseInfo", "Probe"]


class Probe(NamedTuple):
    """One point at which the gradient is asked: ``coefficient`` x gradient at (parameters + ``shift``).

    A step's query is the sum over its probes, combined per example *before* clipping, so its sensitivity stays that of one
    clipped query. ``shift`` is a dict by parameter name, or None for the parameters themselves.
    """

    coefficient: float = 1.0
    shift: dict[str, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class NoiseInfo:
    """What a denoiser may know of a privatised gradient: public facts only.

    ``std`` is the true per-coordinate standard deviation of the noise in this row (correlated noise included), in the units
    of the gradient that is handed over, that is after division by the public batch size.
    """

    std: float
    step: int
    max_grad_norm: float
    learning_rate: float | None = None


class Denoiser(Value, family="denoiser"):
    """A frozen, public description of a filter; its live state is a plain dict that the caller keeps and saves."""

    def probes(self, params: dict[str, Tensor], state: dict[str, Any]) -> list[Probe]:
        """Where to ask for gradients in this step; the default is once, at the parameters."""
        return [Probe()]

    @abstractmethod
    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """The denoised gradients: fresh tensors, never an alias of ``state`` or of the input.

        ``grads`` are privatised, by parameter name. ``state`` starts empty and belongs to this denoiser alone; it holds tensors
        and numbers only (under flat string keys), so that it can be written to a checkpoint.
        """

"""Mechanisms: noise and the theorem about it in one value.

| symbol | name | meaning |
|---|---|---|
| n | steps | number of steps (rows) |
| A | workload | lower-triangular n x n; prefix sums (all ones) for plain SGD |
| C | strategy | lower-triangular n x n; its columns set the sensitivity |
| C⁻¹ | noising matrix | row t of C⁻¹ Z is what is added to the t-th clipped sum |
| B = A C⁻¹ | | its rows set the error |
| Z | | n x d independent standard Gaussians from the :class:`Source` |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hushgrad._value import Value
from hushgrad.events import Event, Participation

__all__ = ["Mechanism", "MechanismError", "NoiseStream"]


@dataclass(frozen=True, kw_only=True)
class MechanismError:
    """How far the workload's outputs are off, at noise calibrated to the sensitivity (noise std = sens(C), clip norm 1).

    ``rmse`` = sens ||B||_F / sqrt(n), ``max`` = sens max_t ||B_t||; ``lower_bound`` is a certified bound below which no matrix
    mechanism's rmse can fall, so ``rmse / lower_bound - 1`` is how far from the best possible this one is at most.
    """

    rmse: float
    max: float
    lower_bound: float


class NoiseStream(ABC):
    """A live sequence of noise rows, C⁻¹ Z at unit scale, for all tensors of a model. Rows are asked in order."""

    @abstractmethod
    def row(self, step: int, index: int, like: Tensor, *, offset: int = 0) -> Tensor:
        """Row ``step`` of C⁻¹ Z for tensor number ``index``: a fresh tensor in the shape, dtype and device of ``like``.

        ``offset`` is the position of ``like``'s first element in the full flattened tensor, so that a shard can be drawn where
        it lives. Asking beyond the last row, or out of order, raises: noise is never repeated.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed stream needs beside the key and the step (empty if everything is regenerated)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit where ``state_dict`` was taken."""


class Mechanism(Value, family="mechanism"):
    """A frozen, public description of (correlated) Gaussian noise over the steps of a run, with its theorem."""

    @abstractmethod
    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """The live noise: rows of C⁻¹ Z at unit scale, Z from ``source``."""

    @abstractmethod
    def sensitivity(self, *, steps: int, participation: Participation) -> float:
        """The largest ||C x|| that one record of contribution norm 1 can cause: exact or a proved upper bound, else NoTheorem."""

    @abstractmethod
    def event(self, noise_multiplier: float, participation: Participation, steps: int) -> Event:
        """The theorem: what ``steps`` steps cost with noise of std ``noise_multiplier`` x C⁻¹ Z. Raises NoTheorem elsewhere."""

    @abstractmethod
    def error(self, *, steps: int, participation: Participation, workload: np.ndarray | None = None) -> MechanismError:
        """Predicted error of the workload (prefix sums by default) and its certified lower bound."""

    @abstractmethod
    def state_size(self, *, steps: int) -> int:
        """How many numbers per model parameter the stream keeps between steps."""

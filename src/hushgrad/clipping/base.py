"""Clippers: how much of each example's gradient is kept."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor

from hushgrad._value import Value
from hushgrad.events import Relation

__all__ = ["ClippedSum", "Clipper"]


class ClippedSum(NamedTuple):
    """The sum of the clipped per-example gradients, before any noise: sensitive, as the prefix ``raw_`` says."""

    raw_sums: dict[str, Tensor]  # by parameter name, fresh tensors in the parameter's shape
    raw_norms: Tensor  # (B,) norms of the examples' whole gradients before clipping
    raw_weights: Tensor  # (B,) or (B, groups): what each example's gradient was multiplied by
    rejected: int  # examples with a NaN or infinite gradient: weight 0


class Clipper(Value, family="clipper"):
    """A frozen, public rule that turns per-example squared norms into weights."""

    @abstractmethod
    def weights(self, sq_norms: Tensor) -> Tensor:
        """The factor for each example's gradient, from its squared norm. NaN and infinite norms get weight 0."""

    @abstractmethod
    def sensitivity(self, relation: Relation) -> float:
        """How far the L2 norm can move between the clipped sums of neighbours: C, or 2 C for replace-one."""

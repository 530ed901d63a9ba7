"""Projections: keep the parameters in a convex set W after every step (the Proj_W of projected DP-GD). Post-processing."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushgrad import _check, _papers
from hushgrad._value import Value

if TYPE_CHECKING:
    from torch import Tensor


class Projection(Value, family="projection"):
    """A frozen, public convex set and the Euclidean projection onto it, over all trainable parameters together.

    >>> import torch
    >>> from hushgrad.train import Ball
    >>> w = torch.tensor([3.0, 4.0])
    >>> Ball(1.0).project_([w])
    >>> w
    tensor([0.6000, 0.8000])
    """

    @property
    def needs_all_tensors(self) -> bool:
        """Whether a coordinate of the projection depends on others, so that all of a model must be at hand."""
        return True

    @abstractmethod
    def project_(self, params: Iterable[Tensor]) -> None:
        """Move the parameters, in place, to the nearest point of the set."""


@dataclass(frozen=True)
class Ball(Projection):
    r"""{w : ||w||_2 <= ``radius``}, the norm taken over all trainable parameters: w <- w min(1, radius/||w||).

    >>> import torch
    >>> w = torch.tensor([3.0, 4.0])
    >>> Ball(1.0).project_([w]); w
    tensor([0.6000, 0.8000])
    """

    papers = (_papers.BASSILY_2014_PRIVATE,)

    radius: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", _check.positive(radius=self.radius))

    def project_(self, params: Iterable[Tensor]) -> None:
        """Scale everything by one factor."""
        from hushgrad._precision import widest

        parts = [p.detach() for p in params]  # the same memory, outside of any graph
        norm = math.sqrt(sum(float(widest(p).square().sum()) for p in parts))
        if norm > self.radius:
            for p in parts:
                p.mul_(self.radius / norm)


@dataclass(frozen=True)
class Box(Projection):
    r"""{w : ``low`` <= w_j <= ``high`` for every j}.

    >>> import torch
    >>> w = torch.tensor([-3.0, 0.5])
    >>> Box(-1.0, 1.0).project_([w]); w
    tensor([-1.0000,  0.5000])
    """

    papers = (_papers.BASSILY_2014_PRIVATE,)

    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = _check.number(low=self.low), _check.number(high=self.high)
        if low >= high:
            _check.fail("high", high, f"to be greater than low={low}")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    @property
    def needs_all_tensors(self) -> bool:
        """No: every coordinate is clamped by itself."""
        return False

    def project_(self, params: Iterable[Tensor]) -> None:
        """Clamp every coordinate."""
        for p in params:
            p.detach().clamp_(self.low, self.high)

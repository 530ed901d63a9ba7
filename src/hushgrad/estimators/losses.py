r"""Convex losses of linear predictors, with the three facts that their privacy analysis needs.

A loss sees the predictions z = Θ x of one example (one number, or one per class). Its gradient in Θ is s xᵀ with s the slope, and

* ``vertices``: s lies in the convex hull of finitely many points; each non-zero one is given by its norm and its multiplicity;
* ``log_det(r)``: the largest value of log det(I + r ∇²ℓ(z)), with r = ‖x‖²/λ;
* all slopes of one example have norm at most ``lipschitz``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, log_softmax

from hushgrad import _check


class LinearLoss(ABC):
    """A convex, differentiable loss of linear predictions with slopes in a polytope."""

    outputs: int = 1
    # True if the only non-zero vertex has norm 1 and a slope of size s comes with the curvature s (1 - s).
    curvature_vanishes_at_vertex: bool = False

    @abstractmethod
    def value(self, z: np.ndarray, y: np.ndarray) -> float:
        """The sum of the losses; ``z`` is (n, outputs)."""

    @abstractmethod
    def slopes(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """(n, outputs): each example's derivative with respect to its predictions."""

    @abstractmethod
    def bend(self, z: np.ndarray, y: np.ndarray, dz: np.ndarray) -> np.ndarray:
        """(n, outputs): each example's second derivative applied to a direction ``dz`` of its predictions."""

    @abstractmethod
    def vertices(self) -> tuple[tuple[float, int], ...]:
        """((norm, multiplicity), ...) of the non-zero vertices of the polytope of slopes of any one example."""

    @abstractmethod
    def log_det(self, r: float) -> float:
        """The largest log det(I + r ∇²ℓ(z)) over all predictions z."""

    @abstractmethod
    def largest_ratio(self, log_det: float) -> float:
        """The largest r with ``log_det(r)`` at most the given value (the inverse function)."""

    def curvature_share(self, epsilon: float) -> float:
        """The share of ``epsilon`` that the curvature term J may take when l2 is chosen for the user: a flat optimum."""
        return 0.1

    @property
    def lipschitz(self) -> float:
        """The largest norm of a slope."""
        return max(norm for norm, _ in self.vertices())


class _ScalarLoss(LinearLoss):
    """A loss of one prediction: log det(I + r ℓ'') = log(1 + r curvature)."""

    curvature: float

    @abstractmethod
    def curvatures(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """(n,): each example's second derivative."""

    def bend(self, z, y, dz):
        return self.curvatures(z, y)[:, None] * dz

    def log_det(self, r: float) -> float:
        return math.log1p(r * self.curvature)

    def largest_ratio(self, log_det: float) -> float:
        return math.expm1(log_det) / self.curvature


@dataclass(frozen=True)
class Logistic(_ScalarLoss):
    """ℓ(z) = log(1 + e^{-yz}), y = ±1. The slope is -y times a number in (0, 1), so 0 and -y are the vertices."""

    curvature: float = 0.25
    curvature_vanishes_at_vertex = True

    def value(self, z, y):
        return float(np.logaddexp(0.0, -y * z[:, 0]).sum())

    def slopes(self, z, y):
        return (-y * expit(-y * z[:, 0]))[:, None]

    def curvatures(self, z, y):
        p = expit(z[:, 0])
        return p * (1 - p)

    def vertices(self):
        return ((1.0, 1),)


@dataclass(frozen=True)
class HuberHinge(_ScalarLoss):
    """The hinge loss max(0, 1 - yz), its corner rounded to a parabola of half-width ``width`` (Chapelle 2007)."""

    width: float = 0.5

    def curvature_share(self, epsilon: float) -> float:
        """More where epsilon is large: a smaller l2 then helps more than a little less noise (docs/estimators.md)."""
        return min(max(0.3 * epsilon, 0.1), 0.3)

    @property
    def curvature(self) -> float:  # type: ignore[override]
        """The largest second derivative, 1 / (2 width)."""
        return 0.5 / self.width

    def value(self, z, y):
        slack = 1 - y * z[:, 0]
        inside = np.abs(slack) <= self.width
        return float(np.where(inside, (slack + self.width) ** 2 / (4 * self.width), np.maximum(slack, 0.0)).sum())

    def slopes(self, z, y):
        slack = 1 - y * z[:, 0]
        return (-y * np.clip((slack + self.width) / (2 * self.width), 0.0, 1.0))[:, None]

    def curvatures(self, z, y):
        return (np.abs(1 - y * z[:, 0]) <= self.width) * self.curvature

    def vertices(self):
        return ((1.0, 1),)


@dataclass(frozen=True)
class HuberResidual(_ScalarLoss):
    """Half the squared residual, linear beyond ``width``: the slope lies between -width and width (two vertices)."""

    width: float
    curvature: float = 1.0

    def __post_init__(self) -> None:
        _check.positive(width=self.width)

    def value(self, z, y):
        r = np.abs(z[:, 0] - y)
        return float(np.where(r <= self.width, 0.5 * r**2, self.width * (r - 0.5 * self.width)).sum())

    def slopes(self, z, y):
        return np.clip(z[:, 0] - y, -self.width, self.width)[:, None]

    def curvatures(self, z, y):
        return (np.abs(z[:, 0] - y) <= self.width).astype(float)

    def vertices(self):
        return ((self.width, 2),)


@dataclass(frozen=True)
class Softmax(LinearLoss):
    """Cross-entropy over ``outputs`` classes, y the class number.

    The slope is p - e_y = Σ_k p_k (e_k - e_y), so the vertices are e_k - e_y.
    """

    outputs: int

    def value(self, z, y):
        return float(-log_softmax(z, axis=1)[np.arange(len(y)), y].sum())

    def slopes(self, z, y):
        p = np.exp(log_softmax(z, axis=1))
        p[np.arange(len(y)), y] -= 1.0
        return p

    def bend(self, z, y, dz):
        p = np.exp(log_softmax(z, axis=1))
        return p * (dz - (p * dz).sum(axis=1, keepdims=True))

    def vertices(self):
        return ((math.sqrt(2.0), self.outputs - 1),)

    def log_det(self, r: float) -> float:
        """(K-1) log(1 + r/K).

        The Hessian diag(p) - ppᵀ has K - 1 eigenvalues that are not identically zero and trace 1 - ‖p‖² <= 1 - 1/K; log det is
        concave in the eigenvalues, so it is largest where they are all equal to 1/K, at p uniform.
        """
        return (self.outputs - 1) * math.log1p(r / self.outputs)

    def largest_ratio(self, log_det: float) -> float:
        return self.outputs * math.expm1(log_det / (self.outputs - 1))

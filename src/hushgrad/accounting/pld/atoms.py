"""Discrete pairs: randomised response, pure and approximate DP, discrete Laplace and Gaussian noise."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hushgrad.accounting.pld.curve import Array, Curve

__all__ = ["Atoms", "DiscreteGaussianCurve", "DiscreteLaplaceCurve", "Response"]


class Atoms(Curve):
    """A pair whose loss takes finitely many values; profiles by sums of positive terms from both ends."""

    lattice = math.nan
    smooth = False
    discrete = True

    @abstractmethod
    def atoms(self) -> tuple[Array, Array]:
        """``(losses, masses under P)``, losses increasing and finite; together with ``infinite`` the masses sum to one."""

    @cached_property
    def _table(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """Losses; call, its slope mass and survival at each; put and its slope mass at each."""
        losses, p = self.atoms()
        gaps = np.diff(losses)
        right = _discounted(p, gaps)  # sum_{k >= j} p_k e^{l_j - l_k}
        call = np.append(np.cumsum((-np.expm1(-gaps) * right[1:])[::-1])[::-1], 0.0) + self.infinite
        left = _compounded(p, gaps)  # sum_{k <= j} p_k e^{l_j - l_k}
        put = np.append(0.0, np.cumsum(np.expm1(gaps) * left[:-1]))
        return losses, call, right, put, left, p

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """Between two atoms call = call(next) + (1 - e^{eps - next}) times the discounted mass from the next one on."""
        losses, call, right, _, _, _ = self._table
        j = np.searchsorted(losses, epsilon, side="right")
        last = j == len(losses)
        j = np.minimum(j, len(losses) - 1)
        gap = np.minimum(epsilon - losses[j], 0.0)
        return (
            np.where(last, self.infinite, call[j] - np.expm1(gap) * right[j]),
            np.where(last, 0.0, np.exp(gap) * right[j]),
        )

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """The same from the left end."""
        losses, _, _, put, left, _ = self._table
        j = np.searchsorted(losses, epsilon, side="right") - 1
        none = j < 0
        j = np.maximum(j, 0)
        gap = np.maximum(epsilon - losses[j], 0.0)
        base = self.impossible * np.exp(epsilon)
        return (
            base + np.where(none, 0.0, put[j] + np.expm1(gap) * left[j]),
            base + np.where(none, 0.0, np.exp(gap) * left[j]),
        )

    @property
    def support(self) -> tuple[float, float]:
        """The outermost atoms."""
        losses = self._table[0]
        return float(losses[0]), float(losses[-1])


def _discounted(p: Array, gaps: Array) -> Array:
    """sum_{k >= j} p_k e^{l_j - l_k}."""
    total, out = 0.0, np.empty_like(p)
    factors = np.append(np.exp(-gaps), 0.0)
    for j in range(len(p) - 1, -1, -1):
        total = p[j] + factors[j] * total
        out[j] = total
    return out


def _compounded(p: Array, gaps: Array) -> Array:
    """sum_{k <= j} p_k e^{l_j - l_k}."""
    total, out = 0.0, np.empty_like(p)
    factors = np.append(0.0, np.exp(gaps))
    for j in range(len(p)):
        total = p[j] + factors[j] * total
        out[j] = total
    return out


@dataclass(frozen=True)
class Response(Atoms):
    r"""Losses epsilon, 0 and -epsilon with masses proportional to e^epsilon, ``neutral`` and 1; infinite with mass ``failure``.

    ``neutral = 0`` is the pair that dominates every (epsilon, delta)-DP mechanism and is attained by one (Kairouz, Oh and
    Viswanath 2015, theorem 3.2); ``neutral = k - 2`` is randomised response with k categories.
    """

    epsilon: float
    failure: float = 0.0
    neutral: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lattice", self.epsilon if self.neutral else 2 * self.epsilon)
        object.__setattr__(self, "infinite", self.failure)
        object.__setattr__(self, "impossible", self.failure)

    def atoms(self) -> tuple[Array, Array]:
        """See :class:`Atoms`."""
        e = self.epsilon
        weights = np.array([math.exp(-e), self.neutral * math.exp(-e), 1.0])
        present = weights > 0
        return np.array([-e, 0.0, e])[present], ((1 - self.failure) * weights / weights.sum())[present]


@dataclass(frozen=True)
class DiscreteLaplaceCurve(Atoms):
    """Masses proportional to e^{-|k|/scale} against the same moved by ``distance``: losses (|k| - |k - distance|) / scale."""

    scale: float
    distance: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "lattice", 2 / self.scale)

    def atoms(self) -> tuple[Array, Array]:
        """See :class:`Atoms`; the two ends hold the geometric tails."""
        d, a = self.distance, math.exp(-1 / self.scale)
        k = np.arange(0, d + 1)
        # under P = noise around 0, the loss at output k is (|k - d| - |k|) / scale: from d at k <= 0 to -d at k >= d
        p = (1 - a) / (1 + a) * a**k
        p[0], p[-1] = 1 / (1 + a), a**d / (1 + a)
        return np.asarray((2.0 * np.arange(d + 1) - d) / self.scale, dtype=np.float64), np.asarray(p[::-1], dtype=np.float64)


@dataclass(frozen=True)
class DiscreteGaussianCurve(Atoms):
    """Masses proportional to e^{-k^2 / 2 sigma^2} against the same moved by ``distance``: losses (d^2 - 2 k d) / 2 sigma^2."""

    sigma: float
    distance: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "lattice", self.distance / self.sigma**2)

    def atoms(self) -> tuple[Array, Array]:
        """See :class:`Atoms`; beyond 38 sigma there is less mass than the smallest double."""
        reach = math.ceil(38 * self.sigma) + self.distance
        k = np.arange(-reach, reach + 1)
        weights = np.exp(-0.5 * (k / self.sigma) ** 2)
        losses = (self.distance**2 - 2.0 * k * self.distance) / (2 * self.sigma**2)
        return losses[::-1].copy(), (weights / weights.sum())[::-1].copy()

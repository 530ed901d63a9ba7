"""Discrete pairs: randomised response, pure and approximate DP, discrete Laplace and Gaussian noise."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hushgrad.accounting.pld.profiles.curve import UNSEEN, Array, Curve
from hushgrad.accounting.pld.profiles.stable_sums import discounted, masses_of_q

_LEAST = 1e-300  # of a mass: smaller doubles lose digits
_FARTHEST = 37  # standard deviations of a discrete Gaussian: beyond them there is less than that
DEEPEST = 690  # scales of a discrete Laplace distribution: the same


@dataclass(frozen=True)
class _Table:
    """Partial sums at the atoms: from the largest loss down to zero, and from the smallest one up to zero."""

    ends: tuple[float, float]
    above: Array  # losses greater than 0, then infinity
    call: Array
    discounted: Array  # sum_{k >= j} p_k e^{l_j - l_k}
    below: Array  # an entry for "none", then the losses up to 0
    put: Array
    compounded: Array  # sum_{k <= j} p_k e^{l_j - l_k}


class Atoms(Curve):
    """A pair whose loss takes finitely many values; profiles by sums of positive terms from both ends."""

    lattice = math.nan
    smooth = False
    discrete = True

    @abstractmethod
    def atoms(self) -> tuple[Array, Array]:
        """``(losses, masses under P)``, losses increasing and finite; together with ``infinite`` the masses sum to one."""

    def losses(self) -> tuple[Array, Array]:
        """All atoms; the same, unless there are so many that no grid should be laid through them."""
        return self.atoms()

    @cached_property
    def _table(self) -> _Table:
        losses, p = self.losses()
        up = losses > 0
        above, below = losses[up], losses[~up]
        tail = discounted(p[up], above)
        call = np.cumsum((-np.expm1(-np.diff(above)) * tail[1:])[::-1])[::-1]
        share = np.cumsum(masses_of_q(below, p[~up]))
        size = np.exp(below)
        put = np.cumsum(-np.expm1(-np.diff(below)) * size[1:] * share[:-1])
        return _Table(
            (float(losses[0]), float(losses[-1])),
            np.append(above, math.inf),
            self.infinite + np.concatenate([call, np.zeros(min(len(above), 1) + 1)]),
            np.append(tail, 0.0),
            np.append(0.0, below),
            np.concatenate([np.zeros(min(len(below), 1) + 1), put]),
            np.append(0.0, size * share),
        )

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """Between two atoms call = call(next) + (1 - e^{eps - next}) times the discounted mass from the next one on."""
        table = self._table
        j = np.searchsorted(table.above, epsilon, side="right")
        gap = epsilon - table.above[j]
        return table.call[j] - np.expm1(gap) * table.discounted[j], np.exp(gap) * table.discounted[j]

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """Between two atoms put = put(before) + (e^{eps - before} - 1) times the compounded mass up to the one before."""
        table = self._table
        j = np.searchsorted(table.below[1:], epsilon, side="right")
        gap = np.where(j == 0, 0.0, epsilon - table.below[j])
        base = self.impossible * np.exp(epsilon)
        return (base + table.put[j] + np.expm1(gap) * table.compounded[j], base + np.exp(gap) * table.compounded[j])

    @property
    def support(self) -> tuple[float, float]:
        return self._table.ends


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
        impossible = self.failure if math.exp(-self.epsilon) >= _LEAST else 1.0
        self._note(lattice=self.epsilon if self.neutral else 2 * self.epsilon, infinite=self.failure, impossible=impossible)

    def atoms(self) -> tuple[Array, Array]:
        e = self.epsilon
        weights = np.array([math.exp(-e), self.neutral * math.exp(-e), 1.0])
        present = weights >= _LEAST
        return np.array([-e, 0.0, e])[present], ((1 - self.failure) * weights / weights.sum())[present]


@dataclass(frozen=True)
class DiscreteLaplaceCurve(Atoms):
    """Masses proportional to e^{-|k|/scale} against the same moved by ``distance``: losses (|k| - |k - distance|) / scale."""

    scale: float
    distance: int

    def __post_init__(self) -> None:
        rest = self.distance - self._reach()
        impossible = 1 - math.exp(-rest / self.scale) / (1 + self._ratio) if rest else 0.0
        self._note(lattice=2 / self.scale, impossible=impossible)

    def atoms(self) -> tuple[Array, Array]:
        """The two ends hold the geometric tails."""
        # under P = noise around 0, the loss at output k is (|k - d| - |k|) / scale: from d at k <= 0 to -d at k >= d
        d, k = self.distance, np.arange(self._reach(), -1.0, -1.0)
        p = -math.expm1(-1 / self.scale) / (1 + self._ratio) * np.exp(-k / self.scale)
        p[-1] = 1 / (1 + self._ratio)
        if len(p) > d:
            p[0] = math.exp(-d / self.scale) / (1 + self._ratio)
        return np.asarray((d - 2 * k) / self.scale, dtype=np.float64), np.asarray(p, dtype=np.float64)

    @property
    def _ratio(self) -> float:
        return math.exp(-1 / self.scale)

    def _reach(self) -> int:
        """The last output that counts: further away P has next to no mass."""
        return min(self.distance, math.floor(DEEPEST * self.scale))


@dataclass(frozen=True)
class DiscreteGaussianCurve(Atoms):
    """Masses proportional to e^{-k^2 / 2 sigma^2} against the same moved by ``distance``: losses (d^2 - 2 k d) / 2 sigma^2."""

    sigma: float
    distance: int
    endless = True

    def __post_init__(self) -> None:
        void = float(np.sum(self.masses()[-self.distance :]))  # of Q, at the outputs where P has next to no mass
        self._note(lattice=self.distance / self.sigma**2, impossible=void if void > UNSEEN else 0.0)

    def atoms(self) -> tuple[Array, Array]:
        p = self.masses()
        k = np.arange(len(p)) - len(p) // 2
        return np.asarray(self.distance / self.sigma**2 * (0.5 * self.distance + k), dtype=np.float64), p

    def masses(self) -> Array:
        """P's masses, symmetric around 0."""
        reach = math.floor(_FARTHEST * self.sigma)
        weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / self.sigma) ** 2)
        return np.asarray(weights / weights.sum())

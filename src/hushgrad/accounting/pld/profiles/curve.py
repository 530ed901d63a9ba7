r"""Privacy profiles as curves: what an accountant needs to know about one pair (P, Q) of output distributions.

Notation of this package (L = ln dP/dQ is the privacy loss under P, x = e^epsilon):

| name | meaning |
|---|---|
| ``call(epsilon)`` | delta(epsilon) = E_P[(1 - e^{epsilon - L})_+] |
| ``put(epsilon)`` | E_P[(e^{epsilon - L} - 1)_+] = call(epsilon) - 1 + e^epsilon |
| ``above(epsilon)`` | e^epsilon Q[L > epsilon] = -x d call / dx |
| ``below(epsilon)`` | e^epsilon Q[L <= epsilon] = x d put / dx |

Both ``call`` and ``put`` are convex in x. They carry the same information, but ``call`` is small to the right of zero and
``put`` to the left. A curve therefore offers ``right`` (call and above, for epsilon >= 0) and ``left`` (put and below, for
epsilon <= 0), each with full *relative* accuracy; nothing in this package subtracts two numbers near one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr

from hushgrad.accounting.pld.profiles.stable_sums import masses_of_q

Array = NDArray[np.float64]

# Every curve is evaluated with a relative error below this (tests compare with 50 digits); the bounds pay for it.
ACCURACY = 2.0**-30
UNSEEN = 1e-290


class Curve(ABC):
    """The privacy profile of one ordered pair (P, Q)."""

    # Atoms are multiples of this apart (0: there are none, NaN: no such number); there are no other losses if discrete.
    lattice: float = 0.0
    discrete: bool = False
    # P[L = infinity]: exact, kept apart from the finite losses.
    infinite: float = 0.0
    # Q[L = -infinity], where P has no mass.
    impossible: float = 0.0
    # Whether there are more losses than those in a table, with less mass than UNSEEN.
    endless: bool = False
    # Whether the finite losses have a density that is smooth on the scale of its own spread.
    smooth: bool = True

    @abstractmethod
    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """``(call, above)`` for epsilon >= 0, vectorised; relative error below ``ACCURACY``."""

    @abstractmethod
    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """``(put, below)`` for epsilon <= 0, vectorised; relative error below ``ACCURACY``."""

    def _note(self, **facts: float) -> None:
        """Set some of the facts above, in ``__post_init__``."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def atoms(self) -> tuple[Array, Array]:
        """``(losses, masses under P)`` of the atoms, losses increasing and finite. Grids are chosen by them."""
        return np.zeros(0), np.zeros(0)

    def accuracy(self, step: float) -> float:
        """A bound on the relative error of ``right`` and ``left`` at the points of a grid of this step."""
        return ACCURACY

    @property
    def support(self) -> tuple[float, float]:
        """An interval that holds all finite losses; infinite ends are found by ``reach``."""
        return -math.inf, math.inf

    def delta(self, epsilon: float) -> float:
        """The profile at one epsilon."""
        at = np.array([epsilon], dtype=float)
        return float(self.right(at)[0][0]) if epsilon >= 0 else float(self.left(at)[0][0]) - math.expm1(epsilon)

    def likely(self, delta: float) -> float:
        """Where a search for the epsilon at which the profile is ``delta`` starts."""
        return 1.0

    def reach(self, tail: float) -> tuple[float, float]:
        """Losses (low, high) with put(low) and call(high) - infinite at most ``tail``; found by bisection."""
        return _reach(self, tail)


@lru_cache(maxsize=8192)
def _reach(curve: Curve, tail: float) -> tuple[float, float]:
    low, high = curve.support
    high = min(high, _first_below(lambda e: curve.right(e)[0] - curve.infinite, tail))
    low = max(low, -_first_below(lambda e: curve.left(-e)[0] - curve.impossible * np.exp(-e), tail))
    return low, high


_RAMP = np.linspace(0.0, 1.0, 17)


def _first_below(tail_of: Callable[[Array], Array], tail: float) -> float:
    """A positive number, within 2 % of the smallest, at which a decreasing function is at most ``tail``."""
    low, high = 2.0**-46, 2.0**40
    for _ in range(4):
        points = low * (high / low) ** _RAMP
        below = np.flatnonzero(tail_of(points) <= tail)
        if not len(below):
            return high
        low, high = float(points[max(below[0] - 1, 0)]), float(points[below[0]])
    return high


class OwnMirror(Curve):
    """The profile of a pair that is its own mirror image: e^eps Q[L <= eps] = e^eps P[L >= -eps], where P[L > -eps] = call + above."""

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        call, above = self.right(-epsilon)
        scale = np.exp(epsilon)
        return scale * call, scale * (call + above)


@dataclass(frozen=True)
class Mirror(Curve):
    """The same pair in the other direction, (Q, P): call and put change places, L changes its sign."""

    of: Curve

    def __post_init__(self) -> None:
        of = self.of
        self._note(lattice=of.lattice, discrete=of.discrete, smooth=of.smooth, endless=of.endless)
        self._note(infinite=of.impossible, impossible=of.infinite)

    def atoms(self) -> tuple[Array, Array]:
        """Q's mass is e^{-L} times P's."""
        losses, p = self.of.atoms()
        return -losses[::-1], masses_of_q(losses, p)[::-1]

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """P[L <= -eps] = below - put."""
        put, below = self.of.left(-epsilon)
        scale = np.exp(np.minimum(epsilon, 700.0))
        return scale * put, scale * np.maximum(below - put, 0.0)

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """P[L > -eps] = call + above."""
        call, above = self.of.right(-epsilon)
        scale = np.exp(epsilon)
        return scale * call, scale * (call + above)

    @property
    def support(self) -> tuple[float, float]:
        low, high = self.of.support
        return -high, -low


@dataclass(frozen=True)
class Mixture(Curve):
    """One of several mechanisms, chosen at random in public: profiles add up with their probabilities."""

    curves: tuple[Curve, ...]
    weights: tuple[float, ...]
    lattice = math.nan
    smooth = False

    def __post_init__(self) -> None:
        self._note(infinite=sum(w * c.infinite for c, w in zip(self.curves, self.weights, strict=True)))
        self._note(impossible=sum(w * c.impossible for c, w in zip(self.curves, self.weights, strict=True)))

    def atoms(self) -> tuple[Array, Array]:
        atoms = [curve.atoms() for curve in self.curves]
        losses = np.concatenate([losses for losses, _ in atoms])
        masses = np.concatenate([w * p for (_, p), w in zip(atoms, self.weights, strict=True)])
        order = np.argsort(losses)
        return losses[order], masses[order]

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return self._sum([curve.right(epsilon) for curve in self.curves])

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        return self._sum([curve.left(epsilon) for curve in self.curves])

    def _sum(self, sides: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        first, second = (sum(w * side[k] for w, side in zip(self.weights, sides, strict=True)) for k in (0, 1))
        return np.asarray(first), np.asarray(second)

    @property
    def support(self) -> tuple[float, float]:
        return min(c.support[0] for c in self.curves), max(c.support[1] for c in self.curves)


@dataclass(frozen=True)
class GaussianCurve(OwnMirror):
    r"""N(mu, 1) against N(0, 1): delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Balle and Wang 2018, theorem 8. The pair is its own mirror image, so ``put(eps) = e^eps call(-eps)``.
    """

    mu: float

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return gaussian_tails(epsilon, self.mu)


# Gauss-Legendre nodes on [0, 1]: with 4 nodes and mu <= 0.1 the error is below 1e-16.
_NODES = 0.5 + 0.5 * np.polynomial.legendre.leggauss(4)[0]
_WEIGHTS = 0.5 * np.polynomial.legendre.leggauss(4)[1]
_ROOT2 = math.sqrt(2.0)
_SMALL_MU = 0.1
_FARTHEST = 1e150  # standard deviations: the square is still a number


def gaussian_tails(epsilon: Array, mu: float) -> tuple[Array, Array]:
    """``(call, above)``. With Mills' ratio R, e^eps phi(b) = phi(a) turns both into phi(a) times differences of R."""
    with np.errstate(over="ignore"):
        a = mu / 2 - np.minimum(epsilon / mu, _FARTHEST)
    b = a - mu
    density = np.exp(-0.5 * a * a)
    above = 0.5 * density * erfcx(np.maximum(-b, 0.0) / _ROOT2)
    if (b > 0).any():  # never for epsilon >= 0
        above = np.where(b > 0, np.exp(np.minimum(epsilon, 0.0)) * ndtr(b), above)
    if mu >= _SMALL_MU:
        return np.maximum(ndtr(a) - above, 0.0), above
    return gaussian_step(-a, mu, np.zeros_like(a)), above


def gaussian_step(y: Array, mu: float, shift: Array) -> Array:
    r"""e^shift phi(y) [R(y) - R(y + mu)] = e^shift phi(y) \int_0^mu (1 - s R(s)) ds over s from y to y + mu: no cancellation."""
    total = np.zeros_like(y)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        at = node * mu + y
        total += weight * (1.0 - at * (math.sqrt(math.pi / 2) * erfcx(at / _ROOT2)))
    step: Array = np.exp(shift - 0.5 * y * y) * np.maximum(total, 0.0) * (mu / math.sqrt(2 * math.pi))
    return step

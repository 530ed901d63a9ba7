"""The loss object of the PLD accountant: what was composed, and answers from both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hushgrad import _check
from hushgrad.accounting.pld.curve import ACCURACY, Curve, GaussianCurve
from hushgrad.accounting.pld.solve import Answer, delta_bound, epsilon_bound

__all__ = ["Pair", "PrivacyLoss"]

WIDTH = 1e-4


@dataclass(frozen=True)
class Pair:
    """What is known about one event: curves that dominate it, one per direction, and curves that it attains.

    ``above[k]`` bounds direction k from above and ``below[k]`` from below; where the analysis is tight they are the same. Curves of
    one direction compose with curves of the same direction only, and the worst direction is taken at the very end. A single
    curve stands for a relation that is symmetric: it serves for both directions.
    """

    above: tuple[Curve, ...]
    below: tuple[Curve, ...]

    @classmethod
    def tight(cls, *directions: Curve) -> Pair:
        """A pair whose dominating curves are attained."""
        return cls(directions, directions)


@dataclass(frozen=True)
class PrivacyLoss:
    """A composition of pairs, kept as a list: the numerical work is chosen for each question."""

    parts: tuple[tuple[Pair, int], ...]

    def __add__(self, other: PrivacyLoss) -> PrivacyLoss:
        if not isinstance(other, PrivacyLoss):
            return NotImplemented
        return PrivacyLoss(_merged((*self.parts, *other.parts)))

    def __mul__(self, times: int) -> PrivacyLoss:
        times = _check.integer(0, times=times)
        return PrivacyLoss(tuple((pair, n * times) for pair, n in self.parts) if times else ())

    def epsilon(self, delta: float, *, width: float = WIDTH) -> float:
        """A certified upper bound on epsilon, too large by a fraction of about ``width`` at most."""
        return max(self._epsilons(_check.delta(delta=delta), width, upper=True), default=0.0)

    def delta(self, epsilon: float) -> float:
        """A certified upper bound on delta."""
        return self.delta_interval(epsilon, lower=False)[1]

    def epsilon_interval(self, delta: float, width: float = WIDTH) -> tuple[float, float]:
        """Certified bounds (lower, upper) on epsilon, ``width`` apart relative to epsilon if that can be had."""
        delta, width = _check.delta(delta=delta), _check.positive(width=width)
        upper = max(self._epsilons(delta, 0.62 * width, upper=True), default=0.0)
        if math.isinf(upper):
            return 0.0, upper
        lower = max(self._epsilons(delta, 0.35 * width, upper=False), default=0.0)
        return min(lower, upper), upper

    def delta_interval(self, epsilon: float, *, lower: bool = True) -> tuple[float, float]:
        """Certified bounds (lower, upper) on delta."""
        epsilon = _check.non_negative(epsilon=epsilon)
        uppers = [delta_bound(parts, epsilon, upper=True) for parts in self._directions(upper=True)]
        lowers = [delta_bound(parts, epsilon, upper=False) for parts in self._directions(upper=False)] if lower else []
        high = max(uppers, default=0.0)
        return min(max(lowers, default=0.0), high), high

    def _epsilons(self, delta: float, width: float, *, upper: bool) -> list[float]:
        """Bounds for each direction; a direction that the first answer already covers is computed as coarsely as that allows."""
        found: list[Answer] = []
        for parts in self._directions(upper=upper):
            found.append(epsilon_bound(parts, delta, width, upper=upper, known=max((a.epsilon for a in found), default=0.0)))
        return [answer.epsilon for answer in found]

    def _directions(self, *, upper: bool) -> list[list[tuple[Curve, int]]]:
        """The curves of each direction, equal ones counted together and Gaussians added up exactly."""
        sides = [(pair.above if upper else pair.below, n) for pair, n in self.parts]
        count = max((len(curves) for curves, _ in sides), default=0)
        return [_simplified((curves[min(k, len(curves) - 1)], n) for curves, n in sides) for k in range(count)]


def _merged(parts: Iterable[tuple[Pair, int]]) -> tuple[tuple[Pair, int], ...]:
    counts: dict[Pair, int] = {}
    for pair, n in parts:
        counts[pair] = counts.get(pair, 0) + n
    return tuple(counts.items())


def _simplified(parts: Iterable[tuple[Curve, int]]) -> list[tuple[Curve, int]]:
    """Count equal curves together; Gaussians compose to one Gaussian with mu^2 = sum of n mu^2 (Dong, Roth and Su 2022)."""
    counts: dict[Curve, int] = {}
    square = 0.0
    for curve, n in parts:
        if isinstance(curve, GaussianCurve):
            square += n * curve.mu**2
        else:
            counts[curve] = counts.get(curve, 0) + n
    if square > 0:
        counts[GaussianCurve(math.sqrt(square) * (1 + ACCURACY * 2**-14))] = 1
    return list(counts.items())

"""``PrivacyLoss``: a composition of dominating pairs, with certified bounds on epsilon and delta from both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hushgrad import _check
from hushgrad.accounting.base import Loss
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.participation import unamplified
from hushgrad.accounting.pld.bounds.merge_steps import rounded
from hushgrad.accounting.pld.profiles.curve import ACCURACY, Curve, GaussianCurve
from hushgrad.accounting.pld.search.delta_bounds import delta_bound, delta_bounds
from hushgrad.accounting.pld.search.epsilon_bounds import Answer, epsilon_bound
from hushgrad.accounting.rdp import RDP
from hushgrad.errors import Contradiction, NoTheorem
from hushgrad.events import Compose, Event, Relation


@dataclass(frozen=True)
class Pair:
    """What is known about one event: curves that dominate it, one per direction, and curves that it attains.

    ``above[k]`` bounds direction k from above and ``below[k]`` from below; where the analysis is tight they are the same. Curves of
    one direction compose with curves of the same direction only, and the worst direction is taken at the very end. A single
    curve stands for a relation that is symmetric: it serves for both directions. Four are two pairs of data sets, two directions each.
    """

    above: tuple[Curve, ...]
    below: tuple[Curve, ...]


@dataclass(frozen=True)
class PrivacyLoss:
    """A composition of pairs, kept as a list: the numerical work is chosen for each question.

    ``sources`` are the events of the pairs, for a Rényi bound where the numerics reach their limits.
    """

    parts: tuple[tuple[Pair, int], ...]
    sources: tuple[tuple[Event, Relation, int], ...] = field(default=(), compare=False, repr=False)

    def epsilon(self, delta: float, *, width: float = HEURISTICS.width) -> float:
        """A certified upper bound on epsilon, too large by a fraction of about ``width`` at most."""
        delta = _check.delta(zero=True, delta=delta)
        return self._safe(self._uppers(delta, width), delta)

    def delta(self, epsilon: float) -> float:
        """A certified upper bound on delta."""
        return self.delta_interval(epsilon, lower=False)[1]

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """Certified upper bounds on delta at rising ``epsilons``, to about three digits: for curves."""
        bounds, net = [0.0] * len(epsilons), self._net()
        for k in range(self._count(upper=True)):
            found = delta_bounds(self._direction(k, HEURISTICS.width, upper=True), epsilons, bounds)
            bounds = [max(pair) for pair in zip(bounds, found, strict=True)]
        return bounds if net is None else _least(bounds, epsilons, net)

    def epsilon_interval(self, delta: float, width: float = HEURISTICS.width) -> tuple[float, float]:
        """Certified bounds (lower, upper) on epsilon, ``width`` apart relative to epsilon if that can be had."""
        delta, width = _check.delta(zero=True, delta=delta), _check.positive(width=width)
        found = self._uppers(delta, HEURISTICS.width_above * width)
        upper = self._safe(found, delta)
        if math.isinf(upper):
            return 0.0, upper
        asked = HEURISTICS.width_below
        lower = self._lower(delta, asked * width, found)
        # Finer grids bring the two bounds together where all upper curves are attained, and no steps are merged.
        can_meet = len(self.parts) <= HEURISTICS.merged and self._attained()
        for _ in range(HEURISTICS.retries if can_meet else 0):
            missed = (upper - lower.epsilon) / max(width * upper, 1e-300)
            if missed <= 1 or not lower.improvable:
                break
            asked = asked / max(1.5 * missed, 2.0)  # the first grid was chosen by a rule of thumb
            lower = max(lower, self._lower(delta, asked * width, found), key=lambda answer: answer.epsilon)
        return _consistent("epsilon", lower.epsilon, upper)

    def _attained(self) -> bool:
        return all(pair.above == pair.below for pair, _ in self.parts)

    def _lower(self, delta: float, width: float, uppers: list[Answer]) -> Answer:
        """A lower bound on epsilon: the directions in falling order of their upper bounds, while these may still be the larger."""
        best = Answer(0.0)
        count = self._count(upper=False)
        known = [uppers[k % len(uppers)].epsilon for k in range(count)] if uppers else []
        for k in sorted(range(count), key=lambda k: -known[k]):
            if known[k] > best.epsilon:
                parts = self._direction(k, width, upper=False)
                answer = epsilon_bound(parts, delta, width, upper=False, known=best.epsilon)
                best = answer if answer.epsilon > best.epsilon else best
        return best

    def delta_interval(self, epsilon: float, *, lower: bool = True) -> tuple[float, float]:
        """Certified bounds (lower, upper) on delta."""
        epsilon = _check.non_negative(epsilon=epsilon)
        high, low, net = 0.0, 0.0, self._net()
        for k in range(self._count(upper=True)):
            parts = self._direction(k, HEURISTICS.width, upper=True)
            high = max(high, delta_bound(parts, epsilon, upper=True, known=high))
        high = high if net is None else min(high, net.delta(epsilon))
        for k in range(self._count(upper=False) if lower else 0):
            low = max(low, delta_bound(self._direction(k, HEURISTICS.width, upper=False), epsilon, upper=False))
        return _consistent("delta", low, high)

    def _safe(self, found: list[Answer], delta: float) -> float:
        """The upper bound. A Rényi bound may be smaller, and then it is taken: where the numerics are at their limits, and where curves
        are not attained. The curve of the exponential mechanism is an envelope: no mechanism is that bad at all epsilons at once.
        """
        epsilon = max((answer.epsilon for answer in found), default=0.0)
        deciding = [answer for answer in found if answer.epsilon >= epsilon]  # the other directions may be coarse
        unsure = any(answer.doubtful or math.isinf(answer.epsilon) for answer in deciding)
        net = self._net() if unsure or not self._attained() else None
        return epsilon if net is None else min(epsilon, net.epsilon(delta))

    def _net(self) -> Loss | None:
        """The Rényi loss of the same events, if there is one and it is cheap."""
        relations = {relation for _, relation, _ in self.sources}
        if len(relations) != 1 or len(self.sources) > HEURISTICS.net:
            return None
        try:
            return RDP().loss(Compose(unamplified(event) * n for event, _, n in self.sources), relations.pop())
        except NoTheorem:
            return None

    def _uppers(self, delta: float, width: float) -> list[Answer]:
        """Upper bounds for each direction; one that the first answer already covers is computed as coarsely as that allows."""
        found: list[Answer] = []
        known = 0.0
        for k in range(self._count(upper=True)):
            parts = self._direction(k, HEURISTICS.coarse if known and len(self.parts) > HEURISTICS.merged else width, upper=True)
            answer = epsilon_bound(parts, delta, width, upper=True, known=known)
            if known < answer.epsilon and known and len(self.parts) > HEURISTICS.merged:
                answer = epsilon_bound(self._direction(k, width, upper=True), delta, width, upper=True, known=known)
            found.append(answer)
            known = max(known, answer.epsilon)
        return found

    def _count(self, *, upper: bool) -> int:
        """How many directions there are."""
        return max((len(pair.above if upper else pair.below) for pair, _ in self.parts), default=0)

    def _direction(self, k: int, width: float, *, upper: bool) -> list[tuple[Curve, int]]:
        """The curves of a direction; equal ones are counted together, near-equal ones of very many too.

        From below, a step about which nothing is known counts as free.
        """
        sides = ((pair.above if upper else pair.below, n) for pair, n in self.parts)
        parts = [(curves[k % len(curves)], n) for curves, n in sides if curves]
        return _simplified(rounded(parts, width, upper=upper))


def _least(bounds: Sequence[float], epsilons: Sequence[float], net: Loss) -> list[float]:
    """The smaller of ``bounds`` and the bounds of ``net`` at each of the increasing ``epsilons``.

    Delta falls with epsilon, so ``net`` is evaluated only where the bound exceeds its last value, at a larger epsilon.
    """
    found, least = list(bounds), 0.0
    for k in reversed(range(len(found))):
        if found[k] > least:
            least = net.delta(epsilons[k])
            found[k] = min(found[k], least)
    return found


def _consistent(name: str, lower: float, upper: float) -> tuple[float, float]:
    """Both bounds, if the lower is not above the upper (up to rounding); else raises ``Contradiction``."""
    if lower > upper * (1 + 1e-11):
        raise Contradiction(f"The certified bounds of {name} exclude each other: {lower!r} from below, {upper!r} from above.")
    return min(lower, upper), upper


def merged(parts: Iterable[tuple[Pair, int]]) -> tuple[tuple[Pair, int], ...]:
    """Equal pairs counted together."""
    counts: dict[Pair, int] = {}
    for pair, n in parts:
        counts[pair] = counts.get(pair, 0) + n
    return tuple(counts.items())


def _simplified(parts: Iterable[tuple[Curve, int]]) -> list[tuple[Curve, int]]:
    """Count equal curves together; Gaussians compose to one Gaussian with mu^2 = sum of n mu^2 (Dong, Roth and Su 2022)."""
    counts: dict[Curve, int] = {}
    squares: list[float] = []
    for curve, n in parts:
        if isinstance(curve, GaussianCurve):
            squares.append(n * curve.mu**2)
        else:
            counts[curve] = counts.get(curve, 0) + n
    if squares:
        square = math.fsum(squares)  # the same in every order of the steps
        counts[GaussianCurve(math.sqrt(square) * (1 + ACCURACY * 2**-14))] = 1
    return list(counts.items())

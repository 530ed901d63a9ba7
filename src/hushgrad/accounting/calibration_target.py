"""The target of a calibration, epsilon as a cached function of the unknown, and guesses that only save evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hushgrad import _check
from hushgrad.accounting.api import accountant_of
from hushgrad.accounting.base import Accountant
from hushgrad.accounting.bracketing import Bracket, crossing
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.events import Event, Gaussian, Poisson, Relation, Repeat, Sampled

WIDEST = (1e-6, 1e9)  # default range of the unknown


@dataclass(frozen=True)
class Target:
    """The target (epsilon, delta) of a calibration, with the accountant and relation by which it is checked."""

    epsilon: float
    delta: float
    accountant: Accountant
    relation: Relation

    @classmethod
    def of(cls, epsilon: float, delta: float, accountant: str | Accountant, relation: Relation | str) -> Target:
        """A target from a caller's arguments, checked."""
        epsilon, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
        return cls(epsilon, delta, accountant_of(accountant), Relation.of(relation))

    def cost(self, event: Event) -> float:
        """The certified epsilon of ``event``; infinite instead of NaN."""
        value = self.accountant.loss(event, self.relation).epsilon(self.delta)
        return math.inf if math.isnan(value) else value


def excess(epsilon: float, target: float) -> float:
    """ln(epsilon / target); positive whenever epsilon exceeds the target, even by the last digit."""
    found = math.log(max(epsilon, 1e-300) / target)
    return max(found, math.ulp(0.0)) if epsilon > target else found


@dataclass
class Search:
    """Epsilon as a cached function of x, and the search for the x at which it equals ``target``."""

    ask: Callable[[float], float]
    target: float
    low: float
    high: float
    seen: dict[float, float] = field(default_factory=dict)

    def epsilon(self, x: float) -> float:
        """The certified epsilon at ``x``."""
        if x not in self.seen:
            self.seen[x] = self.ask(x)
        return self.seen[x]

    def crossing(self, guess: float, tolerance: float) -> tuple[float, float | None]:
        """The last x that meets the target, and its neighbour; in u = ln x, or -ln x where epsilon rises with x."""
        sign = 1.0 if self._falls(guess) else -1.0
        ends = sorted((sign * math.log(self.low), sign * math.log(self.high)))
        first = sign * math.log(guess)
        exact = {sign * math.log(x): x for x in (*self.seen, self.low, self.high, guess)}  # exp(ln x) is not x

        def g(u: float) -> float:
            x = exact.setdefault(u, min(max(math.exp(sign * u), self.low), self.high))
            return excess(self.epsilon(x), self.target)

        known = Bracket(g, {u: g(u) for u in exact if exact[u] in self.seen})
        found, neighbour = crossing(known, first, (ends[0], ends[1]), -math.log1p(-tolerance))
        if math.isnan(found):
            return math.nan, None
        return exact[found], None if neighbour is None else exact[neighbour]

    def _falls(self, x: float) -> bool:
        """Whether epsilon decreases with x, as for noise; assumed if it cannot be told (0 or infinite everywhere)."""
        other = 1.3 * x if 1.3 * x <= self.high else x / 1.3
        small, large = min(x, other), max(x, other)
        if self.epsilon(small) == self.epsilon(large) and (self.low, self.high) != WIDEST:
            small, large = self.low, self.high
        return self.epsilon(small) >= self.epsilon(large)


def likely_noise(epsilon: float, delta: float, steps: int, rate: float, relation: Relation | str) -> float:
    """The noise by the central limit theorem: rate sqrt(steps (e^{1/sigma^2} - 1)) is the distance of one Gaussian (a guess)."""
    mu = gaussian_mu(_check.positive(epsilon=epsilon), _check.delta(delta=delta))
    ratio = mu / rate
    spread = math.log1p(ratio * ratio / steps)  # a power would raise where a product is infinite
    alone = min(max(1.0 / math.sqrt(spread), 1e-3), 1e8) if spread > 0.0 else 1e8
    return alone * Relation.of(relation).contributions


def likely_factor(event: Event, epsilon: float, delta: float, relation: Relation | str) -> float | None:
    """A guess of the factor on ``event``'s noise that meets the target; None unless it is one noise multiplier on Poisson samples."""
    step, steps = (event.of, event.times) if isinstance(event, Repeat) else (event, 1)
    rate, base = 1.0, step
    if isinstance(step, Sampled) and isinstance(step.how, Poisson):
        rate, base = step.how.rate, step.of
    if not isinstance(base, Gaussian) or base.noise_multiplier == 0.0:
        return None
    return likely_noise(epsilon, delta, steps, rate, relation) / base.noise_multiplier

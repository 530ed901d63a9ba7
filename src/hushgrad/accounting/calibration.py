r"""Calibration: which noise, number of steps, rate or batch meets a budget.

A root search in two parts: a cheap one on an estimate (or on the accountant itself where there is none), then a correction on
the accountant's certified epsilon. What is returned was evaluated: its certified epsilon is at most the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hushgrad import _check
from hushgrad.accounting.api import accountant_of
from hushgrad.accounting.base import Accountant
from hushgrad.accounting.contour import estimate
from hushgrad.accounting.rdp import RDP
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import Event, Gaussian, Relation

__all__ = ["calibrate", "calibrate_batch_size", "calibrate_noise", "calibrate_rate", "calibrate_steps"]

_WIDEST = (1e-6, 1e9)


@dataclass
class _Question:
    """ln of epsilon(x) / target as a function of ln x, for one way of computing epsilon."""

    epsilon_at: Callable[[float], float]
    target: float
    seen: dict[float, float] = field(default_factory=dict)

    def __call__(self, x: float) -> float:
        if x not in self.seen:
            value = self.epsilon_at(x)
            self.seen[x] = math.inf if math.isnan(value) else math.log(max(value, 1e-300) / self.target)
        return self.seen[x]


def calibrate(
    make_event: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
    bracket: tuple[float, float] | None = None,
    tolerance: float = 2e-5,
) -> float:
    r"""The x at which ``make_event(x)`` just meets (epsilon, delta): the smallest noise, or the largest rate.

    **Formal guarantee.** The certified epsilon of ``make_event(x)`` at the returned x is at most ``epsilon``. The search goes
    in either direction: epsilon(x) may fall (noise) or rise (rate, steps), but must be monotone between the ends of
    ``bracket`` (default: any positive x). x is within a relative ``tolerance`` of the accountant's own boundary.

        >>> from hushgrad.events import Gaussian
        >>> round(calibrate(lambda s: Gaussian(s), epsilon=1.0, delta=1e-5, accountant="gdp"), 3)
        3.731

    Raises:
        ArgumentError: where no x in the bracket meets the target (then more budget or less work is needed).
    """
    target, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
    chosen, relation = accountant_of(accountant), Relation.of(relation)
    certified = _Question(lambda x: chosen.loss(make_event(x), relation).epsilon(delta), target)
    cheap = certified
    if chosen.name == "pld":
        cheap = _Question(lambda x: _rough(make_event(x), delta, relation), target)
    try:
        low, high = _bracket(cheap, bracket)
        start, slope = _root(cheap, low, high, 1e-7 if cheap is not certified else tolerance / 4.0)
    except NoTheorem:
        low, high = _bracket(certified, bracket)
        start, slope = _root(certified, low, high, tolerance / 4.0)
    # A rough answer may lie on the other side of its bracket from the certified one: only the caller's own ends bind.
    return _certify(certified, start, slope, tolerance, _WIDEST if bracket is None else (low, high))


def _rough(event: Event, delta: float, relation: Relation) -> float:
    """The estimate, or where it refuses (extreme values on the way to a root) what Rényi divergences give."""
    try:
        return estimate(event, delta=delta, relation=relation).epsilon
    except NoTheorem:
        return RDP().loss(event, relation).epsilon(delta)


def _bracket(question: _Question, bracket: tuple[float, float] | None) -> tuple[float, float]:
    """Two x between which the target is crossed."""
    if bracket is not None:
        low, high = (_check.positive(bracket=end) for end in bracket)
        if question(low) > 0.0 and question(high) > 0.0:
            raise ArgumentError(f"Expected bracket={bracket} to contain a value that meets epsilon={question.target}.")
        return low, high
    wanted_lower = question(1.0) > 0.0
    for factor in _ways(question, wanted_lower=wanted_lower):
        here, there = 1.0, factor
        while _WIDEST[0] <= there <= _WIDEST[1]:
            if (question(there) > 0.0) != wanted_lower:
                return min(here, there), max(here, there)
            here, there = there, there * factor
    raise ArgumentError(f"Expected epsilon={question.target} to be reachable between x=1 and x={here:g}. Give a bracket.")


def _ways(question: _Question, *, wanted_lower: bool) -> tuple[float, ...]:
    """From 1 only in the direction of the target: events far on the other side may be extreme, and cost time for nothing.

    Where epsilon is 0 or infinite on both sides there is no direction: then as for noise, which is what is mostly looked for.
    """
    if question(2.0) == question(1.0):
        return (2.0, 0.5) if wanted_lower else (0.5, 2.0)
    return (2.0,) if (question(2.0) < question(1.0)) == wanted_lower else (0.5,)


def _root(question: _Question, low: float, high: float, tolerance: float) -> tuple[float, float]:
    """(x, d ln epsilon / d ln x) at the crossing, by the Illinois variant of false position in ln x.

    If both ends of a given bracket meet the target, the end with the larger epsilon is the answer.
    """
    a, b, at_a, at_b = math.log(low), math.log(high), question(low), question(high)
    slope = _slope(a, b, at_a, at_b)
    if at_a <= 0.0 and at_b <= 0.0:
        return (low if at_a >= at_b else high), slope
    for step in range(200):
        if abs(b - a) < tolerance:
            break
        finite = math.isfinite(at_a) and math.isfinite(at_b) and at_a != at_b and step % 8 != 7
        c = b - at_b * (b - a) / (at_b - at_a) if finite else 0.5 * (a + b)
        value = question(math.exp(c))
        slope = _slope(b, c, at_b, value) or slope
        if abs(value) < tolerance * max(abs(slope), 1e-3):
            return math.exp(c), slope
        if (value > 0.0) != (at_b > 0.0):
            a, at_a = b, at_b
        else:
            at_a /= 2.0
        b, at_b = c, value
    return math.exp(0.5 * (a + b)), slope


def _slope(a: float, b: float, at_a: float, at_b: float) -> float:
    return (at_b - at_a) / (b - a) if a != b and math.isfinite(at_a) and math.isfinite(at_b) else 0.0


def _certify(question: _Question, start: float, slope: float, tolerance: float, ends: tuple[float, float]) -> float:
    """From an approximate root to an x whose certified epsilon meets the target, within ``tolerance`` of one that does not."""
    safe = -1.0 if slope > 0.0 else 1.0  # the direction in which epsilon falls
    steepness = min(max(abs(slope), 0.05), 100.0)  # at a jump (epsilon ends at 0) the slope says nothing about distances
    low, high = min(ends), max(ends)
    x, best, failed = min(max(start, low), high), math.nan, math.nan
    for _ in range(60):
        value = question(x)
        if value <= 0.0:
            best = x
            gap = -value / steepness
            if gap <= tolerance or x == (low if safe < 0.0 else high) or _close(best, failed, tolerance):
                return x
            x = x * math.exp(-safe * gap * 0.9) if math.isnan(failed) else math.sqrt(best * failed)
        else:
            failed = x
            push = (value if math.isfinite(value) else 1.0) / steepness
            x = x * math.exp(safe * (push * 1.02 + tolerance / 4.0)) if math.isnan(best) else math.sqrt(best * failed)
        if not math.isnan(best) and _close(best, failed, tolerance):
            return best
        x = min(max(x, low), high)
        if x == failed:
            break
    if math.isnan(best):
        raise ArgumentError(f"Expected epsilon={question.target} to be reachable between x={low:g} and x={high:g}.")
    return best


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(math.log(a / b)) <= tolerance if a > 0.0 and b > 0.0 else False


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    steps: int = 1,
    rate: float = 1.0,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> float:
    """The smallest noise multiplier for ``steps`` Gaussian steps on Poisson samples at ``rate``.

    >>> round(calibrate_noise(epsilon=1.0, delta=1e-6, steps=1000, accountant="gdp"), 2)
    133.6
    """
    steps, rate = _check.positive_int(steps=steps), _check.rate(rate=rate)
    return calibrate(
        lambda sigma: Gaussian(sigma).sampled(rate=rate) * steps,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        relation=relation,
    )


def calibrate_steps(
    step: Event,
    *,
    epsilon: float,
    delta: float,
    most: int = 10**8,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> int:
    """The largest number of repetitions of ``step`` within the budget; 0 if not even one fits, ``most`` at the most.

    >>> calibrate_steps(Gaussian(100.0), epsilon=1.0, delta=1e-6, accountant="gdp")
    560
    """
    return _largest(lambda n: step * n, most=most, epsilon=epsilon, delta=delta, accountant=accountant, relation=relation)


def calibrate_rate(
    of: Event,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> float:
    """The largest Poisson sampling rate for ``steps`` runs of ``of``; 1 if the budget allows the whole data every time."""
    steps = _check.positive_int(steps=steps)
    return calibrate(
        lambda rate: of.sampled(rate=min(1.0, rate)) * steps,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        relation=relation,
        bracket=(1e-9, 1.0),
    )


def calibrate_batch_size(
    of: Event,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    dataset_size: int,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> int:
    """The largest expected batch size for ``steps`` runs of ``of`` on Poisson samples of ``dataset_size`` records, or 0."""
    n = _check.positive_int(dataset_size=dataset_size)
    steps = _check.positive_int(steps=steps)

    def make_event(batch_size: int) -> Event:
        return of.sampled(rate=batch_size / n) * steps

    return _largest(make_event, most=n, epsilon=epsilon, delta=delta, accountant=accountant, relation=relation)


def _largest(
    make_event: Callable[[int], Event],
    *,
    most: int,
    epsilon: float,
    delta: float,
    accountant: str | Accountant,
    relation: Relation | str,
) -> int:
    """The largest n in 1..most whose certified epsilon meets the target, 0 if none does; epsilon rises with n."""
    target, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
    most = _check.positive_int(most=most)
    chosen, relation = accountant_of(accountant), Relation.of(relation)

    def fits(n: int) -> bool:
        return n == 0 or chosen.loss(make_event(n), relation).epsilon(delta) <= target

    def probably_fits(n: int) -> bool:
        return n == 0 or _rough(make_event(n), delta, relation) <= target

    start = 1
    if chosen.name == "pld":
        try:
            start = max(1, _bisect(probably_fits, 0, most))
        except NoTheorem:
            start = 1
    return _gallop(fits, start, most)


def _gallop(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest n that fits, looked for around ``start`` with growing steps and then by bisection."""
    reach = max(1, start // 10_000)
    if fits(start):
        low, high = start, min(most, start + reach)
        while high < most and fits(high):
            low, reach = high, 2 * reach
            high = min(most, high + reach)
        return high if high == most and fits(most) else _bisect(fits, low, high)
    low, high = max(0, start - reach), start
    while not fits(low):
        high, reach = low, 2 * reach
        low = max(0, low - reach)
    return _bisect(fits, low, high)


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] that fits, given that ``low`` does; probes grow geometrically from small to large."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2 if high < 4 * max(low, 1) else max(low + 1, math.isqrt(max(low, 1) * high))
        if fits(middle):
            low = middle
        else:
            high = middle
    return low

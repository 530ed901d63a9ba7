r"""Group privacy: what a guarantee for one record says about k records that act together.

The general theorem multiplies epsilon by k and delta by (e^{k epsilon} - 1)/(e^epsilon - 1). Where the mechanism is known, the
event of the group is known too, and often far better: k contributions are at distance k, so a Gaussian with multiplier s is
for the group a Gaussian with multiplier s/k.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from fractions import Fraction
from functools import singledispatch

import numpy as np
from numpy.typing import NDArray

from hushgrad import _check, events
from hushgrad._printed import below, times
from hushgrad._value import Value
from hushgrad.accounting.api import accountant_of, epsilon, loss_of
from hushgrad.accounting.base import Accountant
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.participation import poisson_rate
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Relation
from hushgrad.events.composed import require_one_size

_LEAST_NOISE = 1e-100  # what events describe
_LARGEST = 2**63 - 1
_U = 2.0**-53


def for_group(event: Event, size: int) -> Event:
    r"""The event that a group of ``size`` records sees when each record sees ``event``; a group of 1 changes nothing.

    | event | for a group of k |
    |---|---|
    | Gaussian(s), Laplace(b), DiscreteGaussian, DiscreteLaplace | distance times k |
    | PureDP(e), Exponential(e) | PureDP(k e), Exponential(k e) |
    | ZCDP(rho) | ZCDP(k² rho) (Bun and Steinke 2016, proposition 1.9) |
    | RandomizedResponse | k answers: Repeat k times |
    | Poisson-sampled Gaussian | binomially many of the k take part: a Gaussian mixture (Ganesh 2024) |
    | compositions | part by part |

    **Formal guarantee.** An accountant's answer for the returned event holds for data sets that differ by k records which
    are all added, all removed, all replaced or all zeroed, as the relation says.

        >>> print(for_group(events.Gaussian(4.0) * 10, 2))
        10 x Gaussian(2)

    Raises:
        NoTheorem: where only the general theorem is known; :func:`epsilon_for_group` falls back to it.
    """
    k = _check.positive_int(size=size)
    return event if k == 1 else _grouped(event, k)


@singledispatch
def _grouped(event: Value, k: int) -> Event:
    raise NoTheorem(f"No event of its own is known for a group's {type(event).__name__}. Use epsilon_for_group.")


def _within(event: Event, k: int, number: float, low: float, high: float) -> None:
    """Raise if the group's event would have a ``number`` outside the range of events."""
    if not low <= number <= high:
        raise NoTheorem(f"No event describes a group of {k} in {event}: {number:g} is out of range. Use epsilon_for_group.")


def _noise(event: Event, scale: float, k: int) -> float:
    found = below(Fraction(scale) / k)
    _within(event, k, found, _LEAST_NOISE if scale else 0.0, math.inf)
    return found


def _cost(event: Event, cost: float, k: int) -> float:
    _within(event, k, found := times(k, cost), 0.0, sys.float_info.max)
    return found


@_grouped.register
def _(event: events.Gaussian, k: int) -> Event:
    return replace(event, noise_multiplier=_noise(event, event.noise_multiplier, k))


@_grouped.register
def _(event: events.Laplace, k: int) -> Event:
    return replace(event, scale=_noise(event, event.scale, k))


@_grouped.register(events.DiscreteGaussian)
@_grouped.register(events.DiscreteLaplace)
def _(event: events.DiscreteGaussian | events.DiscreteLaplace, k: int) -> Event:
    _within(event, k, event.sensitivity * k, 1, _LARGEST)
    return replace(event, sensitivity=event.sensitivity * k)


@_grouped.register(events.PureDP)
@_grouped.register(events.Exponential)
def _(event: events.PureDP | events.Exponential, k: int) -> Event:
    return replace(event, epsilon=_cost(event, event.epsilon, k))


@_grouped.register
def _(event: events.ZCDP, k: int) -> Event:
    return replace(event, rho=_cost(event, event.rho, k * k))


@_grouped.register
def _(event: events.RandomizedResponse, k: int) -> Event:
    return event * k


@_grouped.register
def _(event: events.Sampled, k: int) -> Event:
    rate = poisson_rate(event)
    if rate is None or not isinstance(event.of, events.Gaussian):
        raise NoTheorem(f"No event of its own is known for a group in {event}. Use epsilon_for_group.")
    if rate == 1.0:
        return _grouped(event.of, k)
    counts, weights = _participants(k, rate)
    return events.GaussianMixture(
        noise_multiplier=event.of.noise_multiplier,
        sensitivities=tuple(map(float, counts)),
        probabilities=tuple(map(float, weights)),
    )


def _participants(k: int, q: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Numbers of participants among k records at rate q, with probabilities whose upper tails are at least the binomial ones.

    Weights are products of ratios of consecutive probabilities, starting at the mode. They are enlarged by more than their rounding
    errors, from the largest number down, until they sum to one. Numbers rarer than 1e-39 (Bernstein's inequality) are moved to k or to the
    smallest number kept; if there are very many, some are moved to the next larger one. More records cost more, so it is an upper bound.
    """
    middle, reach = k * q, 14.0 * math.sqrt(k * q * (1 - q)) + 100.0
    low, high = max(0, math.floor(middle - reach)), min(k, math.ceil(middle + reach))
    if high - low > HEURISTICS.group_counts:
        raise NoTheorem(f"A group of {k} at rate {q:g} is too large for a mixture. Use epsilon_for_group.")
    step = -(-(high - low + 1) // HEURISTICS.group_cells)
    counts = np.arange(low, high + 1, dtype=np.float64)
    ratios = np.log((k - counts[:-1]) / counts[1:]) + (math.log(q) - math.log1p(-q))
    logs = np.concatenate([[0.0], np.cumsum(ratios)])
    weights = np.exp(logs - np.max(logs))
    # logarithms and their sums are below 800 where a weight is a double, so one more number adds a few roundings of that size
    more = 1 + 1e-12 + len(counts) * 4096 * _U
    weights = np.maximum(weights / np.sum(weights) * more, sys.float_info.min)
    last = np.arange(len(counts) - 1, -1, -step)[::-1]  # each cell counts as its largest number
    weights, counts = np.add.reduceat(weights, np.concatenate([[0], last[:-1] + 1])), counts[last]
    if high < k:
        weights, counts = np.append(weights, 1e-38), np.append(counts, float(k))
    above = np.concatenate([np.cumsum(weights[::-1])[::-1][1:], [0.0]])  # the mass of all larger numbers
    kept = above < 1
    weights = np.minimum(weights, 1 - above)[kept]
    weights[0] = 1 - above[kept][0]
    return counts[kept], weights


@_grouped.register
def _(event: events.Repeat, k: int) -> Event:
    of = _grouped(event.of, k)
    _within(event, k, (of.times if isinstance(of, events.Repeat) else 1) * event.times, 0, _LARGEST)
    return events.Repeat(of, event.times)


@_grouped.register
def _(event: events.Compose, k: int) -> Event:
    return events.Compose(_grouped(part, k) for part in event.events)


@_grouped.register
def _(event: events.OneOf, k: int) -> Event:
    return events.OneOf(_grouped(part, k) for part in event.events)


@_grouped.register(events.NonPrivate)
@_grouped.register(events.Unanalysed)
def _same(event: Event, k: int) -> Event:
    return event


def epsilon_for_group(
    event: Event,
    size: int,
    *,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> float:
    """The smallest epsilon known to hold for a group of ``size`` records, by the group's event or by the general theorem.

    Args:
        event: what is released.
        size: number of records that act together.
        delta: of the guarantee.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> round(epsilon_for_group(events.Gaussian(2.0), 2, delta=1e-5, accountant="gdp"), 4)
    4.3772
    """
    k = _check.positive_int(size=size)
    delta = _check.delta(delta=delta)
    accountant = accountant_of(accountant)
    try:
        return epsilon(for_group(event, k), delta=delta, accountant=accountant, relation=relation)
    except NoTheorem:
        return _general(event, k, delta, accountant, relation)


def _general(event: Event, k: int, delta: float, accountant: Accountant, relation: Relation | str) -> float:
    """The least k e over pairs (e, d) with d (e^{k e} - 1)/(e^e - 1) <= delta (Vadhan 2017, lemma 2.2)."""
    require_one_size(event, Relation.of(relation), k)
    loss = loss_of(event, accountant, relation)
    pure = times(k, loss.epsilon(0.0))  # at delta 0 nothing grows
    d = delta / k
    while d >= sys.float_info.min:  # downwards: epsilon only grows, so the first pair that holds is the best
        e = loss.epsilon(d)
        if math.isinf(e):
            break
        room = math.log(delta) - _log_growth(e, k) - 1e-12  # no larger ln d can hold, here or further down
        if math.log(d) <= room:
            return min(pure, times(k, e))
        d = math.exp(min(math.log(d) - 0.5, room))
    return pure


def _log_growth(e: float, k: int) -> float:
    if e == 0.0:
        return math.log(k)
    return (k - 1) * e + math.log(-math.expm1(-k * e)) - math.log(-math.expm1(-e))

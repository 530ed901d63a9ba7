r"""Group privacy: what a guarantee for one record says about k records that act together.

The general theorem multiplies epsilon by k and delta by (e^{k epsilon} - 1)/(e^epsilon - 1). Where the mechanism is known, the
event of the group is known too, and often far better: k contributions are at distance k, so a Gaussian with multiplier s is
for the group a Gaussian with multiplier s/k.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import singledispatch

from hushgrad import _check
from hushgrad._printed import below, times
from hushgrad._value import Value
from hushgrad.accounting.api import accountant_of, epsilon, loss_of
from hushgrad.accounting.base import Accountant
from hushgrad.accounting.participation import poisson_rate
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ZCDP,
    Compose,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Exponential,
    Gaussian,
    GaussianMixture,
    Laplace,
    NonPrivate,
    PureDP,
    RandomizedResponse,
    Relation,
    Repeat,
    Sampled,
    Unanalysed,
)

__all__ = ["epsilon_for_group", "for_group"]

_SMALL = 100


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

        >>> print(for_group(Gaussian(4.0) * 10, 2))
        10 x Gaussian(2)

    Raises:
        NoTheorem: where only the general theorem is known; :func:`epsilon_for_group` falls back to it.
    """
    k = _check.positive_int(size=size)
    return event if k == 1 else _grouped(event, k)


@singledispatch
def _grouped(event: Value, k: int) -> Event:
    raise NoTheorem(f"No event of its own is known for a group's {type(event).__name__}. Use epsilon_for_group.")


@_grouped.register
def _(event: Gaussian, k: int) -> Event:
    return replace(event, noise_multiplier=below(Fraction(event.noise_multiplier) / k))


@_grouped.register
def _(event: Laplace, k: int) -> Event:
    return replace(event, scale=below(Fraction(event.scale) / k))


@_grouped.register
def _(event: DiscreteGaussian, k: int) -> Event:
    return replace(event, sensitivity=event.sensitivity * k)


@_grouped.register
def _(event: DiscreteLaplace, k: int) -> Event:
    return replace(event, sensitivity=event.sensitivity * k)


@_grouped.register
def _(event: PureDP, k: int) -> Event:
    return replace(event, epsilon=times(k, event.epsilon))


@_grouped.register
def _(event: Exponential, k: int) -> Event:
    return replace(event, epsilon=times(k, event.epsilon))


@_grouped.register
def _(event: ZCDP, k: int) -> Event:
    return replace(event, rho=times(k * k, event.rho))


@_grouped.register
def _(event: RandomizedResponse, k: int) -> Event:
    return event * k


@_grouped.register
def _(event: Sampled, k: int) -> Event:
    rate = poisson_rate(event)
    if rate is None or not isinstance(event.of, Gaussian):
        raise NoTheorem(f"No event of its own is known for a group in {event}. Use epsilon_for_group.")
    if rate == 1.0:
        return _grouped(event.of, k)
    weights = _participants(k, rate)
    total = math.fsum(weights.values())
    return GaussianMixture(
        noise_multiplier=event.of.noise_multiplier,
        sensitivities=tuple(map(float, weights)),
        probabilities=tuple(w / total for w in weights.values()),
    )


def _participants(k: int, q: float) -> dict[int, float]:
    """The binomial probabilities of how many of k records take part.

    Counts that are rarer than 1e-30 in a large group are taken to be a larger one, which costs more: the mixture stays short.
    """
    weights = {
        i: math.exp(math.lgamma(k + 1) - math.lgamma(i + 1) - math.lgamma(k - i + 1) + i * math.log(q) + (k - i) * math.log1p(-q))
        for i in range(k + 1)
    }
    if k <= _SMALL:
        return weights
    common = [i for i, w in weights.items() if w > 1e-30]
    kept = {i: weights[i] for i in common}
    kept[common[0]] += math.fsum(weights[i] for i in range(common[0]))
    kept[k] = kept.get(k, 0.0) + math.fsum(weights[i] for i in range(common[-1] + 1, k))
    return kept


@_grouped.register
def _(event: Repeat, k: int) -> Event:
    return Repeat(_grouped(event.of, k), event.times)


@_grouped.register
def _(event: Compose, k: int) -> Event:
    return Compose(_grouped(part, k) for part in event.events)


@_grouped.register(NonPrivate)
@_grouped.register(Unanalysed)
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
    """The smallest epsilon known to hold for a group of ``size`` records: by the group's own event, or by the general theorem.

    Args:
        event: what is released.
        size: number of records that act together.
        delta: of the guarantee.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> round(epsilon_for_group(Gaussian(2.0), 2, delta=1e-5, accountant="gdp"), 4)
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
    loss = loss_of(event, accountant, relation)
    for step in range(120):  # d from delta/k downwards: epsilon only grows, so the first pair that holds is the best
        d = delta / k * 10.0 ** (-step / 4.0)
        e = loss.epsilon(d)
        if math.isfinite(e) and math.log(d) + _log_growth(e, k) <= math.log(delta):
            return times(k, e)
    return math.inf


def _log_growth(e: float, k: int) -> float:
    if e == 0.0:
        return math.log(k)
    return (k - 1) * e + math.log(-math.expm1(-k * e)) - math.log(-math.expm1(-e))

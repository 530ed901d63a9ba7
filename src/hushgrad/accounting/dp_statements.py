r"""Leaf events as (epsilon, delta)-DP statements, which basic, advanced and optimal composition compose.

An event is either a *fixed* statement (Laplace noise is (1/b)-DP), or a Gaussian, which is (epsilon, delta)-DP for a whole
curve of pairs and takes whatever delta it is given. Sampling amplifies both by the subsampling lemma.

Relations (see :class:`~hushgrad.events.Relation`): noise mechanisms see ``relation.contributions`` bounded contributions;
``PureDP``, ``ApproxDP``, ``ZCDP`` and ``Exponential`` state their guarantee under the relation that is asked for; randomised
response protects a record's answer, which add/remove does not hide, so it has a theorem for the two other relations only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

from hushgrad.accounting._numeric import positive_up, product_up, ratio_up, up
from hushgrad.accounting.gaussian import gaussian_delta, gaussian_epsilon
from hushgrad.accounting.participation import Way, sampling
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ApproxDP,
    DiscreteLaplace,
    Event,
    Exponential,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
)


@dataclass(frozen=True)
class Statement:
    """(``epsilon(delta)``, delta)-DP for every delta of at least ``fixed``; ``flexible`` if a larger delta gives a smaller epsilon."""

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]
    fixed: float = 0.0
    flexible: bool = False


def exactly(epsilon: float, delta: float = 0.0) -> Statement:
    """The statement (``epsilon``, ``delta``)-DP for one fixed pair."""
    return Statement(lambda d: epsilon if d >= delta else math.inf, lambda e: delta if e >= epsilon else 1.0, fixed=delta)


def amplified(epsilon: float, rate: float) -> float:
    """ln(1 + rate (e^epsilon - 1)), without overflow.

    >>> round(amplified(1.0, 0.01), 6)
    0.017037
    """
    if epsilon > 30.0:
        return epsilon + math.log(rate + (1.0 - rate) * math.exp(-epsilon))
    return math.log1p(rate * math.expm1(epsilon))


def deamplified(epsilon: float, rate: float) -> float:
    """The inverse of :func:`amplified`: the epsilon of the mechanism on the whole data that becomes ``epsilon`` on the sample."""
    if epsilon > 30.0:
        return epsilon - math.log(rate) + math.log1p((rate - 1.0) * math.exp(-epsilon))
    return math.log1p(math.expm1(epsilon) / rate)


def pure_epsilon(event: Event, relation: Relation) -> float | None:
    """The epsilon of a purely differentially private mechanism, rounded up; None for other mechanisms."""
    if isinstance(event, (PureDP, Exponential)):
        return event.epsilon
    if isinstance(event, Laplace):
        return ratio_up(relation.contributions, event.scale)
    if isinstance(event, DiscreteLaplace):
        return ratio_up(relation.contributions * event.sensitivity, event.scale)
    if isinstance(event, RandomizedResponse):
        return _response_epsilon(event, relation)
    return None


def _response_epsilon(event: RandomizedResponse, relation: Relation) -> float:
    if relation is Relation.ADD_REMOVE:
        raise NoTheorem(
            "Randomised response hides what a record answers, not that it answers, so it has no epsilon under add/remove. "
            "Ask with relation='replace_one', or with relation='zero_out'."
        )
    if event.noise_probability == 0.0:
        return math.inf
    p, k = event.noise_probability, event.categories
    return (math.log1p((1.0 - p) * k / p) if p > _LEAST_LIE else math.log(k) - math.log(p)) * (1.0 + 2.0**-50)


@singledispatch
def statement(event: Event, relation: Relation) -> Statement:
    """The (epsilon, delta)-DP statement that is known for ``event``.

    Raises:
        NoTheorem: if none is known.
    """
    epsilon = pure_epsilon(event, relation)
    if epsilon is None:
        raise NoTheorem(
            f"{type(event).__name__} has no (epsilon, delta) statement that could be composed. "
            "Ask another accountant (pld knows the most)."
        )
    return exactly(epsilon if isinstance(event, (PureDP, Exponential)) else up(epsilon))  # exact as stated


@statement.register
def _(event: ApproxDP, relation: Relation) -> Statement:
    return exactly(event.epsilon, event.delta)


@statement.register
def _(event: Gaussian, relation: Relation) -> Statement:
    if event.noise_multiplier == 0.0:
        return exactly(math.inf)
    mu = relation.contributions / event.noise_multiplier
    return Statement(lambda d: gaussian_epsilon(mu, d), lambda e: gaussian_delta(mu, e), flexible=True)


@statement.register
def _(event: Sampled, relation: Relation) -> Statement:
    """The subsampling lemma: (ln(1 + q (e^epsilon - 1)), q delta), or (epsilon, q delta) where the sample may be shown."""
    how = sampling(event, relation)
    base, rate, shown = statement(event.of, how.relation), how.rate, how.way is Way.SHOWN

    def epsilon(delta: float) -> float:
        inner = base.epsilon(min(delta / rate, _BELOW_ONE))  # the mechanism itself may spend delta / rate
        return inner if shown else up(amplified(inner, rate))

    def delta(epsilon: float) -> float:
        inner = base.delta(epsilon if shown else deamplified(epsilon, rate))
        return positive_up(rate * inner) if inner > 0.0 else 0.0

    return Statement(epsilon, delta, fixed=product_up(rate, base.fixed) if base.fixed > 0.0 else 0.0, flexible=base.flexible)


STATED = (ApproxDP, DiscreteLaplace, Exponential, Gaussian, Laplace, PureDP, RandomizedResponse, Sampled)
"""The events that have a :func:`statement`."""
_LEAST_LIE = 1e-200  # a smaller probability may leave the range of doubles when it is divided by the categories
_BELOW_ONE = 1.0 - 1e-9

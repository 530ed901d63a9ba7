r"""Leaf events as (epsilon, delta) statements: what basic, advanced and optimal composition compose.

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

from hushgrad.accounting._numeric import up
from hushgrad.accounting.gaussian import gaussian_delta, gaussian_epsilon
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ApproxDP,
    DiscreteLaplace,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    Poisson,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
)

__all__ = ["Statement", "amplified", "deamplified", "pure_epsilon", "sampling_lemma", "statement"]


@dataclass(frozen=True)
class Statement:
    """(``epsilon(delta)``, delta)-DP for every delta of at least ``fixed``; ``flexible`` if more delta buys less epsilon."""

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]
    fixed: float = 0.0
    flexible: bool = False


def exactly(epsilon: float, delta: float = 0.0) -> Statement:
    """The one statement (``epsilon``, ``delta``)-DP."""
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
    """The epsilon of a mechanism that is purely differentially private, or None where it is not."""
    if isinstance(event, (PureDP, Exponential)):
        return event.epsilon
    if isinstance(event, Laplace):
        return relation.contributions / event.scale
    if isinstance(event, DiscreteLaplace):
        return relation.contributions * event.sensitivity / event.scale
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
    lie = event.noise_probability / event.categories
    return math.log1p((1.0 - event.noise_probability) / lie)


@singledispatch
def statement(event: Event, relation: Relation) -> Statement:
    """What is known about ``event`` as one (epsilon, delta) statement.

    Raises:
        NoTheorem: where nothing is.
    """
    epsilon = pure_epsilon(event, relation)
    if epsilon is None:
        raise NoTheorem(
            f"{type(event).__name__} has no (epsilon, delta) statement that could be composed. "
            "Ask another accountant (pld knows the most)."
        )
    return exactly(epsilon if isinstance(event, (PureDP, Exponential)) else up(epsilon))  # those state it themselves


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
    rate, base_relation = sampling_lemma(event, relation)
    base = statement(event.of, base_relation)

    def epsilon(delta: float) -> float:
        return up(amplified(base.epsilon(min(delta / rate, _BELOW_ONE)), rate))  # the mechanism itself may spend delta / rate

    def delta(epsilon: float) -> float:
        return up(rate * base.delta(deamplified(epsilon, rate)))

    return Statement(epsilon, delta, fixed=up(rate * base.fixed), flexible=base.flexible)


_BELOW_ONE = 1.0 - 1e-9
_NOISE = (Gaussian, Laplace, DiscreteLaplace)


def sampling_lemma(event: Sampled, relation: Relation) -> tuple[float, Relation]:
    """The rate of the subsampling lemma, and the relation under which the sampled mechanism's statement must hold.

    **Formal guarantee.** If M is (epsilon, delta)-DP, then M on a sample is (ln(1 + q (e^epsilon - 1)), q delta)-DP

    * for Poisson samples at rate q, both under add/remove (a null record contributes nothing, so zero-out is the same);
    * for samples of a fixed size m of n without replacement, q = m/n, both under replace-one.

    The two are never mixed. For noise added to a bounded sum the distances of all three data sets in the proof are known
    (at most two contributions), so those mechanisms are also covered under the relation that the lemma leaves out.
    Reference: Balle, Barthe and Gaboardi 2018, theorems 8 and 9.
    """
    how, noise = event.how, isinstance(event.of, _NOISE)
    if isinstance(how, Poisson):
        if relation is not Relation.REPLACE_ONE or how.rate == 1.0:
            return how.rate, relation
        if noise:
            return how.rate, Relation.REPLACE_ONE
    if isinstance(how, FixedSize):
        if relation is Relation.REPLACE_ONE or (relation is Relation.ZERO_OUT and how.rate == 1.0):
            return how.rate, relation
        if noise and relation is Relation.ZERO_OUT:
            return how.rate, Relation.REPLACE_ONE
    raise NoTheorem(
        f"The subsampling lemma does not cover {how} of {type(event.of).__name__} under the relation {relation.value}. "
        "Poisson samples go with add/remove, samples of a fixed size with replace-one."
    )

"""Events: what a private computation did, as data.

An :class:`Event` is necessary and sufficient for privacy accounting: mechanisms produce events, accountants read them,
and the two meet nowhere else. The rules of this file are a constitution:

* an event is never removed and its meaning never changes; new parameters are optional and default to the old meaning;
* an accountant that has no theorem for an event says so (:class:`~hushgrad.errors.NoTheorem`), it never guesses;
* every parameter is public: an event may be printed, stored and sent.

Notation: a mechanism sees a data set through a query to which each record (each *unit*: an example, or all data of one
user) contributes a vector of norm at most 1. ``noise_multiplier`` and ``scale`` are in units of that bound.

    >>> run = Gaussian(1.1).sampled(rate=0.01) * 10_000
    >>> print(run)
    10000 x Poisson(0.01) Gaussian(1.1)
    >>> Event.from_json(run.to_json()) == run
    True
"""

from __future__ import annotations

from hushgrad.events.composed import (
    Compose,
    Event,
    NonPrivate,
    OneOf,
    Repeat,
    RepeatAndSelect,
    Sampled,
    Unanalysed,
    to_dp_accounting,
)
from hushgrad.events.mechanisms import (
    ZCDP,
    ApproxDP,
    DiscreteGaussian,
    DiscreteLaplace,
    Exponential,
    Gaussian,
    GaussianMixture,
    Laplace,
    PureDP,
    RandomizedResponse,
)
from hushgrad.events.neighbours import Absent, Answers, Relation
from hushgrad.events.participation import (
    BallsInBins,
    CyclicPoisson,
    Everyone,
    FixedSize,
    MinSep,
    Once,
    Participation,
    Poisson,
    TruncatedPoisson,
)

__all__ = [
    "ZCDP",
    "Absent",
    "Answers",
    "ApproxDP",
    "BallsInBins",
    "Compose",
    "CyclicPoisson",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Event",
    "Everyone",
    "Exponential",
    "FixedSize",
    "Gaussian",
    "GaussianMixture",
    "Laplace",
    "MinSep",
    "NonPrivate",
    "Once",
    "OneOf",
    "Participation",
    "Poisson",
    "PureDP",
    "RandomizedResponse",
    "Relation",
    "Repeat",
    "RepeatAndSelect",
    "Sampled",
    "TruncatedPoisson",
    "Unanalysed",
    "to_dp_accounting",
]

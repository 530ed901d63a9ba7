"""The PLD accountant's leaf analyses, one per event type: which curves dominate the event, and which curves it attains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hushgrad import events
from hushgrad.accounting._numeric import ratio_up
from hushgrad.accounting.base import Loss, Nothing, Unbounded
from hushgrad.accounting.dp_statements import pure_epsilon
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.participation import Way, kind_of, sampling
from hushgrad.accounting.pld.accountant import PLD
from hushgrad.accounting.pld.batch_schemes import NOISE, balls, mirrored, once, replaced, truncated, zeroed
from hushgrad.accounting.pld.loss import PrivacyLoss
from hushgrad.accounting.pld.profiles.continuous import BoundedRange, GaussianMixtureCurve, HalfRange, LaplaceCurve
from hushgrad.accounting.pld.profiles.curve import GaussianCurve
from hushgrad.accounting.pld.profiles.discrete import DEEPEST, DiscreteGaussianCurve, DiscreteLaplaceCurve, Response
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove, PoissonReplace, Shown, Symmetrised
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Relation, Sampled

_FARTHEST = 25.0  # of a mean of a mixture: losses are then hundreds in both directions, too large for ratios of densities
_REVEALED = 1e3  # of a mean of a mixture: losses of mu^2/2 keep too few digits behind the point


@PLD.analyses(events.Gaussian)
def _(event: events.Gaussian, relation: Relation) -> Loss:
    if event.noise_multiplier == 0:
        return Unbounded()
    return once(GaussianCurve(relation.contributions / event.noise_multiplier))


@PLD.analyses(events.Laplace)
def _(event: events.Laplace, relation: Relation) -> Loss:
    return once(LaplaceCurve(ratio_up(relation.contributions, event.scale)))


@PLD.analyses(events.DiscreteGaussian)
def _(event: events.DiscreteGaussian, relation: Relation) -> Loss:
    if event.sigma > HEURISTICS.widest_table:
        raise NoTheorem(
            f"No table holds a discrete Gaussian of sigma={event.sigma:g}. Ask the zcdp or rdp accountant: it is tight there."
        )
    return once(DiscreteGaussianCurve(event.sigma, relation.contributions * event.sensitivity))


@PLD.analyses(events.DiscreteLaplace)
def _(event: events.DiscreteLaplace, relation: Relation) -> Loss:
    distance = relation.contributions * event.sensitivity
    if min(distance, DEEPEST * event.scale) > HEURISTICS.most_atoms:
        raise NoTheorem(
            f"No table holds a discrete Laplace distribution of scale={event.scale:g} at a distance of {distance:g}. "
            "Ask the rdp accountant, or describe the step by PureDP."
        )
    return once(DiscreteLaplaceCurve(event.scale, distance))


@PLD.analyses(events.RandomizedResponse)
def _(event: events.RandomizedResponse, relation: Relation) -> Loss:
    largest = pure_epsilon(event, relation)
    if largest is None or math.isinf(largest):
        return Unbounded()
    return once(Response(largest, neutral=event.categories - 2.0)) if largest > 0 else Nothing()


@PLD.analyses(events.PureDP)
def _(event: events.PureDP, relation: Relation) -> Loss:
    return once(Response(event.epsilon)) if event.epsilon > 0 else Nothing()


@PLD.analyses(events.ApproxDP)
def _(event: events.ApproxDP, relation: Relation) -> Loss:
    if event.epsilon == event.delta == 0:
        return Nothing()
    return once(Response(max(event.epsilon, 1e-12), event.delta))


@PLD.analyses(events.Exponential)
def _(event: events.Exponential, relation: Relation) -> Loss:
    if event.epsilon == 0:
        return Nothing()
    return once(BoundedRange(event.epsilon), below=(HalfRange.of(event.epsilon),))


@PLD.analyses(events.GaussianMixture)
def _(event: events.GaussianMixture, relation: Relation) -> Loss:
    if event.noise_multiplier == 0:
        return Unbounded()
    if relation is Relation.REPLACE_ONE:
        raise NoTheorem(
            "A random contribution hidden by Gaussian noise is analysed for relation='add_remove' and 'zero_out' only. "
            "Ask for one of these."
        )
    means = tuple(s / event.noise_multiplier for s in event.sensitivities)
    present = [m for m, w in zip(means, event.probabilities, strict=True) if w > 0]
    if max(present) == 0:
        return Nothing()
    if min(present) > _FARTHEST:  # for tests of half lines, which are the best ones for a single Gaussian, the others are worse
        return once(GaussianCurve(max(present)), below=(GaussianCurve(min(present)),))
    if max(present) > _REVEALED:
        raise NoTheorem(
            f"A contribution {max(present):.3g} times the noise is as good as shown, and doubles lose the digits of such a loss. "
            "Describe it by NonPrivate, or where it is rare by ApproxDP; or ask the rdp accountant."
        )
    total = math.fsum(event.probabilities)
    return once(*mirrored(GaussianMixtureCurve(means, tuple(w / total for w in event.probabilities))))


@PLD.analyses(Sampled)
def _(event: Sampled, relation: Relation) -> Loss:
    analysis = _SAMPLES.get(kind_of(event.how))
    if analysis is None:
        raise NoTheorem(
            f"The pld accountant has no analysis of {type(event.how).__name__} sampling. "
            "Describe the run by Poisson, FixedSize or MinSep, or by Everyone, which is an upper bound."
        )
    return analysis(event.of, event.how, relation)


def _poisson(of: Event, rate: float, relation: Relation) -> Loss:
    if rate == 1:
        return PLD().loss(of, relation)
    if relation is Relation.REPLACE_ONE and isinstance(of, events.Gaussian) and of.noise_multiplier > 0:
        return once(PoissonReplace(1 / of.noise_multiplier, rate))
    if relation is Relation.REPLACE_ONE and isinstance(of, (events.Laplace, events.DiscreteGaussian, events.DiscreteLaplace)):
        return replaced(of, rate)
    return _single(of, events.Poisson(rate), relation)


def _fixed_size(of: Event, how: events.FixedSize, relation: Relation) -> Loss:
    exact = zeroed(of, how.rate) if relation is Relation.ZERO_OUT and isinstance(of, events.Gaussian) and how.rate < 1 else None
    return _single(of, how, relation) if exact is None else exact


def _single(of: Event, how: events.Participation, relation: Relation) -> Loss:
    """One mechanism on a sample, by the theorem that covers it (``participation``)."""
    if not isinstance(of, (*NOISE, events.PureDP, events.ApproxDP, events.Exponential, events.RandomizedResponse)):
        raise NoTheorem(
            f"Sampling of {type(of).__name__} has no analysis: only single mechanisms can be sampled. "
            "Sample each step, or leave the sampling out, which is an upper bound."
        )
    found = sampling(Sampled(how, of), relation)
    base = PLD().leaf(of, found.relation)
    if not isinstance(base, PrivacyLoss) or found.rate == 1:
        return base
    above, below = base.parts[0][0].above[0], base.parts[0][0].below[0]
    if found.way is Way.SHOWN:
        return once(Shown(above, found.rate), below=(Shown(below, found.rate),) if found.attained else ())
    attained = mirrored(PoissonRemove(below, found.rate)) if found.attained else ()
    if found.way is Way.EXCHANGED:  # Zhu, Dong and Wang 2022, theorem 11 (b); proved again in docs/explanation/pld.md
        return once(Symmetrised(PoissonRemove(above, found.rate)), below=attained)
    return once(*mirrored(PoissonRemove(above, found.rate)), below=attained)


# One analysis for each kind of sampling, as ``participation`` distinguishes them.
_SAMPLES: dict[str, Callable[[Event, Any, Relation], Loss]] = {
    "poisson": lambda of, how, relation: _poisson(of, how.rate, relation),
    "fixed size": _fixed_size,
    "truncated": truncated,
    "balls": balls,
}

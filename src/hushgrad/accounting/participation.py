r"""Which theorem covers a way of sampling. All accountants ask here; no other module distinguishes participations.

The event states what a theorem needs: what the mechanism reveals of an *absent* record, and whether its *answers* carry names
(:class:`~hushgrad.events.Absent`, :class:`~hushgrad.events.Answers`). With delta_0 the profile of the mechanism, q the
probability that a record takes part and e^{eps'} = 1 + (e^eps - 1)/q:

| way | delta(eps) | holds for |
|---|---|---|
| ``AMPLIFIED`` | q delta_0(eps') | Poisson samples, if a record that was not drawn, or is null, is as if it were not there |
| ``EXCHANGED`` | q delta_0(eps') under replace-one, both ways | samples of a fixed size: another record takes the place |
| ``SHOWN`` | q delta_0(eps) | every relation that keeps a record's place: it is drawn in both data sets or in neither |

``SHOWN`` only uses that the record is not sampled with probability 1 - q. Mechanisms that publish who was sampled attain it.
References: Balle, Barthe and Gaboardi 2018, theorems 8 and 9; Zhu, Dong and Wang 2022, theorem 11; ``SHOWN`` is joint convexity.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from hushgrad import events
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Relation, Sampled
from hushgrad.events.composed import counted_samples


class Way(enum.Enum):
    """Which of the three statements of this module covers a sample."""

    AMPLIFIED = "amplified"
    EXCHANGED = "exchanged"
    SHOWN = "shown"


@dataclass(frozen=True)
class Sampling:
    """The theorem for a sample: its ``way``, the ``rate`` q, and the ``relation`` under which the mechanism's profile is needed.

    ``attained``: some mechanism of this kind has exactly this cost, so that it is a lower bound, too.
    """

    way: Way
    rate: float
    relation: Relation
    attained: bool = True


def kind_of(how: events.Participation) -> str:
    """``"poisson"``, ``"fixed size"``, ``"truncated"`` or ``"balls"``; :func:`simplified` has replaced all others."""
    kinds = {
        events.Poisson: "poisson",
        events.FixedSize: "fixed size",
        events.TruncatedPoisson: "truncated",
        events.BallsInBins: "balls",
    }
    return kinds.get(type(how), type(how).__name__)


def simplified(event: Sampled) -> Event | None:
    """An equivalent simpler event, if the participation allows one without an accountant; else None.

    * ``Everyone``, and Poisson at rate 1: the mechanism itself.
    * ``Once``: each record meets one step only, so a whole pass costs what one step costs (parallel composition,
      McSherry 2009, theorem 4; it holds for adaptively chosen steps, since the other steps do not depend on the record).
    * ``MinSep``: a record meets at most ``times`` steps, for the same reason.
    * ``CyclicPoisson``: a record belongs to one group, so a whole cycle costs one Poisson-sampled step.
    * ``BallsInBins`` with fresh bins: passes that are drawn independently, composed.
    * A Poisson sample of a ``GaussianMixture``: a record that is not drawn contributes 0, so it is another mixture.
    """
    how, of = event.how, event.of
    if isinstance(how, (events.Everyone, events.Once)) or (isinstance(how, events.Poisson) and how.rate == 1.0):
        return event.of
    if isinstance(how, events.Poisson) and isinstance(of, events.GaussianMixture):
        drawn = tuple(max(how.rate * weight, math.ulp(0.0)) if weight else 0.0 for weight in of.probabilities)
        return replace(of, sensitivities=(0.0, *of.sensitivities), probabilities=(1 - how.rate, *drawn))
    if isinstance(how, events.MinSep):
        return event.of * how.times
    if isinstance(how, events.CyclicPoisson):
        return Sampled(events.Poisson(how.rate), event.of)
    if isinstance(how, events.BallsInBins) and how.fresh:
        return Sampled(events.BallsInBins(bins=how.bins), event.of) * how.epochs
    return None


def unamplified(event: Event) -> Event:
    """A run over balls in bins without its amplification: each record takes part once per epoch."""
    if isinstance(event, Sampled) and isinstance(event.how, events.BallsInBins):
        return event.of * event.how.epochs
    return event


def poisson_rate(event: Event) -> float | None:
    """The rate of an event on Poisson samples, 1 if everyone takes part, None for other participations."""
    if isinstance(event, Sampled) and isinstance(event.how, events.Everyone):
        return 1.0
    return event.how.rate if isinstance(event, Sampled) and isinstance(event.how, events.Poisson) else None


def require_known_size(event: Sampled) -> None:
    """Refuse nested sampling whose inner sample relies on a number of records that the outer sample does not guarantee.

    Raises:
        NoTheorem: if a fixed-size or truncated sample is drawn from another, or a random, number of records.
    """
    given = event.how.drawn_number
    for how in counted_samples(event.of):
        if how.counted != given:
            raise NoTheorem(
                f"{how} is drawn from {how.counted} records, but {event.how} gives it "
                f"{'a random number of them' if given is None else given}. Describe the two samples by one."
            )


def sampling(event: Sampled, relation: Relation) -> Sampling:
    """The theorem that covers one step on a Poisson sample or on one of a fixed size.

    Raises:
        NoTheorem: where there is none.
    """
    how, of = event.how, event.of
    require_known_size(event)
    nothing = of.absent is events.Absent.NOTHING
    if isinstance(how, events.Poisson):
        if relation is Relation.ADD_REMOVE or (relation is Relation.ZERO_OUT and nothing):
            return Sampling(Way.AMPLIFIED, how.rate, relation)
        if nothing:  # with, without and with the other record are pairwise at most two contributions apart
            return Sampling(Way.EXCHANGED, how.rate, relation, attained=False)
        return Sampling(Way.SHOWN, how.rate, relation)
    if isinstance(how, events.FixedSize):
        return _fixed_size(how, of, relation, nothing=nothing)
    raise NoTheorem(
        f"No theorem for single mechanisms covers {type(how).__name__} samples of {type(of).__name__} here. "
        "Describe the run by Poisson, FixedSize or MinSep, or by Everyone, which is an upper bound; or ask pld, which knows more."
    )


def _fixed_size(how: events.FixedSize, of: Event, relation: Relation, *, nothing: bool) -> Sampling:
    if relation is Relation.ADD_REMOVE:
        raise NoTheorem(
            "Samples of a fixed size keep the size of the data set public, so they have no analysis under add/remove. "
            "Ask with relation='replace_one', or with relation='zero_out'."
        )
    if how.rate == 1.0:
        return Sampling(Way.SHOWN, 1.0, relation)
    if nothing and not (of.stated and relation is Relation.ZERO_OUT):  # a null record is a record: replace-one covers zero-out
        return Sampling(Way.EXCHANGED, how.rate, Relation.REPLACE_ONE, attained=relation is Relation.REPLACE_ONE)
    if relation is Relation.REPLACE_ONE and of.answers is events.Answers.ANONYMOUS:
        # several answers without names hide each other, so a mechanism of single answers need not be as bad as its curve
        alone = how.size == 1 or not of.single_answers
        return Sampling(Way.EXCHANGED, how.rate, relation, attained=alone)
    # A guarantee that is stated for zero-out says nothing of one record against another, which takes the place of one not drawn.
    # If nothing is stated about names, the worse case (with names) is assumed; a lower bound is then not known.
    return Sampling(Way.SHOWN, how.rate, relation, attained=of.answers is not events.Answers.UNKNOWN and not nothing)

"""Participation patterns: how often, and how close together, one record can take part."""

from __future__ import annotations

from dataclasses import dataclass

from hushgrad import _check
from hushgrad.errors import NoTheorem
from hushgrad.events import BallsInBins, CyclicPoisson, Everyone, MinSep, Once, Participation


@dataclass(frozen=True)
class Pattern:
    """At most ``times`` participations, any two at least ``gap`` steps apart; in ``fixed_order`` exactly multiples of it."""

    gap: int
    times: int
    fixed_order: bool = False


def pattern_of(participation: Participation, steps: int) -> Pattern:
    """What ``participation`` promises in ``steps`` steps, whatever its random choices are.

    | participation | gap | times | fixed order |
    |---|---|---|---|
    | ``Once`` | steps | 1 | |
    | ``MinSep(gap, times)`` | gap | as many as fit | no |
    | ``Everyone`` | 1 | steps | |
    | ``CyclicPoisson(period)`` | period | one per cycle | yes: a record's group comes every ``period`` steps |
    | ``BallsInBins(bins, epochs)`` | bins | epochs | yes |
    | ``BallsInBins(bins, epochs, fresh=True)`` | 1 | epochs | no: the last bin of a pass may be followed by the first of the next |

    Poisson and fixed-size batches keep no such promise: a record may be drawn in any two consecutive steps.
    """
    if isinstance(participation, Once):
        return Pattern(steps, 1)
    if isinstance(participation, Everyone):
        return Pattern(1, steps)
    if isinstance(participation, MinSep):
        gap, times = participation.gap, participation.times
    elif isinstance(participation, CyclicPoisson):
        gap, times = participation.period, steps
    elif isinstance(participation, BallsInBins):
        gap, times = participation.bins, participation.epochs
        if steps > gap * times:
            remedy = "Plan no more steps, or more epochs: later steps would meet records again."
            _check.fail("steps", steps, f"to be at most bins x epochs = {gap * times}", remedy)
        if participation.fresh:
            return Pattern(1, min(times, -(-steps // gap)))
    else:
        raise NoTheorem(
            f"No theorem bounds how often a record takes part under {participation}, so correlated noise has no sensitivity. "
            "Use a round-robin sampler (MinSep), cyclic Poisson sampling with a banded mechanism, or independent noise."
        )
    gap = min(gap, steps)
    return Pattern(gap, min(times, -(-steps // gap)), fixed_order=not isinstance(participation, MinSep))

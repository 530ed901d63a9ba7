"""The frontier that both surveys of a proof allow: where each value that examples share is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from hushgrad.clipping.layout import ROWS, Kind, Layout
from hushgrad.clipping.proof.graph import Frontier, Trail
from hushgrad.clipping.proof.shares import has_formula
from hushgrad.clipping.proof.structure import Number, Place
from hushgrad.clipping.proof.survey import Stage
from hushgrad.clipping.proof.survey_notes import SurveyNotes
from hushgrad.clipping.thresholds import MOST_CLIMBS
from hushgrad.errors import CaptureError

__all__ = ["frontier_of"]


def frontier_of(
    stage: Stage, places: dict[Number, Place], first: SurveyNotes, second: SurveyNotes
) -> tuple[Frontier, frozenset[str]]:
    """The frontier of what several examples share, and the parameters that are used outside of captured modules."""
    shared = {number for number, place in places.items() if place.layout.kind is Kind.SHARED}
    bare = first.bare | second.bare
    if not shared and not bare:
        return Frontier({}, frozenset()), bare
    asks = [partial(survey.frontier, shared) for survey in (first, second)]
    try:
        made = _above(asks, frozenset(), frozenset())
    except LookupError as error:
        raise CaptureError(_unreadable(stage, shared, bare, str(error))) from None
    return _higher(asks, made), bare


# For each survey: the frontier above some paths, and above others where the layout is regular.
_Asks = Sequence[Callable[[frozenset[Trail], frozenset[Trail]], Frontier]]


def _above(asks: _Asks, below: frozenset[Trail], chance: frozenset[Trail]) -> Frontier:
    """The frontier that both surveys allow, above these paths, and above ``chance`` where it is regular. Raises LookupError."""
    while True:
        made = [ask(below, chance) for ask in asks]
        ends = {way for f in made for way in f.ends}
        again = ends & (made[0].mixed | made[1].mixed)  # no path ends where examples meet in the other run
        passed = ends & (made[0].ways | made[1].ways)  # nor, above ``chance``, where the other run climbs on
        again |= {way for way in passed if any(way[: len(t)] == t for t in chance)}
        if not again:
            break
        below |= again
    agreed = {
        trail: tuple(
            None if a is None else _agreed(*(f.fits.get(trail, ())[k : k + 1] for f in made)) for k, a in enumerate(layouts)
        )
        for trail, layouts in made[0].ends.items()
    }
    return Frontier(agreed, made[0].ways | (made[1].ways - agreed.keys()), made[0].mixed | made[1].mixed)


def _agreed(mine: Iterable[frozenset[Layout]], its: Iterable[frozenset[Layout]]) -> Layout:
    """The layout that both surveys allow, if there is exactly one; otherwise rows are tagged in each step."""
    both = [a for own in mine for a in own if any(a[:2] == b[:2] for other in its for b in other)]
    return both[0] if len(both) == 1 else ROWS


def _higher(asks: _Asks, made: Frontier) -> Frontier:
    """A frontier above this one whose layouts are regular, if there is one.

    Below a maximum over positions it may happen that no two examples meet: then a sum over the examples looks like rows of single ones, and
    the NaN loss of one example would reach the others.
    """
    above, chance = made, frozenset[Trail]()
    for _ in range(MOST_CLIMBS):
        more = {way for way, layouts in above.ends.items() if ROWS in layouts and not has_formula(*way[-1], layouts)}
        if not more:
            break
        chance |= more
        try:
            above = _above(asks, chance, chance)
        except LookupError:
            break
        if not any(ROWS in layouts for layouts in above.ends.values()):
            return above
    return made


def _unreadable(stage: Stage, shared: set[Number], names: frozenset[str], node: str) -> str:
    where = sorted({n[0].path or type(stage.model).__name__ for n in shared} | names)
    return (
        f"{', '.join(where[:3])}: its gradient cannot be split by example; examples meet in {node} and are not apart above it. Take "
        "statistics within each example, or make the module's parameters a part of what runs for each example (a rule VmapTree)."
    )

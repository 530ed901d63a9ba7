"""The frontier that both surveys of a proof allow: where each value that examples share is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from hushgrad.clipping.layout import ROWS, Kind, Layout
from hushgrad.clipping.proof.graph import Frontier, Trail
from hushgrad.clipping.proof.structure import Number, Place
from hushgrad.clipping.proof.survey import Stage
from hushgrad.clipping.proof.survey_notes import SurveyNotes
from hushgrad.clipping.thresholds import MOST_CLIMBS
from hushgrad.errors import CaptureError


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
        made = _above(asks, frozenset())
    except LookupError as error:
        raise CaptureError(_unreadable(stage, shared, bare, str(error))) from None
    return _above_sums(asks, made), bare


_Asks = Sequence[Callable[[frozenset[Trail]], Frontier]]  # for each survey: the frontier above these paths


def _above(asks: _Asks, below: frozenset[Trail]) -> Frontier:
    """The frontier that both surveys allow, above these paths. Raises LookupError."""
    while True:
        made = [ask(below) for ask in asks]
        meet = {way for f in made for way in f.ends} & (made[0].mixed | made[1].mixed)
        if not meet:  # no path ends where examples meet in the other run
            break
        below |= meet
    ends = {
        trail: tuple(
            None if a is None else _agreed(*(f.fits.get(trail, ())[k : k + 1] for f in made)) for k, a in enumerate(layouts)
        )
        for trail, layouts in made[0].ends.items()
    }
    same = {way: sizes for way, sizes in made[0].sizes.items() if made[1].sizes.get(way) == sizes}
    return Frontier(ends, made[0].ways | (made[1].ways - ends.keys()), made[0].mixed | made[1].mixed, sizes=same)


def _agreed(mine: Iterable[frozenset[Layout]], its: Iterable[frozenset[Layout]]) -> Layout:
    """The layout that both surveys allow, if there is exactly one; otherwise rows are tagged in each step."""
    both = [a for own in mine for a in own if any(a[:2] == b[:2] for other in its for b in other)]
    return both[0] if len(both) == 1 else ROWS


def _above_sums(asks: _Asks, made: Frontier) -> Frontier:
    """A frontier above this one at which no gradient has the same sizes for few examples as for the batch, if there is one.

    Such a gradient is a sum over the examples, even if each number in it has one owner: below a maximum over positions it may happen that
    no two examples meet. Read as rows of single examples, the NaN loss of one would reach the others.
    """
    above, below = made, frozenset[Trail]()
    for _ in range(MOST_CLIMBS):
        if not above.sizes:
            return above
        below |= above.sizes.keys()
        try:
            above = _above(asks, below)
        except LookupError:
            break
    return made


def _unreadable(stage: Stage, shared: set[Number], names: frozenset[str], node: str) -> str:
    where = sorted({n[0].path or type(stage.model).__name__ for n in shared} | names)
    return (
        f"{', '.join(where[:3])}: its gradient cannot be split by example; examples meet in {node} and are not apart above it. Take "
        "statistics within each example, or make the module's parameters a part of what runs for each example (a rule VmapTree); and leave "
        "out hooks that change gradients (register_hook, register_prehook)."
    )

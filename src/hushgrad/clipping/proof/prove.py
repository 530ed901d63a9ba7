"""Proves one structure: two surveys by tags that must agree, the frontier of shared values, and the seal.

1. The model runs without randomness over the batch, and over two or three of its examples alone, under one reading of the inputs after
   the other until these examples give what they give in the batch. Comparing the two runs' output sizes gives the outputs' layouts.
2. In both runs tags find the owner of each row of each call. A layout counts if both agree; rows without a rule are tagged in each step.
   If the few examples have no gradient where others have one, some of these others are added to them.
3. What belongs to several examples is read where the graph first meets them: the frontier.
4. The seal (:mod:`hushgrad.clipping.proof.seal`) compares with single examples, and removes and replaces examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hushgrad.clipping.layout import DEAD, MIXED, ROWS, SHARED, Kind, Layout, layouts_of
from hushgrad.clipping.proof.agreed_frontier import frontier_of
from hushgrad.clipping.proof.batch_outputs import batch_outputs
from hushgrad.clipping.proof.call_trace import KnownTraces
from hushgrad.clipping.proof.choose_reading import fit_of
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.graph import Frontier
from hushgrad.clipping.proof.inputs import Reading, leaves
from hushgrad.clipping.proof.row_moves import Move, is_fixed
from hushgrad.clipping.proof.shares import has_formula
from hushgrad.clipping.proof.structure import NATIVE, Number, Pattern, Place, Structure, pattern, sizes_of
from hushgrad.clipping.proof.survey import Run, Stage, rows_of, run_some, surveyed
from hushgrad.clipping.proof.survey_notes import CallNotes, SurveyNotes, not_again, notes_of, who_show
from hushgrad.clipping.site import Site
from hushgrad.clipping.thresholds import MUCH_LARGER, crowd

_FLAT = (Kind.MAJOR, Kind.MINOR)


def prove(stage: Stage, inputs: Any, examples: int) -> tuple[Structure, bool] | None:
    """The structure of a pass over these inputs, not yet sealed, and whether none of its operations can move rows elsewhere.

    None if no reading of the inputs explains the outputs. Only one graph of the size of a step's is alive at a time.
    """
    whole = stage.run(inputs, examples)
    few = 2 if examples == 3 else 3
    which = torch.tensor([0, examples - 1, examples // 2][:few])
    fit = fit_of(stage, inputs, whole, which, examples)
    if fit is None:
        return None
    reading, layouts, some = fit
    del fit
    survey = surveyed(whole, layouts, examples)
    beside, fixed = batch_outputs(stage, reading, inputs, survey, layouts), is_fixed(survey.graph)
    first = notes_of(stage, survey, layouts, partial(stage.run, inputs, examples))
    stage.kept = whole if examples >= MUCH_LARGER * few and first.is_plain and stage.keeps_nothing() else None
    del whole, survey
    alone = partial(_alone, stage, reading, inputs, layouts, examples=examples)
    second = alone(which, some)
    del some
    others = who_show(first, second)
    if others:
        which = torch.tensor(
            [*which.tolist(), *others, *others[: len(which) + len(others) == examples]]
        )  # not as many as the batch
        second = alone(which)
    return _structure(stage, reading, inputs, layouts, first, second, beside), fixed


def _alone(
    stage: Stage,
    reading: Reading,
    inputs: Any,
    layouts: tuple[Layout | None, ...],
    which: Tensor,
    run: Run | None = None,
    *,
    examples: int,
) -> SurveyNotes:
    """The survey of a pass over some of the examples, without a search for weak paths: the batch's survey has done that."""
    again = partial(run_some, stage, reading, inputs, which, examples)
    run = run or again()
    if run is None:
        raise not_again()
    return notes_of(stage, surveyed(run, layouts, len(which), halves=False), layouts, again)


# From surveys to a structure ----------------------------------------------------------------------------------------------


def _structure(
    stage: Stage,
    reading: Reading,
    inputs: Any,
    layouts: tuple[Layout | None, ...],
    first: SurveyNotes,
    second: SurveyNotes,
    around: tuple[bool, ...],
) -> Structure:
    ways = () if stage.opening is None else stage.opening.ways
    places = {number: _place(number, first, second) for number in first.owners}
    uneven = bool(ways) or reading.uneven or any(call.packed for call in first.calls.values())
    if uneven:  # equal numbers of rows may be coincidence
        places = {n: Place(ROWS) if p.layout.kind in _FLAT and not p.layout.dim else p for n, p in places.items()}
    frontier, bare = frontier_of(stage, places, first, second)
    sizes = sizes_of(leaves(inputs), reading, first.examples)
    assert sizes is not None
    shapes = {n: _shapes(n[0], places[n], call, second.calls.get(n)) for n, call in first.calls.items()}
    faint = [n for n, p in places.items() if p.layout.kind is Kind.SHARED and _faint(first, n) | _faint(second, n)]
    places |= {n: places[n]._replace(faint=True) for n in faint}
    moves = _moves(first, second)
    flat = any(x is not None and x.kind in _FLAT for found in _layouts_in(frontier, moves) for x in found)
    if (uneven and flat) or reading.tells_nothing(inputs, first.examples):
        moves = None
    # There are no examples below the frontier, unless they met a shared value behind a gradient that was 0 for all.
    fragile = bool(frontier.ends) and (moves != () or frontier.ways != frontier.mixed)
    fragile = fragile or any(not has_formula(*trail[-1], ends) for trail, ends in frontier.ends.items())
    return Structure(
        reading=reading,
        sizes=sizes,
        exits=layouts,
        places=places,
        shapes=shapes,
        frontier=frontier,
        bare=bare,
        order=first.order,
        plain=all(p.native for p in places.values()) and not bare and moves == () and not ways,
        partly=bool(faint),
        nodes=frozenset({first.nodes}) if first.nodes == second.nodes else None,
        moves=moves,
        around=around,
        most=crowd(first.examples, first.numbers),
        precisions=frozenset(stage.precisions()),
        fragile=fragile,
        routed=any(p.layout.kind is Kind.ROWS for p in places.values()),
        ways=ways,
        told=reading.uneven or bool(reading.even),
        traces=KnownTraces(frozenset() if first.trace == second.trace else None),
    )


def _layouts_in(frontier: Frontier, moves: tuple[Move, ...] | None) -> Iterator[tuple[Layout | None, ...]]:
    """All layouts by which a pass is read between its calls."""
    yield from frontier.ends.values()
    for move in moves or ():
        yield from move[1:]


def _shapes(site: Site, place: Place, call: CallNotes, other: CallNotes | None) -> tuple[Pattern, ...]:
    """The sizes of a call's outputs that do not depend on the data; ``other`` is the same call over fewer examples."""
    dims = site.rule.dims(site.module, len(call.shapes))
    made = []
    for k, shape in enumerate(call.shapes):
        layout = SHARED if call.packed else Layout(Kind.DIM, dims[k]) if place.native else place.layout
        made.append(pattern(layout, shape, None if other is None or len(other.shapes) <= k else other.shapes[k]))
    return tuple(made)


def _moves(first: SurveyNotes, second: SurveyNotes) -> tuple[Move, ...] | None:
    """The layouts around nodes that move rows by an index; None if there is no rule."""
    if [move.name for move in first.moves] != [move.name for move in second.moves]:
        return None
    made = []
    for mine, its in zip(first.moves, second.moves, strict=True):
        outputs, inputs = (
            [_carried(a, b, first.examples, second.examples) for a, b in zip(own, other, strict=False)]
            for own, other in zip(mine[1:], its[1:], strict=True)
        )
        if SHARED in outputs or SHARED in inputs or (any(inputs) and not any(outputs)):
            return None
        made.append(Move(mine.name, tuple(outputs), tuple(inputs)))
    return tuple(made)


def _carried(own: Owners, other: Owners, examples: int, few: int) -> Layout | None:
    """The layout of the examples; None if there are none or all share the value; SHARED if not even rows have a rule."""
    if own.each is None or other.each is None or not (own.proved and other.proved) or not (own.clean or other.clean):
        return None
    layout = _layout(own, [other], examples, few)
    return None if layout is DEAD else layout


# Places of calls ----------------------------------------------------------------------------------------------------------


def _place(number: Number, first: SurveyNotes, second: SurveyNotes) -> Place:
    """Where a call has its examples, if both surveys agree."""
    site, call = number[0], first.calls[number]
    outputs = [
        DEAD
        if not call.reached[k]
        else _layout(
            own, [] if number not in second.owners else second.owners[number][k : k + 1], first.examples, second.examples
        )
        for k, own in enumerate(first.owners[number])
    ]
    alive = [layout for layout in outputs if layout is not DEAD]
    if not alive:
        return Place(DEAD)
    dims = site.rule.dims(site.module, len(outputs))
    if call.packed or all(o is DEAD or (o.kind is Kind.DIM and o.dim == d) for o, d in zip(outputs, dims, strict=True)):
        return NATIVE
    other = second.calls.get(number)
    constant = outputs[0].kind is Kind.ROWS and other is not None and other.shapes == call.shapes  # single owners only by chance
    if (
        len(outputs) == 1
        and not constant
        and outputs[0].kind is not Kind.SHARED
        and _usable(site, outputs[0], len(call.shapes[0]))
    ):
        return Place(outputs[0])
    return Place(SHARED)


def _faint(survey: SurveyNotes, number: Number) -> bool:
    """Whether no more than rounding came back."""
    return not any(o.proved for o in survey.owners.get(number, []))


def _usable(site: Site, layout: Layout, rank: int) -> bool:
    if site.rule.positions:
        return layout.dim < rank - site.rule.features(site.module)
    return layout.dim == 0


def _layout(own: Owners, other: list[Owners], examples: int, few: int) -> Layout:
    """The layout that both surveys allow; ROWS if whole rows have owners without a known rule."""
    if own.each is None:
        return DEAD
    if not own.clean:
        return SHARED
    mine = layouts_of(own.each, examples)
    if other and not other[0].clean:
        routed = other[0].silent and not any(layout.regular for layout in mine)  # an expert that got no rows there
        if not routed:
            return SHARED
        other = []
    its = layouts_of(other[0].each, few) if other and other[0].each is not None else []
    both = [a for a in mine if a.regular and any(a[:2] == b[:2] for b in its)]
    if len(both) == 1:
        return both[0]
    rows = rows_of(own, own.each.shape).reshape([-1] + [1] * (own.each.dim() - 1))
    return ROWS if bool(((own.each == rows) | ((own.each < 0) & (own.each != MIXED))).all()) else SHARED

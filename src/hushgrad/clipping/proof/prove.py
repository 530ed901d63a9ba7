"""The proof of one structure: two surveys by tags that must agree, the frontier of what is shared, and the seal.

1. The model runs quietly over the batch, and over two or three of its examples alone, under each reading of the inputs until these
   examples give what they give in the batch: then the reading is right, and the outputs' layouts follow from how they grow.
2. In both runs tags say whose each call's rows are. A layout counts if both say the same; rows that follow no rule are tagged in each step.
3. What belongs to several examples is read where the graph first meets them.
4. The seal (:mod:`hushgrad.clipping.proof.seal`): single examples, examples left out and replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hushgrad.clipping._torch import accumulated
from hushgrad.clipping.call import Call
from hushgrad.clipping.layout import DEAD, NOBODY, ROWS, SHARED, Kind, Layout, layouts_of
from hushgrad.clipping.proof.graph import Frontier, Graph, Source, find
from hushgrad.clipping.proof.inputs import Reading, leaves, readings
from hushgrad.clipping.proof.structure import NATIVE, Number, Place, Structure, numbered, sizes_of
from hushgrad.clipping.proof.tags import Exit, Owners, tagged
from hushgrad.clipping.runs import same
from hushgrad.clipping.site import Site
from hushgrad.errors import CaptureError

__all__ = ["Run", "Stage", "Survey", "exits_of", "prove", "rows_of", "surveyed"]


class Run(NamedTuple):
    """One pass over some examples: its outputs, and the calls of the sites."""

    outputs: list[Tensor]
    calls: list[Call]


class Stage(Protocol):
    """What a proof needs of the capture."""

    model: nn.Module

    def run(self, inputs: Any, examples: int, structure: Structure | None = None) -> Run:
        """A pass under the capture."""

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a trained parameter."""


class Survey(NamedTuple):
    """A run with its graph; the owners by call and output."""

    run: Run
    examples: int
    exits: list[Exit]
    graph: Graph
    owners: dict[Number, list[Owners]]


def prove(stage: Stage, inputs: Any, examples: int) -> tuple[Structure, Survey] | None:
    """The structure of a pass over these inputs, still to be sealed; None if no reading of the inputs explains the outputs."""
    whole = stage.run(inputs, examples)
    few = 2 if examples == 3 else 3
    which = torch.tensor([0, examples - 1, examples // 2][:few])
    for reading in readings(inputs, examples):
        some = _run_some(stage, reading, inputs, which, examples)
        layouts = None if some is None else _exits(whole, some, which, examples)
        if some is not None and layouts is not None:
            first, second = (surveyed(r, layouts, n) for r, n in ((whole, examples), (some, few)))
            return _structure(stage, reading, inputs, layouts, first, second), first
    return None


def _run_some(stage: Stage, reading: Reading, inputs: Any, which: Tensor, examples: int) -> Run | None:
    try:
        return stage.run(reading.only(inputs, which, examples), len(which))
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001 (whatever a model says of inputs that were cut in the wrong place)
        return None


# The outputs ------------------------------------------------------------------------------------------------------------


def _exits(whole: Run, some: Run, which: Tensor, examples: int) -> tuple[Layout | None, ...] | None:
    """The layout of each output, None for one without examples; None altogether if the examples alone give something else."""
    if len(whole.outputs) != len(some.outputs):
        return None
    found = []
    for a, b in zip(whole.outputs, some.outputs, strict=True):
        layout = _grown(a, b, which, examples)
        if layout is False:
            return None
        found.append(layout)
    return tuple(found) if any(found) or all(y.dim() == 0 for y in whole.outputs) else None


def _grown(a: Tensor, b: Tensor, which: Tensor, examples: int) -> Any:
    """The layout under which the few examples have what they have in the batch; None: no dimension grows; False: there is no such."""
    grown = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
    if a.dim() != b.dim() or len(grown) > 1:
        return False
    if not grown:
        return None
    d, few = grown[0], len(which)
    if a.shape[d] % examples or b.shape[d] % few or a.shape[d] // examples != b.shape[d] // few:
        return None
    factor = a.shape[d] // examples
    kinds = [Kind.DIM] if factor == 1 else [Kind.MAJOR, Kind.MINOR]
    for layout in (Layout(kind, d, factor) for kind in kinds):
        if same(layout.only(a, which, examples), b):
            return layout
    return False


def exits_of(run: Run, layouts: Sequence[Layout | None]) -> list[Exit]:
    """Where cotangents enter; of a model that returns only its loss, the last call that has the examples first."""
    return [
        Exit(get_gradient_edge(y), y.detach(), layout)
        for y, layout in zip(run.outputs, layouts, strict=True)
        if layout is not None and y.requires_grad
    ]


# Surveys ----------------------------------------------------------------------------------------------------------------


def surveyed(run: Run, layouts: Sequence[Layout | None], examples: int) -> Survey:
    """Tags over a run."""
    exits = exits_of(run, layouts)
    if not exits:
        raise CaptureError(
            "No output of the model has the examples in it, so it cannot be told whose gradient is whose. Return the logits, or one loss "
            "for each example, beside or instead of the mean."
        )
    graph = Graph(e.edge for e in exits)
    calls = numbered(run.calls)
    places = [(n, k, e) for n, call in calls.items() for k, e in enumerate(call.edges) if e is not None and e.node in graph.nodes]
    found, _ = tagged(exits, [e for _, _, e in places], [], examples) if places else ([], {})
    owners: dict[Number, list[Owners]] = {n: [Owners(None, False) for _ in call.shapes] for n, call in calls.items()}
    for (n, k, _), made in zip(places, found, strict=True):
        each = made.each  # of a view, the gradient of what it is a view of was read
        owners[n][k] = made if each is None else Owners(each.reshape(calls[n].shapes[k]), made.proved)
    return Survey(run, examples, exits, graph, owners)


def one_owner_each(each: Tensor) -> bool:
    """Whether every row of dimension 0 has one owner, where a gradient reached it at all."""
    rows = each.flatten(1) if each.dim() > 1 else each.unsqueeze(1)
    top = rows.amax(1, keepdim=True)
    return bool(((rows == top) | (rows == NOBODY)).all())


def rows_of(owners: Owners, shape: Sequence[int]) -> Tensor:
    """The example of each row of dimension 0, -1 for rows that no gradient reached."""
    if owners.each is None or not owners.proved:
        return torch.full(tuple(shape[:1]), NOBODY)
    each = owners.each
    return each.flatten(1).amax(1) if each.dim() > 1 else each


# From surveys to a structure ----------------------------------------------------------------------------------------------


def _structure(
    stage: Stage, reading: Reading, inputs: Any, layouts: tuple[Layout | None, ...], first: Survey, second: Survey
) -> Structure:
    places = {number: _place(number, first, second) for number in first.owners}
    frontier, bare = _frontier(stage, places, first, second)
    sizes = sizes_of(leaves(inputs), reading, first.examples)
    assert sizes is not None
    calls = numbered(first.run.calls)
    plain = all(p.native for p in places.values()) and not bare
    unproved = [n for n, p in places.items() if p.layout.kind is Kind.SHARED and _faint(first, n) | _faint(second, n)]
    ranks = {number: tuple(len(s) for s in call.shapes) for number, call in calls.items()}
    return Structure(
        reading, sizes, layouts, places, ranks, frontier, bare, [c.site for c in first.run.calls], plain, bool(unproved)
    )


def _place(number: Number, first: Survey, second: Survey) -> Place:
    """Where a call has its examples, if both surveys say so."""
    site, call = number[0], numbered(first.run.calls)[number]
    reached = [e is not None and e.node in first.graph.nodes for e in call.edges]
    outputs = [
        DEAD
        if not reached[k]
        else _layout(
            own, [] if number not in second.owners else second.owners[number][k : k + 1], first.examples, second.examples
        )
        for k, own in enumerate(first.owners[number])
    ]
    alive = [layout for layout in outputs if layout is not DEAD]
    if not alive:
        return Place(DEAD)
    dims = site.rule.dims(site.module, len(outputs))
    if _packed(call) or all(o is DEAD or (o.kind is Kind.DIM and o.dim == d) for o, d in zip(outputs, dims, strict=True)):
        return NATIVE
    if len(outputs) == 1 and outputs[0].kind is not Kind.SHARED and _usable(site, outputs[0], len(call.shapes[0])):
        return Place(outputs[0])
    return Place(SHARED)


def _faint(survey: Survey, number: Number) -> bool:
    """No gradient worth the name came back."""
    return not any(o.proved for o in survey.owners.get(number, []))


def _packed(call: Call) -> bool:
    """A packed sequence says itself whose its rows are; its rule reads that, and the seal checks the rule."""
    from torch.nn.utils.rnn import PackedSequence

    return any(isinstance(value, PackedSequence) for value in call.args)


def _usable(site: Site, layout: Layout, rank: int) -> bool:
    if site.rule.positions:
        return layout.dim < rank - site.rule.features(site.module)
    return layout.dim == 0


def _layout(own: Owners, other: list[Owners], examples: int, few: int) -> Layout:
    """The layout that both surveys allow; ROWS if whole rows have owners but no rule is known for them."""
    if own.each is None:
        return DEAD
    if not own.clean:
        return SHARED
    mine = layouts_of(own.each, examples)
    if other and (other[0].each is None or not other[0].clean):
        return SHARED
    its = layouts_of(other[0].each, few) if other and other[0].each is not None else []
    both = [a for a in mine if a.regular and any(a[:2] == b[:2] for b in its)]
    if len(both) == 1:
        return both[0]
    rows = rows_of(own, own.each.shape).reshape([-1] + [1] * (own.each.dim() - 1))
    return ROWS if bool(((own.each == rows) | (own.each == NOBODY)).all()) else SHARED


def _frontier(stage: Stage, places: dict[Number, Place], first: Survey, second: Survey) -> tuple[Frontier, frozenset[str]]:
    shared = {number for number, place in places.items() if place.layout.kind is Kind.SHARED}
    made = []
    bare: set[str] = set()
    for survey in (first, second):
        edges, names = sources_of(stage, survey.run, survey.graph, shared)
        bare |= names
        try:
            made.append(find(survey.graph, survey.exits, edges, survey.examples))
        except LookupError as error:
            raise CaptureError(_unreadable(stage, shared, names, str(error))) from None
    ends = {
        trail: tuple(
            None if a is None else a if b is not None and a[:2] == b[:2] else ROWS
            for a, b in _both(layouts, made[1].ends.get(trail))
        )
        for trail, layouts in made[0].ends.items()
    }
    return Frontier(ends, made[0].ways), frozenset(bare)


def _both(mine: tuple[Any, ...], its: tuple[Any, ...] | None) -> list[tuple[Any, Any]]:
    return [(a, its[k] if its is not None and k < len(its) else None) for k, a in enumerate(mine)]


def sources_of(stage: Stage, run: Run, graph: Graph, shared: set[Number]) -> tuple[list[Source], set[str]]:
    """The outputs of shared calls, and the parameters that are used by no site."""
    calls = numbered(run.calls)
    edges = [
        Source(f"{n[0].path} {n[1]}", e)
        for n in calls
        if n in shared
        for e in calls[n].edges
        if e is not None and e.node in graph.nodes
    ]
    names = set()
    for node in graph.leaves:
        leaf = accumulated(node)
        name = None if leaf is None else stage.name_of(leaf)
        if name is not None:
            names.add(name)
            edges.append(Source(name, GradientEdge(node, 0)))
    return edges, names


def _unreadable(stage: Stage, shared: set[Number], names: set[str], node: str) -> str:
    where = sorted({n[0].path or type(stage.model).__name__ for n in shared} | names)
    return (
        f"{', '.join(where[:3])}: its gradient cannot be split by example; examples meet in {node} and are not apart above it. Take "
        "statistics within each example, or make the module's parameters a part of what runs for each example (a rule VmapTree)."
    )

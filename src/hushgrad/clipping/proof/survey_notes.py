"""What a proof remembers of a survey after its graph is freed.

A graph holds everything that a pass saved for its gradients: as much as a training step. A proof compares two passes, so it records of each
what it will compare, frees the graph, and repeats the pass if it needs the graph again. No two graphs are alive at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import accumulated
from hushgrad.clipping.layout import Layout, layouts_of, stored
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.graph import Frontier, Graph, Source, Trail, find
from hushgrad.clipping.proof.row_moves import moves_of, owners_at
from hushgrad.clipping.proof.structure import Number, is_packed, numbered
from hushgrad.clipping.proof.survey import Names, Run, Survey, graph_of
from hushgrad.clipping.site import Site
from hushgrad.clipping.thresholds import MOST_SHOWN
from hushgrad.errors import CaptureError


class CallNotes(NamedTuple):
    """For one call: its outputs' shapes, and which of them lead to an output of the model."""

    shapes: list[torch.Size]
    reached: list[bool]
    packed: bool


class MoveNotes(NamedTuple):
    """For a node that moves rows by an index: the owners of what arrives at it, and of what it sends down."""

    name: str
    arrives: list[Owners]
    sends: list[Owners]


class SurveyNotes(NamedTuple):
    """A survey without its graph."""

    names: Names
    examples: int
    numbers: int  # total size of all outputs
    owners: dict[Number, list[Owners]]  # by call and output
    calls: dict[Number, CallNotes]
    order: list[Site]  # of the calls
    nodes: int
    trace: int
    moves: list[MoveNotes]
    bare: frozenset[str]  # parameters used outside of sites
    layouts: Sequence[Layout | None]  # of the outputs
    again: Callable[[], Run | None]

    @property
    def is_plain(self) -> bool:
        """Whether each call keeps its examples separate, and no parameter is used outside of a captured module."""
        return (
            not self.bare
            and not self.moves
            and all(o.clean for owners in self.owners.values() for o in owners if o.each is not None)
        )

    def frontier(self, shared: set[Number], below: frozenset[Trail]) -> Frontier:
        """The frontier of these calls and of the bare parameters, above these paths. Raises LookupError."""
        run = self.again()
        if run is None or (run.nodes, run.order, [c.site for c in run.calls]) != (self.nodes, self.trace, self.order):
            raise not_again()
        exits, graph = graph_of(run, self.layouts)
        return find(graph, exits, sources_of(self.names, run, graph, shared)[0], self.examples, below)


def not_again(where: str = "") -> CaptureError:
    """The error for a pass that differs when it is repeated; ``where``: the node that shows it."""
    return CaptureError(
        f"The model does something else each time it is called, or for other examples{where and f', at {where}'}, so its gradients cannot "
        "be attributed. Let every batch take the same way: choose for single examples by torch.where or a mask, not by a branch."
    )


def notes_of(names: Names, survey: Survey, layouts: Sequence[Layout | None], again: Callable[[], Run | None]) -> SurveyNotes:
    """What to remember of a survey; ``again`` repeats its pass."""
    run, graph = survey.run, survey.graph
    calls = {
        number: CallNotes(call.shapes, [e is not None and e.node in graph.nodes for e in run.edges[call]], is_packed(call))
        for number, call in numbered(run.calls).items()
    }
    movers = moves_of(graph)
    at = owners_at(movers, survey.exits, survey.examples) if movers else []
    moves = [MoveNotes(node.name(), *owners) for node, owners in zip(movers, at, strict=True)]
    bare = frozenset(sources_of(names, run, graph, set())[1])
    order = [c.site for c in run.calls]
    numbers = sum(y.numel() for y in run.outputs)
    return SurveyNotes(
        names, survey.examples, numbers, survey.owners, calls, order, run.nodes, run.order, moves, bare, layouts, again
    )


def who_show(batch: SurveyNotes, some: SurveyNotes) -> list[int]:
    """A few examples of the batch that have a gradient at calls to which none came back in a survey of some other examples."""
    hidden = [
        set(stored(own.each).unique().tolist())
        for number, owners in batch.owners.items()
        for own, other in zip(owners, some.owners.get(number, ()), strict=False)
        if own.each is not None and own.clean and not other.proved and layouts_of(own.each, batch.examples)[0].regular
    ]
    found: list[int] = []
    while hidden and len(found) < MOST_SHOWN:
        counts = Counter(i for each in hidden for i in sorted(each) if i >= 0)
        found += [i for i, _ in counts.most_common(1)]
        hidden = [each for each in hidden if counts and found[-1] not in each]
    return found


def sources_of(stage: Names, run: Run, graph: Graph, shared: set[Number]) -> tuple[list[Source], set[str]]:
    """The outputs of shared calls, and the parameters that are used outside of captured modules."""
    calls = numbered(run.calls)
    edges = [
        Source(f"{n[0].path} {n[1]}", e)
        for n in calls
        if n in shared
        for e in run.edges[calls[n]]
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

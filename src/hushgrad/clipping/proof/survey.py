"""Surveys: a pass, its graph, and, by tags, the owners of the rows of gradient that come back to each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hushgrad.clipping.layout import MIXED, NOBODY, Kind, Layout
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.graph import Graph
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.rounding import same_as_made
from hushgrad.clipping.proof.structure import Number, Structure, is_packed, numbered
from hushgrad.clipping.proof.tags import Exit, tagged
from hushgrad.clipping.proof.variable_lengths import Opening
from hushgrad.clipping.runs import UNCALLABLE
from hushgrad.clipping.site import Call
from hushgrad.errors import CaptureError


class Run(NamedTuple):
    """One pass over some examples: its outputs, the calls of the sites, and the graph edges of each call's outputs.

    The graph's nodes refer to the calls; if calls referred to nodes, the cycle would keep everything that the pass holds alive.
    """

    outputs: list[Tensor]
    calls: list[Call]
    edges: Mapping[Call, Sequence[GradientEdge | None]]
    nodes: int = 0  # of the graph, that it made
    order: int = 0  # of the functions that it called


class Names(Protocol):
    """Knows the parameters' names."""

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a trained parameter."""


class Stage(Names, Protocol):
    """What a proof needs from the capture."""

    model: nn.Module
    opening: Opening | None  # of outputs that hold examples of different lengths
    kept: Run | None  # the pass over the batch, if it may be read by the structure that is found

    def shared(self, tensor: int, shape: tuple[int, ...]) -> bool:
        """Whether all examples shared this input, of this shape, in a proved pass."""

    def placed(self, tensors: int, tensor: int, layout: Layout) -> bool:
        """Whether this input, of so many, had this layout in a proved batch."""

    def run(self, inputs: Any, examples: int, structure: Structure | None = None) -> Run:
        """A pass under the capture."""

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside run without the capture."""

    def alone(self, inputs: Any, *, after: Any = None) -> tuple[list[Tensor], Any]:
        """The outputs of a pass, optionally ``after`` another one, and the trained parameters."""

    def keeps_nothing(self) -> bool:
        """Whether no pass so far has written anything: then earlier passes are as good as new ones."""

    def dim(self) -> int | None:
        """The dimension of the inputs that was declared to hold the examples."""

    def is_declared(self) -> bool:
        """Whether somebody has declared it; otherwise it is the first, or none if only their number is announced."""

    def precisions(self) -> set[torch.dtype]:
        """The dtypes that the model casts to."""


class Survey(NamedTuple):
    """A run with its graph, and the owners by call and output."""

    run: Run
    examples: int
    exits: list[Exit]
    graph: Graph
    owners: dict[Number, list[Owners]]


def run_some(stage: Stage, reading: Reading, inputs: Any, which: Tensor, examples: int) -> Run | None:
    """A pass over some of the examples; None if the model rejects them."""
    try:
        return stage.run(reading.only(inputs, which, examples), len(which))
    except CaptureError:
        raise
    except UNCALLABLE:
        return None


# The outputs ------------------------------------------------------------------------------------------------------------


def exits_in(whole: list[Tensor], some: Run, which: Tensor, examples: int) -> tuple[Layout | None, ...] | None:
    """The layout of each output (None: without examples); None altogether if the examples alone give something else."""
    if len(whole) != len(some.outputs):
        return None
    found = []
    for a, b in zip(whole, some.outputs, strict=True):
        layout = _grown(a, b, which, examples)
        if layout is False:
            return None
        found.append(layout)
    return tuple(found) if any(found) or all(y.dim() == 0 for y in whole) else None


def _grown(a: Tensor, b: Tensor, which: Tensor, examples: int) -> Any:
    """The layout under which the few examples have what they have in the batch; None: no dimension grows; False: there is none."""
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
        if same_as_made(layout.only(a, which, examples), b):
            return layout
    return False


def exits_of(run: Run, layouts: Sequence[Layout | None]) -> list[Exit]:
    """Where cotangents enter; for a model that returns only its loss, the last call with the examples first."""
    return [
        Exit(get_gradient_edge(y), y.detach().new_empty(()).expand(y.shape), layout)
        for y, layout in zip(run.outputs, layouts, strict=True)
        if layout is not None and y.requires_grad
    ]


def exits_above(run: Run, layouts: Sequence[Layout | None]) -> list[Exit]:
    """The same, from where a loss uses the outputs."""
    ends = (y for y, layout in zip(run.outputs, layouts, strict=True) if layout is not None and y.requires_grad)
    return [e._replace(edge=get_gradient_edge(used(y))) for e, y in zip(exits_of(run, layouts), ends, strict=True)]


def used(y: Tensor) -> Tensor:
    """An output as a loss uses it: hooks on the outputs themselves may only act in a backward pass that comes from further up."""
    with torch.enable_grad():
        return y.view_as(y)


# Surveys ----------------------------------------------------------------------------------------------------------------


def graph_of(run: Run, layouts: Sequence[Layout | None]) -> tuple[list[Exit], Graph]:
    """Where cotangents enter a run, and its graph."""
    exits = exits_of(run, layouts)
    if not exits:
        raise CaptureError(
            "No output of the model has the examples in it, so it cannot be told whose gradient is whose. Return the logits, or one loss "
            "for each example, beside or instead of the mean."
        )
    return exits, Graph(e.edge for e in exits)


def surveyed(run: Run, layouts: Sequence[Layout | None], examples: int, *, halves: bool = True) -> Survey:
    """Tags over a run."""
    exits, graph = graph_of(run, layouts)
    calls = numbered(run.calls)
    places = [
        (n, k, e) for n, call in calls.items() for k, e in enumerate(run.edges[call]) if e is not None and e.node in graph.nodes
    ]
    found, _ = tagged(exits, [e for _, _, e in places], [], examples, halves=halves) if places else ([], {})
    owners: dict[Number, list[Owners]] = {n: [Owners(None, False) for _ in call.shapes] for n, call in calls.items()}
    for (n, k, _), made in zip(places, found, strict=True):
        each = made.each  # of a view, the gradient of what it is a view of was read
        owners[n][k] = made if each is None else Owners(each.reshape(calls[n].shapes[k]), made.proved)
    return Survey(run, examples, exits, graph, owners)


def one_owner_each(each: Tensor) -> bool:
    """Whether every row of dimension 0 that a gradient reached has one owner."""
    rows = each.flatten(1) if each.dim() > 1 else each.unsqueeze(1)
    top = rows.amax(1, keepdim=True) if rows.shape[1] else rows
    return bool(((rows == top) | ((rows < 0) & (rows != MIXED))).all())


def rows_of(owners: Owners, shape: Sequence[int]) -> Tensor:
    """The example of each row of dimension 0, -1 for rows that no gradient reached."""
    if owners.each is None or not owners.proved:
        return torch.full(tuple(shape[:1]), NOBODY)
    each = owners.each
    return (each.flatten(1).amax(1) if each.dim() > 1 else each).long()


def still_there(structure: Structure, survey: Survey) -> bool:
    """Whether all calls with a regular layout have it in this survey, too."""
    for number, owners in survey.owners.items():
        place = structure.places.get(number)
        if place is None or not place.layout.regular or is_packed(numbered(survey.run.calls)[number]):
            continue
        dims = number[0].rule.dims(number[0].module, len(owners))
        for k, own in enumerate(owners):
            layout = Layout(Kind.DIM, dims[k]) if place.native else place.layout
            if own.each is not None and own.proved and not agrees(layout, own.each, survey.examples):
                return False
    return True


def agrees(layout: Layout, each: Tensor, examples: int) -> bool:
    """Whether these owners, if there are any, are those of a layout."""
    if not layout.fits(each.shape, examples):
        return False
    wanted = layout.at(each.shape, examples).owners(each.shape, examples, each.device)
    return bool(((each == wanted) | ((each < 0) & (each != MIXED))).all())

"""Reads one pass by a proved structure: tells each call where its examples are, and hooks the frontier.

If the pass looks like the proved one and moves no rows elsewhere, it is read as proved; otherwise by tags on its own graph, which find the
owner of each row in this very pass. What tags cannot determine is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hushgrad.clipping.layout import MIXED, NOBODY, ROWS, Kind, Layout
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.graph import Border, Graph, Source, find, is_mixed
from hushgrad.clipping.proof.inputs import leaves
from hushgrad.clipping.proof.routes import routed
from hushgrad.clipping.proof.saved_tensors import Packing
from hushgrad.clipping.proof.shares import Reading, Sink, watch
from hushgrad.clipping.proof.structure import Number, Place, Structure, is_packed, numbered
from hushgrad.clipping.proof.survey import Run, agrees, exits_of, one_owner_each, rows_of
from hushgrad.clipping.proof.survey_notes import sources_of
from hushgrad.clipping.proof.tags import Exit, tagged
from hushgrad.clipping.proof.variable_lengths import Opening, beyond, opened, owners_of
from hushgrad.clipping.site import Call

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture


class Reader(NamedTuple):
    """Reads passes of one capture; inside ``deaf`` gradients that come back are not part of a step."""

    capture: Capture
    deaf: Callable[[], AbstractContextManager[None]]
    lot: Random

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a trained parameter."""
        return self.capture.name_of(leaf)

    def read(self, structure: Structure, run: Run, B: int, packing: Packing | None, *, by_tags: bool, inputs: Any = None) -> None:
        """Tell each call where its examples are. Raises LookupError with what cannot be determined.

        ``inputs``: of a pass that is not part of a proof.
        """
        if structure.ways and inputs is not None:
            run = self._opened(structure, run, leaves(inputs))
        calls = numbered(run.calls)
        for number, call in calls.items():
            place = structure.places.get(number)
            if place is None:
                raise LookupError(number[0].path)
            call.place = place
            if place.layout.kind is Kind.ROWS:
                call.rows = torch.full(tuple(call.shapes[0][:1]), NOBODY)
        if structure.routed:  # an expert may get no rows
            self.capture.routed(run.calls)
        shared = {n for n, call in calls.items() if call.place is not None and call.place.layout.kind is Kind.SHARED}
        self._watch_around(structure, run)
        by_tags = by_tags or structure.routed
        if not shared and not structure.bare and structure.moves == () and not by_tags:
            return
        exits = exits_of(run, structure.exits)
        if not exits:
            self.capture.refuse_detached()
        graph = Graph(e.edge for e in exits)
        edges, names = sources_of(self, run, graph, shared)
        if not names <= structure.bare:
            raise LookupError(min(names - structure.bare))
        borders = structure.frontier.again(graph, edges)
        owners: dict[Any, Any] | None = {}
        if any(node.name() == "CheckpointFunctionBackward" for node in graph.order):  # reentrant: it refuses to be asked
            self._require_still(structure, calls, B)
        else:
            owners = None if by_tags else self._routed(structure, graph, borders, B)
            if owners is None:
                owners, borders = self._tagged(exits, run, edges, borders, graph, B)
        # Detached: nodes of the graph will know it, and outputs know their nodes.
        bad = partial(_bad, structure, [y.detach() for y in run.outputs], B)
        reading = Reading(B, owners or {}, self.deaf, packing, bad)
        sinks = self._sinks(run, shared, graph, names)
        self.capture.watched(watch(borders, sinks, reading, self.capture.refuse_gone))

    def _routed(self, structure: Structure, graph: Graph, borders: list[Border], B: int) -> dict[Any, Any] | None:
        """The owners of routed rows at the frontier, by the graph's own indices; None if these do not tell."""
        if structure.moves is None:
            return None
        try:
            return routed(graph, structure.moves, borders, B, self.lot)
        except LookupError:
            return None

    def _require_still(self, structure: Structure, calls: dict[Number, Call], B: int) -> None:
        """Require that nothing moves rows: then a pass that cannot be tagged is read as proved."""
        if structure.moves != () or structure.routed or not structure.holds(calls, B):
            raise LookupError("a reentrant checkpoint: use checkpoint(..., use_reentrant=False)")

    def _watch_around(self, structure: Structure, run: Run) -> None:
        for y, around in zip(run.outputs, structure.around, strict=True):
            if around and y.requires_grad:
                y.register_hook(partial(self.capture.refuse_around, tuple(y.shape)))  # type: ignore[no-untyped-call]

    def _opened(self, structure: Structure, run: Run, tensors: list[Any]) -> Run:
        """The outputs as the proof saw them; no gradient may come back to a padded output beyond an example's length."""
        made = opened(run.outputs, Opening(structure.ways), tensors)
        for y, way in zip(run.outputs, structure.ways, strict=True):
            if way is not None and way.form == "padded" and y.requires_grad:
                y.register_hook(partial(self.capture.refuse_beyond, partial(beyond, way, tensors[way.leaf])))  # type: ignore[no-untyped-call]
        return run._replace(outputs=made)

    def _tagged(
        self, exits: list[Exit], run: Run, edges: list[Source], borders: list[Border], graph: Graph, B: int
    ) -> tuple[dict[Any, Any], list[Border]]:
        """The owners of all rows in this pass; they must not contradict what was proved."""
        live = [
            (call, k, e) for call, own in run.edges.items() for k, e in enumerate(own) if e is not None and e.node in graph.nodes
        ]
        with self.deaf():
            found, at_nodes = tagged(
                exits, [e for *_, e in live] + [s.edge for s in edges], [b.node for b in borders], B, halves=False
            )
            if any(is_mixed(at_nodes.get(b.node, [])) for b in borders):  # they meet further up than in the proof
                borders = find(graph, exits, edges, B).again(graph, edges)
                at_nodes = tagged(exits, [s.edge for s in edges], [b.node for b in borders], B, halves=False)[1]
        for (call, k, _), made in zip(live, found, strict=False):
            owners = made if made.each is None else Owners(made.each.reshape(call.shapes[k]), made.proved)
            _settle(call, k, owners, B)
        return at_nodes, [b._replace(layouts=_read_as(b, at_nodes.get(b.node, []), B)) for b in borders]

    def _sinks(self, run: Run, shared: set[Number], graph: Graph, names: set[str]) -> list[Sink]:
        sinks, calls = [], numbered(run.calls)
        for number in shared:
            call = calls[number]
            for k, edge in enumerate(run.edges[call]):
                if edge is not None and edge.node in graph.nodes:
                    sinks.append(Sink(edge, partial(call.take, k)))
        for name in names:
            call = self.capture.bare_call(name)
            sinks.append(Sink(get_gradient_edge(self.capture.trained[name]), partial(call.take, 0)))
        return sinks


def _read_as(border: Border, owners: list[Owners], B: int) -> tuple[Layout | None, ...]:
    """The layouts of a frontier node's cotangents; ROWS where the owners differ in this pass."""
    made: list[Layout | None] = []
    for k, layout in enumerate(border.layouts):
        each = owners[k].each if k < len(owners) else None
        still = layout is None or (layout.regular and each is not None and agrees(layout, each, B))
        made.append(layout if still else ROWS)
    return tuple(made)


def _settle(call: Call, output: int, owners: Owners, B: int) -> None:
    """One output's owners: as the place says, or rows that each have one owner; otherwise LookupError."""
    place, each = call.place, owners.each
    if place is None or place.layout.kind in (Kind.SHARED, Kind.DEAD) or each is None:
        if place is not None and place.layout.kind is Kind.ROWS:
            call.rows = rows_of(owners, call.shapes[output])
        return
    if place.layout.kind is not Kind.ROWS and _agrees(call, place, output, each, B):
        return
    usable = len(call.shapes) == 1 and call.site.dim == 0 and not is_packed(call)
    if not usable or (owners.proved and not (owners.clean and one_owner_each(each))):
        raise LookupError(_why(call))
    call.place, call.rows = Place(ROWS), rows_of(owners, call.shapes[output])


def _why(call: Call) -> str:
    path = call.site.path or "the model"
    if is_packed(call):
        return f"{path}, whose rows are in another order (leave sorting to pack_padded_sequence(..., enforce_sorted=False))"
    return f"{path}, whose rows are in another order than its rule reads"


def _agrees(call: Call, place: Place, output: int, each: Tensor, B: int) -> bool:
    if is_packed(call):
        wanted = owners_of(call.args[0]).to(each.device) if output == 0 else None
        if wanted is not None and each.dim() and len(wanted) == len(each):
            return bool(
                ((each == wanted.reshape(-1, *(1 for _ in each.shape[1:]))) | (each < 0)).all() and bool((each != MIXED).all())
            )
    layout = place.layout
    if place.native:
        layout = Layout(Kind.DIM, call.site.rule.dims(call.site.module, len(call.shapes))[output])
    return agrees(layout, each, B)


def _bad(structure: Structure, outputs: list[Tensor], B: int) -> Tensor:
    """Examples with non-finite outputs."""
    made = torch.zeros(B, dtype=torch.bool)
    for y, layout in zip(outputs, structure.exits, strict=True):
        if layout is not None:
            made |= ~layout.apart(y, B).flatten(1).isfinite().all(1).cpu()
    return made

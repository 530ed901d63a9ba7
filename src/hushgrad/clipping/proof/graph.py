"""The autograd graph of one forward, and its frontier: where values that all examples share first meet the examples.

Above the frontier a cotangent belongs to one example; below it is a sum over examples. In the prehook of a frontier node the examples'
shares are still separate: the engine, not the node, sums a broadcast gradient, and every node is linear in its cotangent. Below the
frontier tensors hold no examples, so B cotangents are pulled back at once. The forward is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import Node, accumulated, input_metadata
from hushgrad.clipping.layout import ROWS, Layout, layouts_of
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.tags import Exit, tagged

Trail = tuple[tuple[str, int], ...]  # the (name, slot) of each node on a path up from a source


class Graph:
    """All nodes that a backward pass from some nodes would visit, and the consumers of each; it keeps the nodes alive."""

    def __init__(self, exits: Iterable[GradientEdge]) -> None:
        self.consumers: dict[Node, list[tuple[Node, int, int]]] = {}  # node: (consumer, its slot, which output of the node)
        self.leaves: list[Node] = []
        self.order: list[Node] = []
        stack = list(dict.fromkeys(e.node for e in exits))
        seen = set(stack)
        while stack:
            node = stack.pop()
            self.order.append(node)
            if accumulated(node) is not None:
                self.leaves.append(node)
            for slot, (below, number) in enumerate(node.next_functions):
                if below is None:
                    continue
                self.consumers.setdefault(below, []).append((node, slot, number))
                if below not in seen:
                    seen.add(below)
                    stack.append(below)
        self.nodes = seen

    def above(self, sources: Iterable[Node], steps: int) -> list[Node]:
        """Nodes that consume a source, directly or through at most so many other nodes."""
        found: dict[Node, None] = {}
        ring = list(sources)
        for _ in range(steps):
            ring = [c for node in ring for c, _, _ in self.consumers.get(node, []) if c not in found and not found.setdefault(c)]
            if not ring:
                break
        return list(found)


# torch uses different reshaping nodes with and without a dispatch mode.
_ALIKE = dict.fromkeys(("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"), "ViewBackward0")


def name_of(node: Node) -> str:
    """The node's name as used in trails."""
    name: str = node.name()
    return _ALIKE.get(name, name)


def operation(name: str) -> str:
    """The operation of a node of this name, if it is torch's own; a user's function may do anything under the same name."""
    made, _, number = name.partition("Backward")
    return made if number.isdigit() else ""


class Source(NamedTuple):
    """Where a shared value comes from, under a name that is the same in every graph."""

    name: str
    edge: GradientEdge


class Border(NamedTuple):
    """A frontier node: ``slot`` leads into what is shared, ``layouts`` are those of the cotangents that arrive at it."""

    node: Node
    slot: int
    layouts: tuple[Layout | None, ...]


class Frontier(NamedTuple):
    """A frontier that can be found again in another graph: the paths up from the sources that end there, and those that lead on."""

    ends: dict[Trail, tuple[Layout | None, ...]]
    ways: frozenset[Trail]
    mixed: frozenset[Trail] = frozenset()  # paths on which several examples meet
    fits: Mapping[Trail, tuple[frozenset[Layout], ...]] = {}  # all layouts that are possible for the cotangents at an end
    sizes: Mapping[Trail, frozenset[tuple[tuple[int, ...], ...]]] = {}  # of these cotangents, at each node that a path leads to

    def again(self, graph: Graph, sources: Sequence[Source]) -> list[Border]:
        """The same frontier in this graph. Raises LookupError if the paths differ."""

        def decide(node: Node, way: Trail) -> tuple[Layout | None, ...] | None:
            if way not in self.ends and way not in self.ways:
                raise LookupError(node.name())
            return self.ends.get(way)

        found = {(border.node, border.slot): border for border, _ in _climbed(graph, sources, decide)[0]}
        return list(found.values())  # a node that several sources lead to is read once


def find(
    graph: Graph, exits: Sequence[Exit], sources: Sequence[Source], examples: int, below: frozenset[Trail] = frozenset()
) -> Frontier:
    """The frontier of these sources by tags, above the paths ``below``. Raises LookupError naming a node above which there is none."""
    steps = 6
    known: dict[Node, list[Owners]] = {}
    while sources:
        fresh = [n for n in graph.above([s.edge.node for s in sources], steps) if n not in known]
        known |= {n: [] for n in fresh}
        known |= tagged(exits, [s.edge for s in sources], fresh, examples)[1] if fresh else {}
        try:
            return _without_contradictions(graph, sources, known, examples, below)
        except KeyError:  # the node is further up
            steps *= 3
    return Frontier({}, frozenset())


Decide = Callable[[Node, Trail], "tuple[Layout | None, ...] | None"]


def _climbed(graph: Graph, sources: Sequence[Source], decide: Decide) -> tuple[list[tuple[Border, Trail]], set[Trail]]:
    """Walk up from the sources, breadth first; ``decide`` gives the layouts of a frontier node, or None below the frontier."""
    found: list[tuple[Border, Trail]] = []
    ways: set[Trail] = set()
    seen: set[Node] = set()
    ring: list[tuple[Node, int | None, Trail]] = [(s.edge.node, s.edge.output_nr, ((s.name, s.edge.output_nr),)) for s in sources]
    while ring:
        after: list[tuple[Node, int | None, Trail]] = []
        for node, output, trail in ring:
            users = [(c, slot) for c, slot, number in graph.consumers.get(node, ()) if output is None or number == output]
            if not users and output is None:
                raise LookupError(node.name())  # a mixed cotangent at an output
            for consumer, slot in users:
                way = (*trail, (name_of(consumer), slot))
                layouts = decide(consumer, way)
                if layouts is not None:
                    found.append((Border(consumer, slot, layouts), way))
                elif consumer not in seen:
                    seen.add(consumer)
                    after.append((consumer, None, way))
                    ways.add(way)
                else:
                    ways.add(way)
        ring = after
    return found, ways


def _without_contradictions(
    graph: Graph, sources: Sequence[Source], known: dict[Node, list[Owners]], examples: int, below: Iterable[Trail]
) -> Frontier:
    """Make equal paths end alike. If examples meet on one (an expert), all lead on, even where an example happens to be alone; if one got
    no gradient, it ends where the others do. Layouts that differ are determined by tags in each step.
    """
    below, silent, mixed = set(below), set[Trail](), set[Trail]()

    def decide(node: Node, way: Trail) -> tuple[Layout | None, ...] | None:
        owners = known[node]
        if is_mixed(owners):
            mixed.add(way)
            return None
        if way in below:
            return None
        return _layouts(owners, examples) or ((ROWS,) * max(1, len(owners)) if way in silent else None)

    while True:
        found, ways = _climbed(graph, sources, decide)
        unlike = {way for _, way in found} & ways
        if not unlike:
            break
        below |= unlike & mixed
        silent |= unlike - mixed
    ends: dict[Trail, tuple[Layout | None, ...]] = {}
    fits: dict[Trail, tuple[frozenset[Layout], ...]] = {}
    sizes: dict[Trail, frozenset[tuple[tuple[int, ...], ...]]] = {}
    for border, way in found:
        before = ends.setdefault(way, border.layouts)
        if before != border.layouts:
            ends[way] = tuple(None if a is None else ROWS for a in before)
        mine = tuple(_regular(o, examples) for o in known[border.node])
        fits[way] = tuple(a & b for a, b in zip(fits.get(way, mine), mine, strict=False))
        sizes[way] = sizes.get(way, frozenset()) | {tuple(tuple(m.shape) for m in input_metadata(border.node))}
    return Frontier(ends, frozenset(ways), frozenset(mixed), fits, sizes)


def is_mixed(owners: Sequence[Owners]) -> bool:
    """Whether several examples meet in a cotangent of a node."""
    return any(o.proved and not o.clean for o in owners)


def _layouts(owners: list[Owners], examples: int) -> tuple[Layout | None, ...] | None:
    """The layout of each cotangent of a node; None if some element belongs to several examples."""
    given = [o for o in owners if o.each is not None]
    if not given or not all(o.clean for o in given):
        return None
    made: list[Layout | None] = []
    for o in owners:
        regular = _regular(o, examples)
        made.append(None if o.each is None else next(iter(regular)) if len(regular) == 1 else ROWS)
    return tuple(made)


def _regular(owners: Owners, examples: int) -> frozenset[Layout]:
    """The layouts that are consistent with these owners; with few examples there may be several."""
    return frozenset(() if owners.each is None else (found for found in layouts_of(owners.each, examples) if found.regular))

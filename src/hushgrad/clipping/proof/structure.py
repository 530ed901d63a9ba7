"""What a proof has found: where each call of each site has its examples, and how what is shared is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping.layout import FIRST, Kind, Layout
from hushgrad.clipping.proof.course import Courses
from hushgrad.clipping.proof.graph import Frontier
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.order import Move
from hushgrad.clipping.proof.uneven import Way

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call, Site

__all__ = ["DROPPED", "NATIVE", "WHOLE", "Pattern", "Place", "Structure", "is_packed", "numbered", "pattern", "sizes_of"]

_site = attrgetter("site")

Number = tuple["Site", int]  # a site, and how often it was called before in this pass
Pattern = tuple["int | None", ...]  # of a shape: a size; None, any size; -c, c rows of each example


class Place(NamedTuple):
    """How a call is read: as the rule expects it (``native``), or by its layout."""

    layout: Layout
    native: bool = False

    def __str__(self) -> str:
        return str(self.layout)


NATIVE = Place(FIRST, native=True)
WHOLE = Place(Layout(Kind.SHARED))  # one example alone: everything is its own
DROPPED = Place(Layout(Kind.DEAD))  # no example: nothing is anybody's


class Structure(NamedTuple):
    """Proved once, for inputs of these sizes; used for all that look alike."""

    reading: Reading
    sizes: tuple[Any, ...]  # of the inputs, without the examples' dimension
    exits: tuple[Layout | None, ...]  # of the outputs that carry examples
    places: dict[Number, Place]
    shapes: dict[Number, tuple[Pattern, ...]]  # of the calls' outputs
    frontier: Frontier
    bare: frozenset[str]  # parameters that are read at the frontier
    order: list[Site]  # of the calls
    plain: bool  # every call is native, and nothing is shared
    partly: bool  # a call got no gradient worth the name: other data may show more, until then it is read at the frontier
    nodes: frozenset[int] | None  # how many nodes a pass makes; None: that follows from its data
    moves: tuple[Move, ...] | None  # of rows, by an index; None: whose row it is, is told by tags in every pass
    around: tuple[bool, ...]  # outputs that no example's output leads to: nothing may come back through them
    most: int  # examples that the seal has tried
    precisions: frozenset[torch.dtype]  # that the model casts numbers to: rounding is theirs
    fragile: bool  # a frontier node has no formula: a record that is not finite needs care
    routed: bool  # the data choose rows: other data make other calls
    ways: tuple[Way | None, ...] = ()  # in which outputs hold examples of different lengths
    dispatched: bool = False  # passes are to be watched where operations are dispatched, too
    courses: Courses | None = None  # what passes of the proof did; None: somebody vouches for the model

    def same_as(self, other: Structure) -> bool:
        """The same but for sizes."""
        mine, its = ({k: (p.native, p.layout[:2]) for k, p in s.places.items()} for s in (self, other))
        ends, others = (
            {t: tuple(x and x[:2] for x in e) for t, e in s.frontier.ends.items()} for s in (self, other)
        )  # fmt: skip
        routes = (self.moves is None) == (other.moves is None) and self.around == other.around and self.ways == other.ways
        return mine == its and ends == others and routes and self.bare == other.bare and self.exits_alike(other)

    def exits_alike(self, other: Structure) -> bool:
        """The outputs have the examples in the same places."""
        return [e and e[:2] for e in self.exits] == [e and e[:2] for e in other.exits]

    def examples(self, tensors: list[Any]) -> int | None:
        """How many examples these inputs hold, if they are read in the same way."""
        if len(tensors) != len(self.reading.layouts):
            return None
        for t, layout in zip(tensors, self.reading.layouts, strict=True):
            if layout == "packed":
                return int(t.batch_sizes[0]) if isinstance(t, PackedSequence) else None
            if isinstance(layout, Layout) and isinstance(t, Tensor) and t.dim() > layout.dim:
                return int(t.shape[layout.dim] // layout.factor)
        return None

    def fits(self, tensors: list[Any], examples: int) -> bool:
        """Whether these inputs hold so many examples, and have the sizes of the proved ones."""
        return examples <= self.most and sizes_of(tensors, self.reading, examples) == self.sizes

    def matches(self, calls: Sequence[Call], examples: int) -> bool:
        """Whether these are the calls that were proved, of the same sizes inside."""
        if self.routed:
            return self.holds(numbered(calls), examples)
        return [*map(_site, calls)] == self.order and _sized(calls, self.shapes.values(), examples)  # noted in this order

    def holds(self, calls: dict[Number, Call], examples: int) -> bool:
        """Whether each of these calls was proved, with the same sizes."""
        return _sized(calls.values(), map(self.shapes.get, calls), examples)


def _sized(calls: Iterable[Call], patterns: Iterable[tuple[Pattern, ...] | None], examples: int) -> bool:
    """Whether each call has outputs of these sizes, and there are such."""
    for call, wanted in zip(calls, patterns, strict=True):
        if wanted is None or len(wanted) != len(call.shapes):
            return False
        for shape, sizes in zip(call.shapes, wanted, strict=True):
            if len(shape) != len(sizes):
                return False
            for size, p in zip(shape, sizes, strict=True):
                if p is not None and size != (p if p >= 0 else -p * examples):
                    return False
    return True


def pattern(layout: Layout, shape: Sequence[int], other: Sequence[int] | None) -> Pattern:
    """The sizes of a tensor with this layout, of which ``other`` is another run's: what follows the number of examples is free."""
    made: list[int | None] = []
    for d, size in enumerate(shape):
        if layout.regular and d == layout.dim:
            made.append(-layout.factor)
        elif layout.kind is Kind.ROWS and d == 0:
            made.append(None)
        else:
            known = other is None or (len(other) == len(shape) and other[d] == size)
            made.append(size if known else None)
    return tuple(made)


def sizes_of(tensors: list[Any], reading: Reading, examples: int) -> tuple[Any, ...] | None:
    """The sizes of the inputs without those that grow with the examples; None if they do not have so many."""
    if len(tensors) != len(reading.layouts):
        return None
    made: list[Any] = []
    for t, layout in zip(tensors, reading.layouts, strict=True):
        if isinstance(t, PackedSequence) or isinstance(layout, str):
            made.append(("rows",))
        elif layout is None:
            made.append(tuple(t.shape))
        elif layout.kind is Kind.DIM:  # nearly always: without further calls
            shape, dim = t.shape, layout.dim
            if len(shape) <= dim or shape[dim] != examples:
                return None
            made.append((*shape[:dim], layout.factor, *shape[dim + 1 :]))
        elif not layout.fits(t.shape, examples):
            return None
        else:
            made.append((*t.shape[: layout.dim], layout.at(t.shape, examples).factor, *t.shape[layout.dim + 1 :]))
    return tuple(made)


def is_packed(call: Call) -> bool:
    """A packed sequence says itself whose its rows are; its rule reads that, and the seal checks the rule."""
    return bool(call.args) and isinstance(call.args[0], PackedSequence)


def numbered(calls: Sequence[Call]) -> dict[Number, Call]:
    """The calls by site, and how often it was called before."""
    counts: Counter[Site] = Counter()
    made = {}
    for call in calls:
        made[call.site, counts[call.site]] = call
        counts[call.site] += 1
    return made

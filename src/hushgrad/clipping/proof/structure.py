"""Structures, the results of proofs: where each call of each site has its examples, and how shared values are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping.layout import FIRST, Kind, Layout
from hushgrad.clipping.proof.call_trace import CallTrace, KnownTraces, joined
from hushgrad.clipping.proof.flat_rows import TELLERS
from hushgrad.clipping.proof.graph import Frontier
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.row_moves import Move
from hushgrad.clipping.proof.variable_lengths import Way
from hushgrad.clipping.thresholds import PROVED_LENGTHS

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call, Site

_site, _shape, _TENSORS = attrgetter("site"), attrgetter("shape"), {Tensor}

Number = tuple["Site", int]  # a site, and how often it was called before in this pass
Pattern = tuple["int | None", ...]  # of a shape: a size; None, any size; -c, c rows of each example


class Place(NamedTuple):
    """How a call is read: as its rule expects (``native``), or by its layout.

    ``faint``: as shared only because no gradient worth the name came back in the proof; rows may have single owners nevertheless.
    """

    layout: Layout
    native: bool = False
    faint: bool = False

    def __str__(self) -> str:
        return str(self.layout)


NATIVE = Place(FIRST, native=True)
WHOLE = Place(Layout(Kind.SHARED))  # one example alone: everything is its own
DROPPED = Place(Layout(Kind.DEAD))  # no example: nothing is anybody's


class Structure(NamedTuple):
    """The result of one proof, for inputs of certain sizes; used for all passes that look alike."""

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
    told: bool = False  # whether inputs tell whose rows are whose: what they tell decides as well
    traces: KnownTraces | None = None  # what passes of the proof did; None: somebody vouches for the model

    def same_as(self, other: Structure) -> bool:
        """Whether two are equal except for sizes."""
        mine, its = ({k: (p.native, p.layout[:2]) for k, p in s.places.items()} for s in (self, other))
        ends, others = (
            {t: tuple(x and x[:2] for x in e) for t, e in s.frontier.ends.items()} for s in (self, other)
        )  # fmt: skip
        routes = (self.moves is None) == (other.moves is None) and self.around == other.around and self.ways == other.ways
        return mine == its and ends == others and routes and self.bare == other.bare and self.exits_alike(other)

    def shows_less_than(self, other: Structure) -> bool:
        """Whether this is what a proof of the other one finds on data with fewer gradients: wherever it differs, none came back."""
        mine, its = ((s.reading, s.sizes, s.exits, s.bare, s.order, s.nodes is None, s.around, s.ways) for s in (self, other))
        fewer = (self.nodes or frozenset()) <= (other.nodes or frozenset())
        if mine != its or not fewer or not _move_less(self.moves, other.moves):
            return False
        unlike = {n for n, place in self.places.items() if (place, self.shapes[n]) != (other.places[n], other.shapes[n])}
        if not all(self.places[n].faint for n in unlike):
            return False
        ends, others = self.frontier.ends, other.frontier.ends
        missing = others.keys() - ends.keys()
        if not missing <= self.frontier.ways - self.frontier.mixed or any(others.get(t, e) != e for t, e in ends.items()):
            return False
        known = {trail[0] for trail in others}
        beyond = [trail for trail in ends if trail[0] in known and trail not in others]
        return bool(unlike or missing) and all(any(t[: len(m)] == m for m in missing) for t in beyond)

    def exits_alike(self, other: Structure) -> bool:
        """Whether the outputs have the examples in the same places."""
        return [e and e[:2] for e in self.exits] == [e and e[:2] for e in other.exits]

    def examples(self, tensors: list[Any]) -> int | None:
        """How many examples these inputs hold, if they are read in the same way."""
        if len(tensors) != len(self.reading.layouts):
            return None
        for t, layout in zip(tensors, self.reading.layouts, strict=True):
            if layout == "packed":
                return int(t.batch_sizes[0]) if isinstance(t, PackedSequence) else None
            if layout in TELLERS:
                own = isinstance(t, Tensor) and t.dim() == 1 and len(t)
                return (int(t[-1]) + 1 if layout == "whose" else len(t) - (layout == "bounds")) if own else None
            if isinstance(layout, Layout) and isinstance(t, Tensor) and t.dim() > layout.dim:
                return int(t.shape[layout.dim] // layout.factor)
        return None

    def fits(self, tensors: list[Any], examples: int) -> bool:
        """Whether these inputs hold so many examples, and have the sizes of the proved ones."""
        alike = examples <= self.most and sizes_of(tensors, self.reading, examples) == self.sizes
        return alike and self.reading.tells(tensors, examples)

    def matches(self, calls: Sequence[Call], examples: int) -> bool:
        """Whether these are the proved calls, with the same internal sizes."""
        if self.routed:
            return self.holds(numbered(calls), examples)
        return [*map(_site, calls)] == self.order and are_sized(calls, self.shapes.values(), examples)  # noted in this order

    def holds(self, calls: dict[Number, Call], examples: int) -> bool:
        """Whether each of these calls was proved, with the same sizes."""
        return are_sized(calls.values(), map(self.shapes.get, calls), examples)


def _move_less(mine: tuple[Move, ...] | None, its: tuple[Move, ...] | None) -> bool:
    """Whether these are the same moves of rows, some of which show nothing of them."""
    if mine is None or its is None or [m.name for m in mine] != [m.name for m in its]:
        return mine is its
    pairs = [pair for a, b in zip(mine, its, strict=True) for pair in zip((*a[1], *a[2]), (*b[1], *b[2]), strict=False)]
    return all(a is None or a == b for a, b in pairs)


def are_sized(calls: Iterable[Call], patterns: Iterable[tuple[Pattern, ...] | None], examples: int) -> bool:
    """Whether each call has outputs, of these sizes."""
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
    """The sizes of a tensor with this layout; ``other`` is the same tensor in another run. Sizes that depend on the examples are free."""
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
    """The sizes of the inputs without those that grow with the examples; None if they do not hold so many."""
    if len(tensors) != len(reading.layouts):
        return None
    made: list[Any] = []
    for t, layout in zip(tensors, reading.layouts, strict=True):
        if isinstance(t, PackedSequence) or isinstance(layout, str):
            made.append(("rows", *(t.shape[1:] if layout in ("row", "link") else ())))
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
    """Whether a call uses a packed sequence, which itself tells whose its rows are; its rule reads that, and the seal checks the rule."""
    return bool(call.args) and isinstance(call.args[0], PackedSequence)


def numbered(calls: Sequence[Call]) -> dict[Number, Call]:
    """The calls by site and number of earlier calls of it."""
    counts: Counter[Site] = Counter()
    made = {}
    for call in calls:
        made[call.site, counts[call.site]] = call
        counts[call.site] += 1
    return made


class Known:
    """All structures, by key: what decides about a pass besides sizes."""

    def __init__(self) -> None:
        self._proved: dict[Any, list[Structure]] = {}
        self._placed: set[tuple[int, int, Kind, int]] = set()  # inputs, one of them, and where its examples were
        self._told = False  # whether inputs tell of any of them whose rows are whose
        self._between: dict[Any, list[Structure]] = {}  # of lengths between the proved ones
        self.asked: Any = (
            None  # the last question of `read_as` about plain tensors: key, expected and their sizes; and its answer
        )
        self.answer: list[tuple[int, list[Structure]]] = []

    def proved(self, key: Any) -> list[Structure]:
        """All that were proved under this key, the latest first."""
        return self._proved.get(key, [])

    def every(self) -> list[Structure]:
        """All that were proved."""
        return [structure for proved in self._proved.values() for structure in proved]

    def shared(self, tensor: int, shape: tuple[int, ...]) -> bool:
        """Whether all examples shared the input of this number, of this shape, in a proved pass."""
        return any(s.reading.layouts[tensor : tensor + 1] == (None,) and s.sizes[tensor] == shape for s in self.every())

    def placed(self, tensors: int, tensor: int, layout: Layout) -> bool:
        """Whether the input of this number, of so many, had this layout in a proved batch."""
        return (tensors, tensor, *layout[:2]) in self._placed

    def add(self, key: Any, structure: Structure, *, of_one: bool = False) -> Structure:
        """Remember, and return what is remembered: with the traces of an equal structure that it replaces.

        Interpolated structures are forgotten. ``of_one``: there was a single example.
        """
        layouts = structure.reading.layouts
        self._told = self._told or structure.told
        if not of_one:  # of which every reading is right
            self._placed |= {(len(layouts), k, *v[:2]) for k, v in enumerate(layouts) if isinstance(v, Layout)}
        looks = (structure.sizes, structure.order, structure.shapes)
        alike = [(s.sizes, s.order, s.shapes) == looks for s in self.proved(key)]
        replaced = [s.traces for s, same in zip(self.proved(key), alike, strict=True) if same]
        kept = [s for s, same in zip(self.proved(key), alike, strict=True) if not same]
        structure = structure._replace(traces=joined([structure.traces, *replaced]))
        self._proved[key] = [structure, *kept]
        self._between.pop(key, None)
        self.asked = None
        return structure

    def saw(self, key: Any, structure: Structure, nodes: int, trace: CallTrace | None) -> None:
        """Record that a pass read by tags made so many nodes, and had this trace."""
        seen = structure._replace(nodes=frozenset({nodes}) | (structure.nodes or frozenset()))
        if trace is not None and seen.traces is not None:
            seen = seen._replace(traces=seen.traces.after(trace))
        for kept in (self._proved.get(key, []), self._between.get(key, [])):
            kept[:] = [seen if s is structure else s for s in kept]
        self.asked = None

    def read_as(self, key: Any, tensors: list[Any], expected: int | None) -> list[tuple[int, list[Structure]]]:
        """How many examples these inputs may hold (``expected`` if announced), with the candidates for each number.

        The answer depends only on the key and the sizes of tensors, but where these tell whose the rows of a list are.
        """
        proved, answer = self._proved.get(key, ()), []
        for n in [expected] if expected is not None else dict.fromkeys([s.examples(tensors) for s in proved]):
            if n is None:
                continue
            found: list[Structure] = []
            for s in proved if n != 1 else ():
                if (
                    n <= s.most
                    and sizes_of(tensors, s.reading, n) == s.sizes
                    and not (s.told and not s.reading.tells(tensors, n))
                ):
                    found.append(s)
            answer.append((n, found if found or n == 1 or len(proved) < PROVED_LENGTHS else self._concluded(key, tensors, n)))
        plain = {*map(type, tensors)} == _TENSORS and not self._told
        self.asked, self.answer = (key, expected, [*map(_shape, tensors)]) if plain else None, answer
        return answer

    def _concluded(self, key: Any, tensors: list[Any], examples: int) -> list[Structure]:
        """A structure interpolated from proved lengths, if none of them fits."""
        proved, concluded = self._proved[key], self._between.setdefault(key, [])
        found = [s for s in concluded if s.fits(tensors, examples)]
        if not found:
            from hushgrad.clipping.proof.interpolate import interpolated  # which knows structures

            made = interpolated(proved, tensors, examples)
            found = [] if made is None else [made]
            concluded += found
        return found

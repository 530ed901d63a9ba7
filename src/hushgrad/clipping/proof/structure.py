"""What a proof has found: where each call of each site has its examples, and how what is shared is read."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping.layout import FIRST, Kind, Layout
from hushgrad.clipping.proof.graph import Frontier
from hushgrad.clipping.proof.inputs import Reading

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call, Site

__all__ = ["DROPPED", "NATIVE", "WHOLE", "Place", "Structure", "numbered"]

Number = tuple["Site", int]  # a site, and how often it was called before in this pass


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
    ranks: dict[Number, tuple[int, ...]]
    frontier: Frontier
    bare: frozenset[str]  # parameters that are read at the frontier
    order: list[Site]  # of the calls
    plain: bool  # every call is native, and nothing is shared
    partly: bool  # a call got no gradient worth the name: other data may show more, until then it is read at the frontier

    def same_as(self, other: Structure) -> bool:
        """The same but for sizes."""
        mine, its = ({k: (p.native, p.layout[:2]) for k, p in s.places.items()} for s in (self, other))
        ends, others = (
            {t: tuple(x and x[:2] for x in e) for t, e in s.frontier.ends.items()} for s in (self, other)
        )  # fmt: skip
        return mine == its and ends == others and self.bare == other.bare and self.exits_alike(other)

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

    def fits(self, tensors: list[Any], examples: int, *, any_length: bool) -> bool:
        """Whether these inputs hold so many examples, and look like the proved ones."""
        sizes = sizes_of(tensors, self.reading, examples)
        if sizes is None:
            return False
        return sizes == self.sizes or (any_length and [len(s) for s in sizes] == [len(s) for s in self.sizes])


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
        elif not layout.fits(t.shape, examples):
            return None
        else:
            made.append((*t.shape[: layout.dim], layout.at(t.shape, examples).factor, *t.shape[layout.dim + 1 :]))
    return tuple(made)


def numbered(calls: list[Call]) -> dict[Number, Call]:
    """The calls by site, and how often it was called before."""
    counts: Counter[Site] = Counter()
    made = {}
    for call in calls:
        made[call.site, counts[call.site]] = call
        counts[call.site] += 1
    return made

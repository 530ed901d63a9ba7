"""Readings: hypotheses about which dimension of each input tensor holds the examples. The one counts under which examples alone give
what they give in their batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from hushgrad.clipping.layout import Kind, Layout
from hushgrad.clipping.proof.flat_rows import FLAT, TELLERS, Even, Flat, Piece, counted, flat_kinds, possible, tell
from hushgrad.clipping.thresholds import MOST_READINGS

Packed = tuple[Any, Any]  # (args, kwargs)
Change = Callable[[Tensor, Tensor], Tensor]  # (one example's rows, all rows) -> new rows


class Reading(NamedTuple):
    """For each input tensor, in order: its layout; None if all examples share it; "packed"; or one of
    :data:`~hushgrad.clipping.proof.flat_rows.FLAT`. ``counted``: a whole number that is the number of examples is it by no chance.
    ``empty``: where rows are in one list, the model takes examples without any. ``even``: inputs that tell of each example as many rows as
    its layout says, as long as they do so (see :func:`~hushgrad.clipping.proof.flat_rows.evenly`).
    """

    layouts: tuple[Any, ...]
    counted: bool = False
    empty: bool = False
    even: tuple[Even, ...] = ()

    def only(self, inputs: Packed, which: Tensor, examples: int) -> Any:
        """The inputs of these examples alone; an example may be repeated."""
        tensors = leaves(inputs)
        flat = Flat.of(tensors, self.layouts, examples)
        if flat is not None:
            return self.joined(inputs, flat.every(which.tolist()), examples)
        rest = iter(zip(tensors, self.layouts, strict=True))

        def pick(_: Any) -> Any:
            value, layout = next(rest)
            if layout is None:
                return value
            if layout == "packed":
                return _packed(value, which)
            return layout.only(value, which, examples)

        return mapped(inputs, pick)

    def joined(self, inputs: Packed, pieces: Sequence[Sequence[Piece]], examples: int) -> Any:
        """The inputs of new examples, each of which is made of rows of some of these; its other data are those of the first."""
        tensors = leaves(inputs)
        flat, links = (
            Flat.of(tensors, self.layouts, examples),
            [t for t, k in zip(tensors, self.layouts, strict=True) if k == "links"],
        )
        assert flat is not None
        rest, firsts = iter(zip(tensors, self.layouts, strict=True)), torch.tensor([some[0][0] for some in pieces])

        def pick(_: Any) -> Any:
            value, layout = next(rest)
            if layout in FLAT:
                return flat.taken(value, layout, links, pieces)
            return value if layout is None else layout.only(value, firsts, examples)

        return mapped(inputs, pick, (lambda n: len(pieces) if n == examples else n) if self.counted else None)

    def flat(self, inputs: Packed, examples: int) -> Flat | None:
        """Where the examples' rows are, if all are in one list."""
        return Flat.of(leaves(inputs), self.layouts, examples)

    def shared_like_data(self, inputs: Packed, examples: int) -> list[int]:
        """Tensors that all examples share under this reading, though one of their dimensions has that size."""
        pairs = enumerate(zip(leaves(inputs), self.layouts, strict=True))
        return [k for k, (t, layout) in pairs if layout is None and _options(t, examples)[0] is not None]

    @property
    def uneven(self) -> bool:
        """Whether examples may have different numbers of rows in some input."""
        return any(isinstance(layout, str) for layout in self.layouts)

    def tells_nothing(self, inputs: Packed, examples: int) -> bool:
        """Whether a layout of these inputs' rows may be chance: all examples' are in one list, or there are as many as examples."""
        pairs = zip(leaves(inputs), self.layouts, strict=True)
        return any(kind in FLAT or (kind == "packed" and len(data_of(t)) == examples) for t, kind in pairs)

    def tells(self, tensors: list[Any], examples: int) -> bool:
        """Whether these inputs tell whose each row is, as the proved ones did, where the rows of all examples may be in one list."""
        if any(
            len(tensors) <= k or counted(tensors[k], kind, examples, c * examples) != [c] * examples for k, kind, c in self.even
        ):
            return False
        flat = any(kind in TELLERS for kind in self.layouts)
        return not flat or (len(tensors) == len(self.layouts) and tell(tensors, self.layouts, examples, empty=self.empty))

    def layouts_alike(self, other: Reading) -> bool:
        """Whether two readings are equal except for sizes."""
        mine, its = ([v[:2] if isinstance(v, Layout) else v for v in r.layouts] for r in (self, other))
        return mine == its

    def changed(self, inputs: Packed, changes: Mapping[int, Change], examples: int, *, by_row: bool = False) -> Any:
        """The inputs with other numbers for these examples; a change gets one example's rows, examples first, and the rows of all.

        ``by_row``: a change acts on each row separately, so examples with the same change are changed together.
        """
        rest, tensors = iter(self.layouts), leaves(inputs)
        flat, links = self.flat(inputs, examples), [t for t, k in zip(tensors, self.layouts, strict=True) if k == "links"]

        def made(t: Any) -> Any:
            layout = next(rest)
            if isinstance(t, PackedSequence):
                return _repacked(t, lambda every: _changed_rows(every, changes, torch.arange(examples), by_row=by_row))
            if flat is not None and layout in ("row", "link"):
                return _changed_rows(t, changes, flat.numbers(t, layout, links), by_row=by_row)
            if flat is not None and layout == "links":
                pairs, own = flat.local(t), flat.numbers(t, layout, links)
                return flat.placed(_changed_rows(pairs, changes, own, by_row=by_row), t)
            if not isinstance(layout, Layout):
                return t
            numbers = layout.at(t.shape, examples).numbers(examples)
            return _changed_rows(t.movedim(layout.dim, 0), changes, numbers, by_row=by_row).movedim(0, layout.dim)

        return mapped(inputs, made)

    def all_changed(self, inputs: Packed, change: Callable[[Tensor], Tensor]) -> Any:
        """The inputs with other numbers for all examples; ``change`` gets them with the examples first."""
        rest = iter(self.layouts)

        def made(t: Any) -> Any:
            layout = next(rest)
            if isinstance(t, PackedSequence):
                return _repacked(t, change)
            return change(t.movedim(layout.dim, 0)).movedim(0, layout.dim) if isinstance(layout, Layout) else t

        return mapped(inputs, made)


def _packed(value: PackedSequence, which: Tensor) -> PackedSequence:
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    return pack_padded_sequence(padded[which], lengths[which], batch_first=True, enforce_sorted=False)


def _repacked(value: PackedSequence, change: Callable[[Tensor], Tensor]) -> PackedSequence:
    """A packed sequence of the same lengths with other numbers; ``change`` gets all examples, padded."""
    every, lengths = pad_packed_sequence(value, batch_first=True)
    return pack_padded_sequence(change(every), lengths, batch_first=True, enforce_sorted=False)


def _changed_rows(every: Tensor, changes: Mapping[int, Change], numbers: Tensor, *, by_row: bool) -> Tensor:
    """Changed rows; ``numbers`` are their examples."""
    together: dict[Any, list[int]] = {}
    for i, change in changes.items():  # of scalars, an example's several rows form one
        together.setdefault(change if by_row and every.dim() > 1 else (change, i), []).append(i)
    moved, order, ends = every.clone(), numbers.argsort(stable=True).tolist(), [0, *torch.bincount(numbers).cumsum(0).tolist()]
    places = [order[begin:end] for begin, end in pairwise(ends)]
    for who in together.values():
        rows: Any = [row for i in who for row in (places[i] if i < len(places) else ())]
        if not rows:
            continue
        rows = slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.tensor(rows, device=every.device)
        moved[rows] = changes[who[0]](every[rows], every)
    return moved


def readings(inputs: Packed, examples: int) -> Iterator[Reading]:
    """A few hypotheses, the likely ones first."""
    tensors = leaves(inputs)
    options = [_options(t, examples) for t in tensors]
    yield from islice(_in_order(tensors, options, examples), MOST_READINGS)


def _in_order(tensors: list[Any], options: list[list[Any]], examples: int) -> Iterator[Reading]:
    usual = tuple(o[0] for o in options)
    yield Reading(usual)
    for kinds in flat_kinds(tensors, usual, examples):
        yield from (Reading(kinds, counted=True), Reading(kinds))
    later = [k for k, o in enumerate(options) if k and o[0] is not None]
    if len(later) > 1:
        yield Reading(tuple(None if k in later else v for k, v in enumerate(usual)))
    for k in reversed(range(len(options))):
        for other in options[k][1:]:
            yield Reading((*usual[:k], other, *usual[k + 1 :]))
    for kind in (Kind.DIM, Kind.MAJOR, Kind.MINOR):  # all at once, wherever that is possible
        turned = tuple(next((v for v in o if v not in (None, o[0]) and v.kind is kind), None) or o[0] for o in options)
        if turned != usual:
            yield Reading(turned)


def _options(value: Any, examples: int) -> list[Any]:
    if isinstance(value, PackedSequence):
        return ["packed"]
    found: list[Any] = [Layout(Kind.DIM, d) for d in (0, 1) if value.dim() > d and value.shape[d] == examples]
    if found and found[0].dim == 1 and value.shape[0] == 1:
        found = [None, *found]  # position ids (1, T) of T examples
    elif None not in found:
        found.append(None)
    if value.dim() and examples and value.shape[0] % examples == 0 and value.shape[0] > examples:
        found += [Layout(kind, 0, value.shape[0] // examples) for kind in (Kind.MAJOR, Kind.MINOR)]
    return found


def examples_of(inputs: Packed) -> list[int]:
    """Possible numbers of examples if none is declared: the first or second dimension of the first tensor, or as its rows are told."""
    tensors = leaves(inputs)
    for value in tensors:
        if isinstance(value, PackedSequence):
            return [int(value.batch_sizes[0])]
        if value.dim():
            return list(dict.fromkeys([*value.shape[:2], *possible(tensors, value)]))
    return []


# Nested values ----------------------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """All tensors and packed sequences in a nested value, in a fixed order."""
    if isinstance(value, (Tensor, PackedSequence)):
        return [value]
    found: list[Any] = []
    for one in inside(value):
        if isinstance(one, (Tensor, PackedSequence)):
            found.append(one)
        elif one is not None:
            found += leaves(one)
    return found


def inside(value: Any) -> Iterable[Any]:
    """The items of a container: a tuple, list, mapping or dataclass of any class. torch's pytrees know only the built-in classes."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return map(value.__getitem__, value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value; for packed sequences, their rows."""
    return [data_of(leaf) for leaf in leaves(value)]


def data_of(leaf: Any) -> Tensor:
    """A tensor itself; for a packed sequence, its rows."""
    return leaf if isinstance(leaf, Tensor) else leaf.data  # type: ignore[no-any-return]


def _tuple_like(value: Any, items: list[Any]) -> Any:
    """A tuple of the same class, whose own constructor may take anything, with the same attributes; a plain one for structures of C."""
    if not type(value).__flags__ & 1 << 10:  # nothing is derived from them (Py_TPFLAGS_BASETYPE)
        return tuple(items)
    made: Any = tuple.__new__(type(value), items)
    if hasattr(made, "__dict__"):
        vars(made).update(vars(value))
    return made


def mapped(value: Any, change: Callable[[Any], Any], count: Callable[[int], int] | None = None) -> Any:
    """The same structure with other tensors, and other whole numbers if ``count`` is given."""
    if isinstance(value, (Tensor, PackedSequence)):
        return change(value)
    if type(value) is int and count is not None:
        return count(value)
    if isinstance(value, (tuple, list)):  # a loader's batch is one, with a stamp
        inside = [mapped(v, change, count) for v in value]
        same = all(a is b for a, b in zip(inside, value, strict=True))
        return value if same and type(value) is not list else inside if isinstance(value, list) else _tuple_like(value, inside)
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key in value:
            made[key] = mapped(value[key], change, count)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, mapped(getattr(value, field.name), change, count))
        return made
    return value

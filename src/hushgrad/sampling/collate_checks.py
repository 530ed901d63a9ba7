"""Checks of a collate function: which dimension holds the examples, whether it mixes examples, and whether it pads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import TensorDataset, default_collate

from hushgrad.sampling.seeds import UNSEEDED, Seeds

_AGAIN = 12  # records that are read twice by ``read_alone``
_SPREAD = (5**0.5 - 1) / 2  # golden ratio: the fractional parts of its multiples are spread evenly


def grown_dim(dataset: Any, collate: Callable[[list[Any]], Any]) -> int | None:
    """The dimension of a batch's tensors that grows with its examples; None if tensors disagree, or an example's rows are not adjacent.

    It is found by collating two records; nothing else about them is kept.

        >>> grown_dim([torch.ones(4, 3)] * 2, lambda records: torch.stack(records, 1))
        1
    """
    if collate is default_collate:
        return 0
    first, second = (dataset[i % len(dataset)] for i in range(2))
    made = [dict(_leaves(collate(records))) for records in ([first], [first] * 2, [first] * 3, [first, second])]
    # Compared by path: a list with one string per example has more leaves if there are more examples.
    tensors = [where for where, leaf in made[0].items() if isinstance(leaf, Tensor) and leaf.dim() > 1]
    found = {_grown(*(leaves.get(where) for leaves in made)) for where in tensors}
    return found.pop() if len(found) == 1 else None


def _grown(one: Any, two: Any, three: Any, both: Any) -> int | None:
    """The dimension in which copies of a record make a tensor longer, if the second record's rows follow the first's."""
    if not all(isinstance(leaf, Tensor) and leaf.dim() == one.dim() for leaf in (one, two, three, both)):
        return None
    grown = [d for d in range(one.dim()) if one.shape[d] != two.shape[d]]
    if len(grown) != 1 or three.shape[grown[0]] != 3 * one.shape[grown[0]]:
        return None
    d, rows = grown[0], one.shape[grown[0]]
    if both.shape[d] != 2 * rows:  # records have different numbers of rows
        return None
    return None if rows > 1 and not torch.equal(both.narrow(d, 0, rows), one) else d


def keeps_apart(dataset: Any, collate: Callable[[list[Any]], Any], seeds: Seeds = UNSEEDED) -> bool:
    """Whether a record's rows in a batch do not depend on the other records, tested on up to six records.

    False for mixup, for centring by the batch mean, and for random numbers drawn in sequence over the rows, where removing a record
    shifts those of the next ones. True for padding to the longest record. ``seeds`` repeat the random numbers of each collation.

        >>> keeps_apart([torch.ones(3), torch.zeros(3)], torch.stack)
        True
        >>> keeps_apart([torch.ones(3), torch.zeros(3)], lambda records: torch.stack(records) - torch.stack(records).mean(0))
        False
    """
    if collate is default_collate:
        return True
    made = []
    with seeds.kept():
        a, b, c, d, e, f = (seeds.read(dataset, 0, 0, len(dataset) * k // 6) for k in range(6))
        e, f = (e, f) if len(dataset) > 2 else (a, a)  # a record with copies of itself
        for records in ([a, b, c, d], [a, d, c, b], [a, e, c, f], [a, c, d]):
            seeds.start(0)
            made.append(
                {where: t.to_dense() if t.is_sparse else t for where, t in _leaves(collate(records)) if isinstance(t, Tensor)}
            )
        dim = grown_dim(dataset, collate)
    first, *others, fewer = made
    # If records are not found at the same paths (say, one tensor for each object in an image), nothing can be decided.
    return all(_kept(first[where], other[where], dim) for other in others for where in first.keys() & other.keys()) and all(
        _kept_without(first[where], fewer[where], dim) for where in first if first.keys() == fewer.keys()
    )


def read_alone(dataset: Any, collate: Callable[[list[Any]], Any], seeds: Seeds) -> bool:
    """Whether a record that is read again, after others, has the same content, tested on a few records.

    It has if the data set draws its random numbers from the global states that ``seeds`` set. A generator of its own continues from
    record to record, so that one more record changes all later ones. Records are compared as read and as collated, where an image or a
    custom object has become a tensor.

        >>> read_alone([torch.ones(3)] * 2, default_collate, Seeds(bytes(32)))
        True
    """
    if type(dataset) is TensorDataset or not seeds:
        return True
    numbers = sorted({int(len(dataset) * (k * _SPREAD % 1)) for k in range(min(_AGAIN, len(dataset)))})

    def read(number: int) -> list[Any]:
        record = seeds.read(dataset, 0, 0, number)
        return [(where, _content(leaf)) for where, leaf in _leaves((record, collate([record])))]

    with seeds.kept():
        first = [read(number) for number in numbers]
        return first == [read(number) for number in reversed(numbers)][::-1]


def _leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested lists, tuples, mappings and dataclasses, each with its path."""
    if isinstance(value, Mapping):
        inside: Any = value.items()
    elif isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
        inside = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inside = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        yield where, value
        return
    for name, one in inside:
        yield from _leaves(one, (*where, name))


def _content(leaf: Any) -> Any:
    """A comparable form of a leaf; None for objects of unknown kinds, which are not compared."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
        numbers = torch.empty(leaf.numel(), dtype=leaf.dtype).copy_(
            leaf.detach().reshape(-1)
        )  # bytes, for dtypes that numpy lacks too
        return leaf.dtype, leaf.shape, numbers.view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    return repr(leaf) if isinstance(leaf, (int, float, complex, str, bytes)) else None  # as text, so that NaN equals NaN


def _kept(first: Tensor, other: Tensor, dim: int | None) -> bool:
    """Whether the first and third of four records have the same rows; True if they are padded to another length."""
    if first.shape != other.shape:
        return True
    where = 0 if first.dim() == 1 else dim
    if where is None or not first.dim():
        return torch.equal(first, other)
    rows = first.shape[where] // 4
    return all(torch.equal(first.narrow(where, i * rows, rows), other.narrow(where, i * rows, rows)) for i in (0, 2))


def _kept_without(first: Tensor, fewer: Tensor, dim: int | None) -> bool:
    """Whether the first, third and fourth of four records have the same rows without the second; True if sizes differ."""
    where = 0 if first.dim() == 1 else dim
    if where is None or not first.dim():
        return True
    rows = first.shape[where] // 4
    if fewer.shape != (*first.shape[:where], 3 * rows, *first.shape[where + 1 :]):
        return True
    return torch.equal(torch.cat([first.narrow(where, 0, rows), first.narrow(where, 2 * rows, 2 * rows)], where), fewer)


def smallest(records: Sequence[Any]) -> int | None:
    """The index of the smallest record by lengths and shapes, if possible one without anything empty; None if all have one size.

    >>> smallest([{"ids": [1, 2, 3]}, {"ids": [4]}, {"ids": [5, 6]}]), smallest([torch.ones(3), torch.zeros(3)])
    (1, None)
    """
    extents = [_extent(record) for record in records]
    return (
        None
        if extents.count(extents[0]) == len(extents)
        else min(range(len(extents)), key=lambda i: (0 in extents[i], sum(extents[i])))
    )


def _extent(item: Any, depth: int = 4) -> tuple[int, ...]:
    """All lengths and shapes in a record, flattened."""
    if isinstance(item, (str, bytes)):
        return (len(item),)
    if isinstance(shape := getattr(item, "shape", None), tuple):  # of a tensor or an array
        return tuple(shape)
    inside: Any = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else None
    if inside is None:
        inside = vars(item).values() if hasattr(item, "__dict__") and not callable(item) else ()
    elif not isinstance(item, Mapping) and (not item or isinstance(item[0], (int, float))):  # tokens
        return (len(item),)
    return tuple(n for one in inside for n in _extent(one, depth - 1)) if depth else ()


def sizes_apart(batch: Any, dim: int) -> list[tuple[int, ...]]:
    """The shapes of a batch's tensors without the dimension that holds the examples."""
    tensors = (t for _, t in _leaves(batch) if isinstance(t, Tensor) and t.dim() > 1)
    return [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors]


class SmallestRow(NamedTuple):
    """The smallest record of a batch, as :class:`hushgrad.sampling.batch.Smallest` has it."""

    row: int
    alone: Callable[[], Any]
    dim: int  # of the examples
    sizes: list[tuple[int, ...]]  # of the batch

    def follows(self) -> bool:
        """Whether the batch's sizes follow from its largest record."""
        return sizes_apart(self.alone(), self.dim) != self.sizes

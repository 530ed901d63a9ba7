"""Batches with the loader's stamp (which step they belong to, and which records are in it), and how they are split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check


class Sizes(NamedTuple):
    """Batch sizes at which a row's result has the same bits; other batches are padded to the next such size by rows of weight 0.

    ``multiple``: batches of fewer than ``fine`` examples are padded to a multiple of this. ``fine``: batches of at least this size are not
    padded (None: all are). ``few``: micro-batches split at this size or below all have exactly the size that they are split at, so
    that one more or one less record changes no other's shape. ``least``: the smallest number of rows of all others; with 1 there are no
    empty batches, which many models cannot process. ``part``: a micro-batch has no more rows than the size that it is split at, rounded up
    to a multiple of this, so that memory for few examples is enough.

        >>> [Sizes(multiple=4, fine=6).rows(count) for count in range(9)]
        [4, 4, 4, 4, 4, 8, 6, 7, 8]
        >>> [Sizes(multiple=4, fine=6, few=3).rows(count, cut=3) for count in range(4)]
        [3, 3, 3, 3]
        >>> [Sizes(multiple=4, fine=6, few=15, least=16).rows(count, cut=cut) for count, cut in ((0, 5), (7, 15), (7, 20), (17, None))]
        [5, 15, 16, 17]
        >>> [Sizes(multiple=32, part=8).rows(count, cut=cut) for count, cut in ((5, 5), (5, 40), (33, 40), (33, 100))]
        [8, 32, 40, 64]
        >>> [Sizes(least=0).rows(count) for count in range(3)]
        [0, 1, 2]
    """

    multiple: int = 1
    fine: int | None = None
    few: int = 1
    least: int = 1
    part: int | None = None

    def rows(self, count: int, cut: int | None = None) -> int:
        """Rows of a batch with ``count`` examples; ``cut``: the size that micro-batches are cut to."""
        if cut is not None and 0 < max(count, min(1, self.least)) <= cut <= self.few:
            return cut
        count = max(count, self.least)
        if self.fine is not None and count >= self.fine:
            return count
        rows = -(-count // self.multiple) * self.multiple
        if cut is None or self.part is None or count > cut:  # a unit may be larger
            return rows
        return min(rows, -(-cut // self.part) * self.part)


_MAY_BE_BASE = 1 << 10  # of a class (Py_TPFLAGS_BASETYPE)
AS_THEY_COME = Sizes(least=0)  # no padding


class Smallest(Protocol):
    """The smallest example of a batch whose examples are of different sizes, at the time when they are read."""

    row: int  # of the batch

    def follows(self) -> bool:
        """Whether the batch's sizes follow from its largest example: this one has others alone."""

    def alone(self) -> Any:
        """A batch of this example."""


class Batch:
    """What a collate function returned (a tuple, list, dict or tensor, and still an instance of that type), with the loader's stamp.

    ``step``: the step that it was drawn for. ``examples``: how many examples it holds; it may be 0, and the step must be taken all the
    same. ``units``: with user-level privacy a (examples,) tensor of unit numbers, else None. ``padding``: how many of the examples, at the
    end, are copies of the first one that count nothing (small or empty batches, certified runs, plans with ``pad_to``).

        >>> from hushgrad.sampling.batch_loader import stamp
        >>> batch = stamp([torch.arange(5), torch.ones(5, 2)], step=3, examples=5)
        >>> x, y = batch
        >>> batch.step, batch.examples, [part.examples for part in batch.split(2)]
        (3, 5, [2, 2, 1])
    """

    step: int
    examples: int
    units: Tensor | None
    padding: int
    part: int | None  # None: the whole batch of its step; else the number of this micro-batch
    cut: int | None  # the size that ``split`` was called with, for a micro-batch
    _issue: Callable[[Batch], None] | None
    _sizes: Sizes  # to which a batch or micro-batch is padded
    _fixed: bool  # every batch of the run has this one's size
    # the dimension of its tensors that holds the examples, if it is known; else the first
    _dim: Callable[[], int | None] | None
    _smallest: Smallest | None  # None: all examples have one size
    _records: np.ndarray | None  # the numbers of all records (or units) in the step, over all processes

    def split(self, size: int) -> Iterator[Batch]:
        """Micro-batches of at most ``size`` examples, each with this batch's stamp; an empty batch is one empty part.

        Run forward and backward on each, then one ``optimizer.step()``. With units, a part is cut only between units, because
        a unit's gradients are summed before its norm is taken: a unit larger than ``size`` is a part of its own.
        """
        size = _check.positive_int(size=size)
        for number, (first, last) in enumerate(self._cuts(size)):
            yield self._issued(first, last, number, size)

    def _issued(self, first: int, last: int, number: int, cut: int) -> Batch:
        """Examples [first, last) as the next micro-batch that is handed out."""
        part = self._part(first, last, number, cut)
        if self._issue is not None:
            self._issue(part)
        return part

    def _part(self, first: int, last: int, number: int, cut: int | None = None) -> Batch:
        """Examples [first, last), padded with copies of the first of them."""
        counted = self.examples - self.padding
        more = self._sizes.rows(last - first, cut) - (last - first) if self.examples else 0  # an empty batch has no row to copy
        padding = more + last - max(first, min(last, counted))
        rows: slice | list[int] = slice(first, last + more)
        if more and not (first == 0 and counted <= last and last + more <= self.examples):  # else the batch's own padding serves
            rows = [*range(first, last), *[first] * more]
        data = _rows(_plain(self), rows, self.examples, (self._dim and self._dim()) or 0)
        part: Batch = data.as_subclass(TensorBatch) if isinstance(data, Tensor) else _made(type(self), data)
        vars(part).update(vars(self))  # the same stamp, except for the following
        part.examples, part.padding, part.part, part.cut, part._records = last - first + more, padding, number, cut, None
        part.units = None if self.units is None else self.units[rows]
        return part

    def _cuts(self, size: int) -> list[tuple[int, int]]:
        count = self.examples if self._fixed else self.examples - self.padding
        if self._fixed and self.units is not None and size < count:
            remedy = "Units are cut apart at places that depend on them; leave pad_to= out, or make pad_to smaller."
            _check.fail("size", size, f"to be {count}, the fixed size of all batches", remedy)
        if count <= size:
            return [(0, count)]
        if self.units is None:
            return [(first, min(first + size, count)) for first in range(0, count, size)]
        _, counts = torch.unique_consecutive(self.units[:count], return_counts=True)
        cuts, first, last = [], 0, 0
        for count in counts.tolist():
            if last > first and last + count - first > size:
                cuts.append((first, last))
                first = last
            last += count
        return [*cuts, (first, last)]


class TensorBatch(Batch, Tensor):  # type: ignore[misc]  # split() is the batch's, not the tensor's
    """A batch that is one tensor."""

    # As nn.Parameter does: operations on it return plain tensors, so the stamp never spreads to results.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _plain(batch: Batch) -> Any:
    if isinstance(batch, TensorBatch):
        return batch.as_subclass(Tensor)
    return _made(type(batch).__mro__[2], batch)  # (the kind, Batch, the data's own type, ...)


def _made(kind: Any, data: Any) -> Any:
    """``data`` as an instance of ``kind``."""
    return tuple_of(kind, data) if issubclass(kind, tuple) else kind(data)


def tuple_class(kind: type) -> type:
    """A class of tuples, if others may be derived from it; for structures of C (torch.return_types) plain tuples."""
    return kind if kind.__flags__ & _MAY_BE_BASE else tuple


def tuple_of(kind: Any, items: Iterable[Any], like: Any = None) -> Any:
    """A tuple of this class with these items and the attributes of another one; its class's own ``__new__`` takes who knows what.

    >>> class Sized(tuple):
    ...     def __new__(cls, *, items):
    ...         made = super().__new__(cls, items)
    ...         made.size = len(items)
    ...         return made
    >>> tuple_of(Sized, "cd", Sized(items="ab")), tuple_of(Sized, "cd", Sized(items="ab")).size
    (('c', 'd'), 2)
    """
    made: Any = tuple.__new__(tuple_class(kind), items)
    if like is not None and hasattr(made, "__dict__"):
        vars(made).update(getattr(like, "__dict__", {}))
    return made


def empty_like(data: Any, dim: int = 0) -> Any:
    """An empty batch, made from a batch of one example: every tensor keeps its dtype and its other dimensions."""
    return _rows(data, slice(0, 0), 1, dim)


def _rows(data: Any, rows: slice | list[int], examples: int, dim: int = 0) -> Any:
    """Select ``rows`` from everything with one entry per example; the rest (a broadcast mask, a scalar) stays whole.

    ``dim``: the dimension of the examples, except in one-dimensional tensors.
    """
    if isinstance(data, Tensor):
        where = dim if data.dim() > 1 else 0
        return data[(slice(None),) * where + (rows,)] if data.dim() and data.shape[where] == examples else data
    if isinstance(data, Mapping):
        return {key: _rows(item, rows, examples, dim) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        if len(data) == examples and not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in data):
            # One string or number per example.
            chosen = data[rows] if isinstance(rows, slice) else [data[i] for i in rows]
            return tuple_of(type(data), chosen, data) if isinstance(data, tuple) else list(chosen)
        items = [_rows(item, rows, examples, dim) for item in data]
        return items if isinstance(data, list) else tuple_of(type(data), items, data)
    return data

"""Where the examples are in a tensor.

A rule reads canonical records: examples in dimension 0. A :class:`Layout` says where a tensor of the model has them instead, and brings it
into that form. Layouts are found by tags (:mod:`hushgrad.clipping.proof.tags`), never by a size that equals the number of examples.

| kind | shape | example of an element |
|---|---|---|
| ``DIM`` | (..., B, ...) | its index in dimension ``dim`` |
| ``MAJOR`` | (..., B * factor, ...) | that index // factor: rows of one example follow each other |
| ``MINOR`` | (..., factor * B, ...) | that index % B: window-major, time-major rows |
| ``ROWS`` | (rows, ...) | by an index that changes from batch to batch: routed and packed rows |
| ``SHARED`` | any | several, or all: read where the graph first meets the examples |
| ``DEAD`` | any | none: no gradient comes back here |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

# Special values in a tensor of owners: no gradient; several examples; a non-finite number, whose owner is unknown.
NOBODY, MIXED, LOST = -1, -2, -3


class Kind(Enum):
    """See the table of this module."""

    DIM, MAJOR, MINOR, ROWS, SHARED, DEAD = "dimension", "major", "minor", "rows", "shared", "dead"


class Layout(NamedTuple):
    """Where the examples are in a tensor; ``factor`` is the number of rows of one example in a flattened dimension."""

    kind: Kind
    dim: int = 0
    factor: int = 1

    @property
    def regular(self) -> bool:
        """Whether the owner of an element follows from its position alone."""
        return self.kind in (Kind.DIM, Kind.MAJOR, Kind.MINOR)

    def fits(self, shape: Sequence[int], examples: int) -> bool:
        """Whether a tensor of this shape can have this layout, with any number of rows of each example."""
        if not self.regular:
            return True
        if len(shape) <= self.dim:
            return False
        size = shape[self.dim]
        return size == examples if self.kind is Kind.DIM else size > 0 and size % examples == 0

    def at(self, shape: Sequence[int], examples: int) -> Layout:
        """The same layout for a tensor of this shape, which must fit: with another length an example has another number of rows."""
        return self if self.kind is Kind.DIM else self._replace(factor=shape[self.dim] // examples)

    def numbers(self, examples: int) -> Tensor:
        """The example of each index of dimension ``dim``."""
        ids = torch.arange(examples)
        return ids.repeat_interleave(self.factor) if self.kind is Kind.MAJOR else ids.repeat(self.factor)

    def owners(self, shape: Sequence[int], examples: int, device: torch.device) -> Tensor:
        """The example of each element, in a shape that broadcasts to ``shape``."""
        return self.numbers(examples).to(device).reshape([-1 if k == self.dim else 1 for k in range(len(shape))])

    def apart(self, t: Tensor, examples: int) -> Tensor:
        """Move the examples to a dimension of their own in front; dimension ``dim`` stays, with one example's rows (1, or factor)."""
        shape = list(t.shape)
        if self.kind is Kind.DIM:
            return t.movedim(self.dim, 0).unsqueeze(self.dim + 1)
        rows = [examples, self.factor] if self.kind is Kind.MAJOR else [self.factor, examples]
        split = t.reshape(shape[: self.dim] + rows + shape[self.dim + 1 :])
        return split.movedim(self.dim + (self.kind is Kind.MINOR), 0)

    def first(self, t: Tensor, examples: int) -> Tensor:
        """The examples in dimension 0, positions after it: (B, ..., d)."""
        if self.kind is Kind.DIM:
            return t if self.dim == 0 else t.movedim(self.dim, 0)
        return self.apart(t, examples)

    def only(self, t: Tensor, which: Tensor, examples: int) -> Tensor:
        """The tensor for these examples alone, in the same layout."""
        if self.kind is Kind.DIM:
            return t.index_select(self.dim, which.to(t.device))
        chosen = self.apart(t, examples).index_select(0, which.to(t.device))
        back = chosen.movedim(0, self.dim + (self.kind is Kind.MINOR))
        return back.flatten(self.dim, self.dim + 1)

    def __str__(self) -> str:
        if self.kind is Kind.DIM:
            return f"examples in dimension {self.dim}"
        if self.kind in (Kind.MAJOR, Kind.MINOR):
            order = "one example after the other" if self.kind is Kind.MAJOR else "examples fastest"
            return f"{self.factor} rows of each example in dimension {self.dim}, {order}"
        return {
            Kind.ROWS: "rows chosen by the data",
            Kind.SHARED: "shared by the examples",
            Kind.DEAD: "no gradient",
        }[self.kind]


FIRST, ROWS, SHARED, DEAD = Layout(Kind.DIM), Layout(Kind.ROWS), Layout(Kind.SHARED), Layout(Kind.DEAD)


def stored(t: Tensor) -> Tensor:
    """The same numbers; a dimension along which they are expanded has size 1."""
    for dim, stride in enumerate(t.stride()):
        t = t if stride or not t.numel() else t.narrow(dim, 0, 1)
    return t


def has(owners: Tensor, number: int) -> bool:
    """Whether the tensor contains this number. Looking at the minimum first takes a fraction of the time of a comparison."""
    kept = stored(owners)
    return bool(kept.numel()) and int(kept.amin()) <= number and bool((kept == number).any())


def layouts_of(owners: Tensor, examples: int) -> list[Layout]:
    """All regular layouts that agree with these owners; [ROWS] if whole rows of dimension 0 have one owner, else [SHARED]."""
    kept = stored(owners)
    if has(kept, MIXED):
        return [SHARED]
    if not owners.numel() or int(kept.amax()) < 0:
        return [DEAD]
    known, found = kept >= 0, []
    for dim, size in enumerate(owners.shape):
        for layout in _candidates(dim, size, examples):
            if bool(((kept == layout.owners(owners.shape, examples, owners.device)) | ~known).all()):
                found.append(layout)
    if found:
        return found
    known = owners >= 0
    rows = owners.flatten(1).amax(1) if owners.dim() > 1 else owners
    same = (owners == rows.reshape([-1] + [1] * (owners.dim() - 1))) | ~known
    return [ROWS] if bool(same.all()) else [SHARED]


def _candidates(dim: int, size: int, examples: int) -> list[Layout]:
    if size == examples:
        return [Layout(Kind.DIM, dim)]
    if size % examples or not size:
        return []
    return [Layout(kind, dim, size // examples) for kind in (Kind.MAJOR, Kind.MINOR)]


def padded(index: Tensor, examples: int) -> Tensor:
    """The row numbers of each example: (B, most rows), -1 where an example has fewer. Rows without an owner are left out."""
    order = index.argsort(stable=True)
    order = order[index[order] >= 0]
    counts = torch.bincount(index[order], minlength=examples)
    most = int(counts.max()) if len(counts) else 0
    starts = counts.cumsum(0) - counts
    place = starts.unsqueeze(1) + torch.arange(most, device=index.device)
    inside = torch.arange(most, device=index.device) < counts.unsqueeze(1)
    return torch.where(inside, order[place.clamp(max=max(len(order) - 1, 0))] if len(order) else place, -1)


def gathered(t: Tensor, where: Tensor) -> Tensor:
    """(B, most rows, ...), 0 where an example has fewer rows. By selection, not by a product, so that NaN stays with its own example."""
    made = t.index_select(0, where.clamp(min=0).flatten()).unflatten(0, where.shape)
    return made.masked_fill_((where < 0).reshape(*where.shape, *(1 for _ in t.shape[1:])), 0)

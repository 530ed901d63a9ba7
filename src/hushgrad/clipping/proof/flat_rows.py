"""Inputs with the rows of all examples in one list (the nodes of graphs, the tokens of texts): whose row is it?

One input tells, or several that agree: ``whose``, the example of each row, in ascending order; ``counts``, how many rows each example has;
or where these begin and end, ``begins`` (0, 2, 5), ``ends`` (2, 5, 9) or ``bounds`` (0, 2, 5, 9). Others have a value for each row
(``row``), name two rows in each column (``links``, the edges of a graph), or have a value for each of these (``link``).

What they tell differs from batch to batch, so it is looked at in every pass (:func:`tell`): a proof knows lists in which each row belongs
to an example, one example after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.layout import Layout

TELLERS = ("whose", "counts", "bounds", "ends", "begins")
FLAT = (*TELLERS, "row", "links", "link")
_CERTAIN = ("counts", "bounds", "ends")  # these tell the number of all rows as well, and are hardly something else
Piece = tuple[int, int]  # an example, and how many of its rows
Even = tuple[int, str, int]  # an input, how it tells whose rows are whose, and how many it tells each example to have


class Flat(NamedTuple):
    """Where each example's rows begin, and how many it has."""

    begins: list[int]
    counts: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Any], kinds: Sequence[Any], examples: int) -> Flat | None:
        """What the inputs tell of it, if they are read so."""
        for t, kind in zip(tensors, kinds, strict=True):
            if kind in TELLERS:
                counts = _counts(t.detach().cpu().long(), kind, examples, _rows_of(tensors, kinds))
                return cls((counts.cumsum(0) - counts).tolist(), counts.tolist())
        return None

    def every(self, examples: Sequence[int]) -> list[list[Piece]]:
        """These examples with all their rows."""
        return [[(i, self.counts[i])] for i in examples]

    def halves(self) -> list[list[Piece]]:
        """All examples, every second one with half of its rows."""
        return [[(i, min(rows, max(1, rows // 2)) if i % 2 else rows)] for i, rows in enumerate(self.counts)]

    def longer(self) -> list[list[Piece]]:
        """All examples, every second one with the rows of the one before it, too."""
        return [[(i, rows), *([(i - 1, self.counts[i - 1])] if i % 2 else [])] for i, rows in enumerate(self.counts)]

    def emptied(self, odd: int) -> list[list[Piece]]:
        """All examples, the even or the odd ones without rows; the last one keeps its own."""
        last = len(self.counts) - 1
        return [[(i, 0 if i % 2 == odd and i != last else rows)] for i, rows in enumerate(self.counts)]

    def owners(self) -> Tensor:
        """The example of each row."""
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))

    def numbers(self, t: Tensor, kind: str, links: Sequence[Tensor]) -> Tensor:
        """The example of each row of an input of this kind."""
        if kind == "row":
            return self.owners()
        ends = t if kind == "links" else next(pair for pair in links if pair.shape[1] == len(t))
        return self.owners()[ends[0].cpu().long()]

    def taken(self, t: Tensor, kind: str, links: Sequence[Tensor], examples: Sequence[Sequence[Piece]]) -> Tensor:
        """What an input of this kind is for new examples, each of which is made of pieces of these."""
        sizes = torch.tensor([sum(rows for _, rows in pieces) for pieces in examples], dtype=torch.long)
        if kind in TELLERS:
            return _told(sizes, kind).to(t)
        chosen: list[Tensor] = []
        ends = t if kind == "links" else next((pair for pair in links if pair.shape[1] == len(t)), None)
        own = self.numbers(t, kind, links) if kind != "row" else None
        moved, begin = [], 0
        for i, rows in (piece for pieces in examples for piece in pieces):
            first = self.begins[i]
            if own is None:
                chosen.append(torch.arange(first, first + rows))
            else:
                assert ends is not None
                inside = (own == i) & (ends.cpu() < first + rows).all(0)
                chosen.append(inside.nonzero().flatten())
                moved.append(torch.full((len(chosen[-1]),), begin - first))
            begin += rows
        index = torch.cat(chosen).to(t.device)
        if kind == "links":
            return t[:, index] + torch.cat(moved).to(t)
        return t.index_select(0, index)

    def local(self, links: Tensor) -> Tensor:
        """The pairs of rows (links, 2) by their numbers within their example."""
        begins = torch.tensor(self.begins, device=links.device)
        return (links - begins[self.numbers(links, "links", [links]).to(links.device)].to(links)).t()

    def placed(self, local: Tensor, links: Tensor) -> Tensor:
        """The pairs (2, links) of such numbers, which are kept within their example."""
        own = self.numbers(links, "links", [links]).to(links.device)
        begins, counts = (torch.tensor(v, device=links.device, dtype=links.dtype)[own] for v in self)
        return begins + torch.minimum(local.t().clamp(min=0), counts - 1)


def _rows_of(tensors: Sequence[Any], kinds: Sequence[Any]) -> int:
    """How many rows there are in all: as the lists say, otherwise what tells whose they are."""
    for t, kind in zip(tensors, kinds, strict=True):
        if kind in ("row", "whose"):
            return len(t)
    return next(int(t.sum() if kind == "counts" else t[-1]) for t, kind in zip(tensors, kinds, strict=True) if kind in TELLERS)


def _counts(t: Tensor, kind: str, examples: int, rows: int) -> Tensor:
    """How many rows each example has."""
    if kind == "whose":
        return torch.bincount(t, minlength=examples)
    if kind == "counts":
        return t
    first, last = t.new_zeros(int(kind == "ends")), t.new_full((int(kind == "begins"),), rows)
    return torch.cat([first, t, last]).diff()


def _told(counts: Tensor, kind: str) -> Tensor:
    """The input of this kind that tells these numbers of rows."""
    if kind == "whose":
        return torch.arange(len(counts)).repeat_interleave(counts)
    if kind == "counts":
        return counts
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ends[1:] if kind == "ends" else ends[:-1] if kind == "begins" else ends


def counted(t: Any, kind: str, examples: int, rows: int) -> list[int] | None:
    """How many rows each of so many examples has, if this input tells it of so many rows, in their order; None if it does not."""
    if not isinstance(t, Tensor) or t.dim() != 1 or t.dtype not in (torch.int64, torch.int32) or not len(t):
        return None
    t = t.detach().cpu().long()
    size = rows if kind == "whose" else examples + (kind == "bounds")
    if len(t) != size or (kind == "whose" and (int(t.min()) < 0 or int(t[-1]) != examples - 1)):
        return None
    counts = _counts(t, kind, examples, rows)
    return (
        counts.tolist()
        if bool((counts >= 0).all()) and torch.equal(_told(counts, kind), t) and int(counts.sum()) == rows
        else None
    )


def tell(tensors: Sequence[Any], kinds: Sequence[Any], examples: int, *, empty: bool) -> bool:
    """Whether the inputs that tell whose each row is agree, and tell it of all rows; ``empty``: examples may have none."""
    pairs = [*zip(tensors, kinds, strict=True)]
    if any(kind in FLAT and (not isinstance(t, Tensor) or not t.dim()) for t, kind in pairs):
        return False
    rows = _rows_of(tensors, kinds)
    every = [counted(t, kind, examples, rows) for t, kind in pairs if kind in TELLERS]
    counts = every[0]
    if counts is None or any(other != counts for other in every) or (0 in counts and not empty):
        return False
    flat, columns = Flat.of(tensors, kinds, examples), {t.shape[1] for t, kind in pairs if kind == "links" and t.dim() == 2}
    lists = all(len(t) == rows for t, kind in pairs if kind == "row") and all(
        len(t) in columns for t, kind in pairs if kind == "link"
    )
    return flat is not None and lists and all(_is_links(t, flat) for t, kind in pairs if kind == "links")


def flat_kinds(tensors: Sequence[Any], usual: Sequence[Any], examples: int) -> Iterator[tuple[Any, ...]]:
    """How each input may be read if some of them tell whose each row is; ``usual`` is how the others are.

    What tells the same as another input does so by no chance, until it tells something else. If two tell otherwise of as many rows, it is
    unknown which of them is right.
    """
    lengths = dict.fromkeys(len(t) for t in tensors if isinstance(t, Tensor) and t.dim())
    for k, t in enumerate(tensors):
        for kind, rows in product(TELLERS, lengths):
            counts = counted(t, kind, examples, rows)
            if counts is None:
                continue
            every = [(i, other, counted(u, other, examples, rows)) for i, u in enumerate(tensors) for other in TELLERS if i != k]
            also = {i: other for i, other, its in reversed(every) if its == counts}
            if any(its is not None and i not in also and other in _CERTAIN for i, other, its in every):
                continue
            for tells in dict.fromkeys((tuple((also | {k: kind}).items()), ((k, kind),))):
                yield from _with_lists(tensors, usual, examples, dict(tells), rows)


def _with_lists(
    tensors: Sequence[Any], usual: Sequence[Any], examples: int, tells: dict[int, str], rows: int
) -> Iterator[tuple[Any, ...]]:
    """The same if just these tell it of so many rows."""
    k, kind = next(iter(tells.items()))
    own = torch.tensor(counted(tensors[k], kind, examples, rows))
    flat = Flat((own.cumsum(0) - own).tolist(), own.tolist())
    links = {i for i, u in enumerate(tensors) if i not in tells and _is_links(u, flat)}
    pairs = {tensors[i].shape[1] for i in links}
    lists = [() if i in tells or i in links else _lists(u, rows, pairs) for i, u in enumerate(tensors)]
    for chosen in product(*(kinds or ("",) for kinds in lists)) if any(lists) else ():
        yield tuple(tells.get(i) or ("links" if i in links else chosen[i] or usual[i]) for i in range(len(tensors)))


def evenly(tensors: Sequence[Any], layouts: Sequence[Any], examples: int) -> tuple[Even, ...]:
    """The inputs that tell as many rows of each example as the layouts of others say: these have a rule until one tells otherwise."""
    factors = sorted({layout.factor for layout in layouts if isinstance(layout, Layout)})
    return tuple(
        (k, kind, c)
        for k, t in enumerate(tensors)
        for kind, c in product(TELLERS, factors)
        if counted(t, kind, examples, c * examples) == [c] * examples
    )


def possible(tensors: Sequence[Any], value: Tensor) -> Iterator[int]:
    """Numbers of examples that some input may tell of the rows of the first tensor."""
    for k, t in enumerate(tensors):
        if isinstance(t, Tensor) and t.dim() == 1 and len(t) and t.dtype in (torch.int64, torch.int32):
            sizes = {kind: len(t) - (kind == "bounds") for kind in TELLERS} | {"whose": int(t[-1]) + 1}
            for kind, size in sizes.items():
                rows = len(t) if kind == "whose" else len(value)
                found = counted(t, kind, size, rows) if size > 0 and (k or kind == "whose") else None
                if found is not None and (kind == "begins" or 0 not in found):
                    yield size


def told_otherwise(t: Any, rows: int) -> Iterator[Tensor]:
    """For each way in which this input may tell that some example has several of so many rows: what would tell another one.

    Nobody knows that it does: classes may add up to the number of rows by chance.
    """
    if not isinstance(t, Tensor) or t.dim() != 1 or not len(t) or t.dtype not in (torch.int64, torch.int32):
        return
    for kind in TELLERS:
        n = int(t[-1]) + 1 if kind == "whose" else len(t) - (kind == "bounds")
        counts = counted(t, kind, n, rows) if 0 < n <= rows else None
        if counts is not None and max(counts) > 1 and (n > 1 or kind in _CERTAIN):
            most = counts.index(max(counts))
            moved = torch.tensor(counts)
            moved[most] -= 1
            moved[(most + 1) % n] += n > 1
            yield _told(moved, kind).to(t)


def _lists(t: Any, rows: int, pairs: set[int]) -> tuple[str, ...]:
    """What this may be a list of; if there are as many links as rows, of either."""
    size = len(t) if isinstance(t, Tensor) and t.dim() else -1
    return ("row",) * (size == rows) + ("link",) * (size in pairs)


def _is_links(t: Any, flat: Flat) -> bool:
    """Whether this names two rows of one example in each column."""
    if not isinstance(t, Tensor) or t.dim() != 2 or len(t) != 2 or t.dtype not in (torch.int64, torch.int32):
        return False
    if t.numel() and (int(t.min()) < 0 or int(t.max()) >= sum(flat.counts)):
        return False
    own = flat.owners()[t.cpu().long()]
    return bool((own[0] == own[1]).all())

"""Inputs with the rows of all examples in one list (the nodes of graphs, the tokens of texts): whose row is it?

One input tells: ``whose``, the example of each row, in ascending order; or ``counts``, how many rows each example has. Others have a value
for each row (``row``), name two rows in each column (``links``, the edges of a graph), or have a value for each of these (``link``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLAT = ("whose", "counts", "row", "links", "link")
Piece = tuple[int, int]  # an example, and how many of its rows


class Flat(NamedTuple):
    """Where each example's rows begin, and how many it has."""

    begins: list[int]
    counts: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Any], kinds: Sequence[Any], examples: int) -> Flat | None:
        """What the inputs tell of it, if they are read so."""
        for t, kind in zip(tensors, kinds, strict=True):
            if kind in ("whose", "counts"):
                counts = torch.bincount(t.cpu(), minlength=examples) if kind == "whose" else t.cpu()
                return cls((counts.cumsum(0) - counts).tolist(), counts.tolist())
        return None

    def every(self, examples: Sequence[int]) -> list[list[Piece]]:
        """These examples with all their rows."""
        return [[(i, self.counts[i])] for i in examples]

    def halves(self) -> list[list[Piece]]:
        """All examples, every second one with half of its rows."""
        return [[(i, max(1, rows // 2) if i % 2 else rows)] for i, rows in enumerate(self.counts)]

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
        if kind == "whose":
            return torch.arange(len(examples)).repeat_interleave(sizes).to(t)
        if kind == "counts":
            return sizes.to(t)
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


def is_whose(t: Any, examples: int | None = None) -> bool:
    """Whether this may be the example of each row, of so many examples."""
    if not isinstance(t, Tensor) or t.dim() != 1 or t.dtype not in (torch.int64, torch.int32) or not len(t):
        return False
    steps = t[1:] - t[:-1]
    last = int(t[-1])
    return int(t[0]) == 0 and (examples is None or last == examples - 1) and bool(((steps == 0) | (steps == 1)).all())


def flat_kinds(tensors: Sequence[Any], usual: Sequence[Any], examples: int) -> Iterator[tuple[Any, ...]]:
    """How each input may be read if one of them tells whose each row is; ``usual`` is how the others are."""
    for k, t in enumerate(tensors):
        kind = "whose" if is_whose(t, examples) else "counts" if is_counts(t, examples) else None
        if kind is None:
            continue
        flat = Flat.of([t], [kind], examples)
        assert flat is not None
        rows = sum(flat.counts)
        links = {i for i, u in enumerate(tensors) if i != k and _is_links(u, flat)}
        pairs = {tensors[i].shape[1] for i in links}
        lists = [() if i == k or i in links else _lists(u, rows, pairs) for i, u in enumerate(tensors)]
        for chosen in product(*(kinds or ("",) for kinds in lists)) if any(lists) else ():
            yield tuple(kind if i == k else "links" if i in links else chosen[i] or usual[i] for i in range(len(tensors)))


def _lists(t: Any, rows: int, pairs: set[int]) -> tuple[str, ...]:
    """What this may be a list of; if there are as many links as rows, of either."""
    size = len(t) if isinstance(t, Tensor) and t.dim() else -1
    return ("row",) * (size == rows) + ("link",) * (size in pairs)


def is_counts(t: Any, examples: int) -> bool:
    """Whether this may be how many rows each of so many examples has."""
    whole = isinstance(t, Tensor) and t.dim() == 1 and t.dtype in (torch.int64, torch.int32)
    return whole and len(t) == examples and bool((t >= 1).all())


def _is_links(t: Any, flat: Flat) -> bool:
    """Whether this names two rows of one example in each column."""
    if not isinstance(t, Tensor) or t.dim() != 2 or len(t) != 2 or t.dtype not in (torch.int64, torch.int32):
        return False
    if t.numel() and (int(t.min()) < 0 or int(t.max()) >= sum(flat.counts)):
        return False
    own = flat.owners()[t.cpu().long()]
    return bool((own[0] == own[1]).all())

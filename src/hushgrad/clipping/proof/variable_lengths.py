"""Examples of different lengths: which rows and positions of a model's outputs belong to which example.

The lengths come from a packed sequence, or from an input with one integer for each example. An output then has one row for each position
of each example, in the order of a packed sequence or one example after the other, or is padded to the longest example. Each of these is a
hypothesis that is proved like any other. A proof sees such an output *opened*: (examples, longest length, ...), with 0 beyond an example's
own length. The user's output is not changed.

Positions beyond an example's own length exist only because another example is longer. So no gradient may come back to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping.layout import gathered, padded

Form = Literal["packed", "in turn", "padded"]


class Way(NamedTuple):
    """How one output holds examples of different lengths; ``leaf`` is the number of the input with the lengths."""

    leaf: int
    form: Form
    dim: int = 0  # of the examples in a padded output; positions are in the other of the first two


class Opening(NamedTuple):
    """How each output is opened (None: not at all), and to how many positions; 0: to the longest example's length."""

    ways: tuple[Way | None, ...]
    longest: int = 0


# Lengths --------------------------------------------------------------------------------------------------------------------


def owners_of(packed: PackedSequence) -> Tensor:
    """The example of each row of a packed sequence."""
    order = packed.sorted_indices
    if order is None:
        order = torch.arange(int(packed.batch_sizes[0]))
    return torch.cat([order[: int(n)] for n in packed.batch_sizes])


def _lengths(leaf: Any) -> Tensor | None:
    """The length of each example, if this input may say so."""
    if isinstance(leaf, PackedSequence):
        return torch.bincount(owners_of(leaf))
    if leaf.dim() != 1 or leaf.dtype not in (torch.int64, torch.int32) or not len(leaf) or int(leaf.min()) < 1:
        return None
    return leaf.detach().long()


def _rows(leaf: Any, lengths: Tensor, form: str) -> Tensor:
    """The example of each row."""
    if form == "in turn":
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    if isinstance(leaf, PackedSequence):
        return owners_of(leaf)
    order = lengths.sort(descending=True)[1]  # as pack_padded_sequence does
    return torch.cat([order[: int((lengths > t).sum())] for t in range(int(lengths.max()))])


def tells_lengths(leaves: Sequence[Any], examples: int) -> bool:
    """Whether some input may hold the length of each example."""
    return any(len(lengths) == examples for lengths in map(_lengths, leaves) if lengths is not None)


def lengthened(ways: tuple[Way | None, ...], leaves: Sequence[Any]) -> Opening | None:
    """How to open the outputs for these inputs, and for some of their examples."""
    known = [lengths for way in ways if way is not None and (lengths := _lengths(leaves[way.leaf])) is not None]
    return Opening(ways, max(int(lengths.max()) for lengths in known)) if known else None


# Hypotheses -----------------------------------------------------------------------------------------------------------------


def openings(shapes: Sequence[torch.Size], leaves: Sequence[Any], examples: int) -> Iterator[Opening | None]:
    """How outputs of these shapes may hold the examples, the likely ways first; None: without opening."""
    later: list[Opening] = []
    for k, leaf in enumerate(leaves):
        lengths = _lengths(leaf)
        if lengths is None or len(lengths) != examples:
            continue
        rows, longest = int(lengths.sum()), int(lengths.max())
        orders: tuple[Form, ...] = ("packed", "in turn")
        for order in orders if any(s[:1] == (rows,) for s in shapes) else ():
            yield Opening(tuple(Way(k, order) if s[:1] == (rows,) else None for s in shapes), longest)
        for d, sizes in enumerate(((examples, longest), (longest, examples))):  # which may be the same
            if any(s[:2] == sizes for s in shapes):
                later.append(Opening(tuple(Way(k, "padded", d) if s[:2] == sizes else None for s in shapes), longest))
    yield None
    yield from later  # last: a part of a padded output is ignored


# Opened outputs ---------------------------------------------------------------------------------------------------------------


class _Opened(torch.autograd.Function):
    """Rows (n, ...) as (B, T, ...), by their row numbers (B, T); 0 where the number is -1."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, where: Tensor) -> Tensor:
        ctx.save_for_backward(where)
        ctx.rows = len(y)
        return gathered(y, where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (where,), (g,) = ctx.saved_tensors, grads
        made = g.new_zeros(ctx.rows, *g.shape[2:])
        made[where[where >= 0]] = g[where >= 0]
        return made, None


OPENED = f"{_Opened.__name__}Backward"


def opened(outputs: list[Tensor], opening: Opening, leaves: Sequence[Any]) -> list[Tensor]:
    """The outputs as a proof sees them. Raises LookupError if they do not match."""
    if len(opening.ways) != len(outputs):
        raise LookupError("other outputs")
    pairs = zip(outputs, opening.ways, strict=True)
    return [y if way is None else _open(y, way, leaves[way.leaf], opening.longest) for y, way in pairs]


def _open(y: Tensor, way: Way, leaf: Any, longest: int) -> Tensor:
    lengths = _lengths(leaf)
    if lengths is None or (longest and int(lengths.max()) > longest):
        raise LookupError("other lengths")
    examples = len(lengths)
    if way.form == "padded":
        T = int(lengths.max())
        if y.shape[way.dim : way.dim + 1] != (examples,) or y.shape[1 - way.dim : 2 - way.dim] != (T,):
            raise LookupError("an output that is not padded to the longest example")
        own = torch.arange(T) < lengths.cpu().unsqueeze(1)
        where = torch.where(own, torch.arange(examples * T).reshape(examples, T), -1)
        y = y.transpose(0, 1) if way.dim else y
        y = y.reshape(examples * T, *y.shape[2:])
    else:
        index = _rows(leaf, lengths, way.form)
        if y.shape[:1] != index.shape:
            raise LookupError("an output with other rows")
        where = padded(index, examples)
    fill = where.new_full((examples, max(0, longest - where.shape[1])), -1)
    return _Opened.apply(y, torch.cat([where, fill], 1).to(y.device))  # type: ignore[no-any-return, no-untyped-call]


def beyond(way: Way, leaf: Any, g: Tensor) -> bool:
    """Whether a gradient came back to a padded output beyond an example's own length."""
    lengths = _lengths(leaf)
    assert lengths is not None
    g = g.transpose(0, 1) if way.dim else g
    return bool(g[torch.arange(g.shape[1], device=g.device) >= lengths.to(g.device).unsqueeze(1)].any())

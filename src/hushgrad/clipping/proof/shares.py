"""Reads a frontier: each example's share of what a node sends down, and the path of these shares to their sources.

| node | share of example i | cost |
|---|---|---|
| pointwise, expand | the node's own gradient before the engine sums it, split by example | the node once more |
| matrix products, tables | the product of example i's rows; the rows that it looked up | the node once more |
| any other | the node on example i's cotangent alone (it is linear) | B nodes |

A non-finite record can reach other examples (0 * NaN is NaN) only by the last row, or below the frontier where examples met the shared
value behind a gradient that was 0 for all. There a zero cotangent gives a zero share, other shares are computed again from finite saved
tensors (:mod:`hushgrad.clipping.proof.saved_tensors`), and the record itself keeps its non-finite share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import Node, accumulated, called, input_shape, saved
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.finite_shares import Shares, finite_shares, nonfinite_rows, shares_one_by_one
from hushgrad.clipping.proof.graph import Border, operation
from hushgrad.clipping.proof.saved_tensors import Packing
from hushgrad.clipping.proof.survey import one_owner_each
from hushgrad.clipping.pullback import pullback
from hushgrad.clipping.rules.experts import Routed
from hushgrad.errors import CaptureError

Grads = tuple[Tensor | None, ...]

# Elementwise nodes: each element of the result depends on that element of the cotangent alone.
_POINTWISE = frozenset("Add Sub Rsub Mul Div Where Maximum Minimum Addcmul Lerp Pow MaskedFill PreluKernel".split())
_BIASED = frozenset(("Addmm", "Baddbmm", "Addbmm", "Addmv"))


class Sink(NamedTuple):
    """A source of shared values, and the function that takes its shares (B, *shape of the edge) and the size of what cancelled in them.

    The parameter of a mixture of experts may take the rows that its shares are made of instead.
    """

    edge: GradientEdge
    take: Callable[[Tensor | Routed, float], None]


Deaf = Callable[[], AbstractContextManager[None]]


class Reading(NamedTuple):
    """How the frontier of one pass is read. ``owners``: of cotangents without a regular layout; ``bad``: records with non-finite outputs;
    inside ``deaf`` the calls' own hooks, which expect sums over all examples, are off.
    """

    examples: int
    owners: dict[Node, list[Any]]
    deaf: Deaf
    packing: Packing | None
    bad: Callable[[], Tensor]


def has_formula(node: str, slot: int, layouts: Sequence[Layout | None]) -> bool:
    """Whether the shares of a frontier node of this name can be computed without calling it once for each example."""
    name = operation(node)
    if len(layouts) != 1 or layouts[0] is None:
        return False
    known = name == "Expand" or name in _POINTWISE or (name in _BIASED and slot == 0) or name in ("Mm", "Addmm", "Embedding")
    return layouts[0].regular if known else node == "GroupedMmBackward0" and slot == 1


def watch(borders: Sequence[Border], sinks: Sequence[Sink], reading: Reading, gone: Callable[[], None]) -> Callable[[], None]:
    """Read these frontier nodes in the next backward pass. Returns a function that releases everything.

    A hook that refers to nodes of its own graph would keep the graph alive, so its state is in a list that is emptied. A backward pass
    after that calls ``gone``.
    """
    by_node: dict[Node, list[Border]] = {}
    for border in borders:
        by_node.setdefault(border.node, []).append(border)
    kept = [(node, mine, sinks, reading) for node, mine in by_node.items()]
    pulling: list[Border] = []

    def hook(number: int) -> Callable[[Grads], Grads | None]:
        def run(gs: Grads) -> Grads | None:
            if pulling:  # pulling from a frontier further up: stop here, since this node reads its own cotangents
                return tuple(None if g is None else torch.zeros_like(g) for g in gs)
            if torch.is_grad_enabled():
                return None  # create_graph: the calls above refuse it
            if kept:
                _read(*kept[number], gs, pulling)
            else:
                gone()
            return None

        return run

    for number, (node, *_) in enumerate(kept):
        node.register_prehook(hook(number))
    return kept.clear


def _read(node: Node, mine: list[Border], sinks: Sequence[Sink], reading: Reading, gs: Grads, pulling: list[Border]) -> None:
    masks = _masks(gs, mine[0].layouts, reading.owners.get(node), reading.examples)
    for border in mine:
        edge = GradientEdge(*node.next_functions[border.slot])
        share = _share(border, gs, masks, reading, tuple(input_shape(edge)))
        pulling.append(border)
        try:
            _send(edge, *share, sinks, reading)
        finally:
            pulling.pop()


def _send(edge: GradientEdge, share: Tensor | Routed, gross: float, sinks: Sequence[Sink], reading: Reading) -> None:
    """Pull B cotangents at an edge below the frontier back to all sources that it reaches."""
    if isinstance(share, Routed):
        leaf, share = _straight(edge, share, sinks)
        if isinstance(share, Routed):
            for sink in sinks:
                if sink.edge.node is leaf:
                    sink.take(share, 0.0)
            return
        gross = float(share.norm()) * len(share) ** 0.5
    if accumulated(edge.node) is not None:
        for sink in sinks:
            if sink.edge.node is edge.node:
                sink.take(share, gross)
        return
    here = [sink for sink in sinks if sink.edge.node is edge.node and sink.edge.output_nr == edge.output_nr]
    for sink in here:
        sink.take(share, gross)
    sinks = [sink for sink in sinks if sink not in here]
    inputs = [sink.edge for sink in sinks]
    if not inputs:
        return
    with reading.deaf():
        found = _pulled_apart(edge, inputs, share, reading)
    for sink, made in zip(sinks, found, strict=True):
        if made is not None:
            sink.take(made, gross)


def _pulled_apart(edge: GradientEdge, inputs: list[GradientEdge], share: Tensor, reading: Reading) -> Shares:
    return finite_shares(
        ask=lambda by: pullback([edge], inputs, [share if by == 1 else share * by]),
        zero=lambda: ~share.reshape(len(share), -1).any(1),
        wild=lambda: nonfinite_rows(share) | reading.bad().to(share.device),
        packing=reading.packing,
        where=edge.node.name(),
    )


def _straight(edge: GradientEdge, share: Routed, sinks: Sequence[Sink]) -> tuple[Node | None, Tensor | Routed]:
    """The expert parameter at this edge, possibly transposed, that can take rows; None if it needs dense shares."""
    node = edge.node
    if share.few and accumulated(node) is not None:
        return node, share
    if share.few and node.name() == "TransposeBackward0" and not any(sink.edge.node is node for sink in sinks):
        below = node.next_functions[0][0]
        dims = {int(getattr(node, name)) % 2**64 for name in ("_saved_dim0", "_saved_dim1")}
        if below is not None and accumulated(below) is not None and dims in ({1, 2}, {2**64 - 2, 2**64 - 1}):
            return below, share.turned
    # The gradient then has the parameter's memory layout.
    turned = node.name() == "TransposeBackward0"
    return None, share.turned.dense.transpose(2, 3) if turned else share.dense


def _masks(gs: Grads, layouts: tuple[Layout | None, ...], owners: list[Any] | None, examples: int) -> list[Tensor | None]:
    """The owner of each element of each cotangent, in a shape that broadcasts."""
    made: list[Tensor | None] = []
    for k, g in enumerate(gs):
        layout = layouts[k] if k < len(layouts) else None
        if g is None:
            made.append(None)
        elif layout is not None and layout.regular:
            made.append(layout.at(g.shape, examples).owners(g.shape, examples, g.device))
        else:
            mask = owners[k].each if owners is not None and k < len(owners) else None
            if mask is None and bool(g.any()):
                raise CaptureError("A gradient came back on a way that had none when the model was proved.")
            made.append(torch.full((), -1, device=g.device) if mask is None else mask.long())
    return made


def _share(
    border: Border, gs: Grads, masks: list[Tensor | None], reading: Reading, shape: tuple[int, ...]
) -> tuple[Tensor | Routed, float]:
    """(B, *shape), and the size of its terms before cancellation; for rows of experts the taker computes that."""
    g, layout, examples = gs[0], border.layouts[0], reading.examples
    if len(gs) == 1 and g is not None and layout is not None and layout.regular:
        layout = layout.at(g.shape, examples)
        name = operation(border.node.name())
        raw = _unsummed(border, name, g)
        if raw is not None and raw.shape == g.shape:
            made = _split(raw, layout, examples, shape)
            if made is not None:
                return made, float(raw.norm()) * raw.numel() ** 0.5
        product = _product(border, name, g, layout, examples)
        if product is not None:
            return product
        looked_up = _looked_up(border, name, g, masks[0], examples, shape)
        if looked_up is not None:
            return looked_up, float(looked_up.norm()) * examples**0.5
    routed = _by_experts(border, gs, masks, examples)
    if routed is not None:
        return routed, 0.0
    shares = _one_by_one(border, gs, masks, reading, shape)
    return shares, float(shares.norm()) * examples**0.5


def _by_experts(border: Border, gs: Grads, masks: list[Tensor | None], examples: int) -> Routed | None:
    """x[rows of expert e] @ W[e] for all experts at once: each example's rows in each expert."""
    x, ends = (saved(border.node, name) if border.node.name() == "GroupedMmBackward0" else None for name in ("self", "offs"))
    g, mask = gs[0], masks[0]
    if border.slot != 1 or x is None or ends is None or g is None or mask is None or x.dim() != 2 or g.dim() != 2:
        return None
    each = mask if mask.shape == (len(g), 1) else mask.expand(g.shape)
    if not one_owner_each(each):
        return None
    owner, expert = each.amax(1), torch.searchsorted(ends.long(), torch.arange(len(g), device=g.device), right=True)
    own = (owner >= 0) & (expert < len(ends))
    if not bool(own.all()):
        x, g, owner, expert = x[own], g[own], owner[own], expert[own]
    return Routed(x, g, owner, expert, examples, len(ends))


def _unsummed(border: Border, name: str, g: Tensor) -> Tensor | None:
    if name == "Expand":
        return g
    if name in _POINTWISE or (name in _BIASED and border.slot == 0):
        return called(border.node, (g,))[border.slot]
    return None


def _split(raw: Tensor, layout: Layout, examples: int, shape: tuple[int, ...]) -> Tensor | None:
    """(B, *shape): each example's part, summed over broadcast dimensions. None if the source has rows of its own there."""
    lead = raw.dim() - len(shape)
    if layout.dim >= lead and shape[layout.dim - lead] != 1:
        return None
    apart = layout.apart(raw, examples)
    return apart.sum_to_size(examples, *([1] * lead), *shape).reshape(examples, *shape)


def _product(border: Border, name: str, g: Tensor, layout: Layout, examples: int) -> tuple[Tensor, float] | None:
    """mat1 @ mat2 with rows (or columns) of examples on one side and a shared matrix on the other."""
    slot = border.slot - (name == "Addmm")
    if name not in ("Mm", "Addmm") or slot not in (0, 1) or layout.dim != 1 - slot:
        return None
    other = saved(border.node, ("self" if name == "Mm" else "mat1") if slot else "mat2")
    if other is None or (name == "Addmm" and getattr(border.node, "_saved_alpha", 0.0) != 1):
        return None
    if slot == 0:  # W @ x, with the examples in the columns of x
        g, other, layout = g.t(), other.t(), layout._replace(dim=0)
    left, right = (layout.apart(t, examples).flatten(1, -2) for t in (other.conj(), g))  # of complex numbers, views of parameters
    made = torch.bmm(left.transpose(1, 2), right)
    return made if slot else made.transpose(1, 2), float(left.norm()) * float(right.norm())


def _looked_up(
    border: Border, name: str, g: Tensor, owners: Tensor | None, examples: int, shape: tuple[int, ...]
) -> Tensor | None:
    """The rows of a table, each added to the share of the example that looked it up."""
    ids = saved(border.node, "indices") if name == "Embedding" else None
    if ids is None or owners is None or ids.shape != g.shape[:-1] or border.node._saved_scale_grad_by_freq:
        return None
    if owners.dim() == g.dim() and owners.shape[-1] != 1:  # rows are not single examples'
        return None
    used = ids != border.node._saved_padding_idx
    where = (owners.expand(g.shape)[..., 0] * shape[0] + ids)[used]
    return g.new_zeros(examples * shape[0], shape[1]).index_add_(0, where, g[used]).view(examples, *shape)


def _one_by_one(border: Border, gs: Grads, masks: list[Tensor | None], reading: Reading, shape: tuple[int, ...]) -> Tensor:
    def whose(of: Callable[[Tensor], Tensor]) -> Tensor:
        found = torch.zeros_like(reading.bad())
        for g, mask in zip(gs, masks, strict=True):
            if g is not None and mask is not None:
                owners = mask.expand(g.shape)[of(g)].to(found.device)
                found[owners[owners >= 0]] = True
        return found

    (made,) = finite_shares(
        ask=lambda by: (
            shares_one_by_one(border, [g if g is None or by == 1 else g * by for g in gs], masks, reading.examples, shape),
        ),
        zero=lambda: ~whose(lambda g: g != 0),
        wild=lambda: whose(lambda g: ~g.isfinite()) | reading.bad(),
        packing=reading.packing,
        where=border.node.name(),
    )
    assert made is not None
    return made

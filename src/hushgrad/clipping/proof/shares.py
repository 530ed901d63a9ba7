"""Reading a frontier: each example's share of what a node sends down, and the way of these shares to their sources.

| node | share of example i | cost |
|---|---|---|
| pointwise, expand | the node's own gradient before the engine sums it, split by example | the node once more |
| matrix products | the product of example i's rows | the node once more |
| any other | the node on example i's cotangent alone (it is linear) | B nodes |
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
from hushgrad.clipping.proof.graph import Border
from hushgrad.errors import CaptureError

__all__ = ["Sink", "watch"]

Grads = tuple[Tensor | None, ...]

# Row by row: what comes out for an element depends on that element of the cotangent alone.
_POINTWISE = {"Add", "Sub", "Rsub", "Mul", "Div", "Where", "Maximum", "Minimum", "Addcmul", "Lerp", "Pow", "MaskedFill"}


class Sink(NamedTuple):
    """A source of shared values, and who takes its shares: a tensor (B, *shape of the edge)."""

    edge: GradientEdge
    take: Callable[[Tensor], None]


Deaf = Callable[[], AbstractContextManager[None]]


def watch(
    borders: Sequence[Border], sinks: Sequence[Sink], examples: int, owners: dict[Node, list[Any]], deaf: Deaf
) -> list[Any]:
    """Read these frontier nodes when the next backward comes to them; ``owners`` of those whose rows follow no rule.

    Inside ``deaf`` the calls' own hooks, which wait for sums over all examples, are not to listen.
    """
    by_node: dict[Node, list[Border]] = {}
    for border in borders:
        by_node.setdefault(border.node, []).append(border)

    def hook(node: Node, mine: list[Border]) -> Any:
        def run(gs: Grads) -> None:
            if torch.is_grad_enabled():
                return  # create_graph: the calls above refuse it
            masks = _masks(gs, mine[0].layouts, owners.get(node), examples)
            for border in mine:
                edge = GradientEdge(*node.next_functions[border.slot])
                send(edge, _share(border, gs, masks, examples, tuple(input_shape(edge))), sinks, deaf)

        return node.register_prehook(run)

    return [hook(node, mine) for node, mine in by_node.items()]


def send(edge: GradientEdge, share: Tensor, sinks: Sequence[Sink], deaf: Deaf) -> None:
    """B cotangents at an edge below the frontier, to all sources that are reached from there."""
    if accumulated(edge.node) is not None:
        for sink in sinks:
            if sink.edge.node is edge.node:
                sink.take(share)
        return
    here = [sink for sink in sinks if sink.edge.node is edge.node and sink.edge.output_nr == edge.output_nr]
    for sink in here:
        sink.take(share)
    sinks = [sink for sink in sinks if sink not in here]
    inputs = [sink.edge for sink in sinks]
    if not inputs:
        return
    with deaf():
        try:
            found = torch.autograd.grad([edge], inputs, [share], retain_graph=True, is_grads_batched=True, allow_unused=True)
        except RuntimeError:  # something on the way cannot be mapped over
            rows = [torch.autograd.grad([edge], inputs, [one], retain_graph=True, allow_unused=True) for one in share]
            found = tuple(torch.stack(column) if column[0] is not None else None for column in zip(*rows, strict=True))  # type: ignore[misc]
    for sink, made in zip(sinks, found, strict=True):
        if made is not None:
            sink.take(made)


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
            made.append(torch.full((), -1, device=g.device) if mask is None else mask)
    return made


def _share(border: Border, gs: Grads, masks: list[Tensor | None], examples: int, shape: tuple[int, ...]) -> Tensor:
    g, layout = gs[0], border.layouts[0]
    if len(gs) == 1 and g is not None and layout is not None and layout.regular:
        layout = layout.at(g.shape, examples)
        name = border.node.name().split("Backward")[0]
        raw = _unsummed(border, name, g)
        if raw is not None and raw.shape == g.shape:
            made = _split(raw, layout, examples, shape)
            if made is not None:
                return made
        product = _product(border, name, g, layout, examples)
        if product is not None:
            return product
    return _one_by_one(border, gs, masks, examples, shape)


def _unsummed(border: Border, name: str, g: Tensor) -> Tensor | None:
    if name == "Expand":
        return g
    if name in _POINTWISE or (name in ("Addmm", "Baddbmm", "Addbmm", "Addmv") and border.slot == 0):
        return called(border.node, (g,))[border.slot]
    return None


def _split(raw: Tensor, layout: Layout, examples: int, shape: tuple[int, ...]) -> Tensor | None:
    """(B, *shape): each example's part, summed over what was broadcast. None if the source has rows of its own there."""
    lead = raw.dim() - len(shape)
    if layout.dim >= lead and shape[layout.dim - lead] != 1:
        return None
    apart = layout.apart(raw, examples)
    return apart.sum_to_size(examples, *([1] * lead), *shape).reshape(examples, *shape)


def _product(border: Border, name: str, g: Tensor, layout: Layout, examples: int) -> Tensor | None:
    """mat1 @ mat2 with rows (or columns) of examples on one side and a shared matrix on the other."""
    slot = border.slot - (name == "Addmm")
    if name not in ("Mm", "Addmm") or slot not in (0, 1) or layout.dim != 1 - slot:
        return None
    other = saved(border.node, ("self" if name == "Mm" else "mat1") if slot else "mat2")
    if other is None or (name == "Addmm" and saved_scale(border.node) != 1):
        return None
    if slot == 0:  # W @ x, with the examples in the columns of x
        g, other, layout = g.t(), other.t(), layout._replace(dim=0)
    left, right = (layout.apart(t, examples).flatten(1, -2) for t in (other, g))
    made = torch.bmm(left.transpose(1, 2), right)
    return made if slot else made.transpose(1, 2)


def saved_scale(node: Any) -> float:
    """Alpha of addmm."""
    return float(getattr(node, "_saved_alpha", 0.0))


def _one_by_one(border: Border, gs: Grads, masks: list[Tensor | None], examples: int, shape: tuple[int, ...]) -> Tensor:
    rows = []
    for i in range(examples):
        part = tuple(
            None if g is None or mask is None else torch.where(mask == i, g, torch.zeros_like(g))
            for g, mask in zip(gs, masks, strict=True)
        )
        raw = called(border.node, part)[border.slot]
        rows.append(next(g for g in gs if g is not None).new_zeros(shape) if raw is None else raw.sum_to_size(shape))
    shares = torch.stack(rows)
    _require_apart(border, shares)
    return shares


def _require_apart(border: Border, shares: Tensor) -> None:
    """One record that is not finite makes everybody's share so (0 * NaN is NaN): then they cannot be told apart."""
    if int((~shares.flatten(1).isfinite().all(1)).sum()) > 1:
        raise CaptureError(
            f"A record that is not finite, or overflows, meets {border.node.name()}, which gives no example its own share of it. Bound the "
            "inputs (torch.nan_to_num, clamp) before they reach the model. Nothing was released."
        )

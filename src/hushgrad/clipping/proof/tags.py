"""Tags: whose row is it, by the model's own graph.

Backward is linear, and a power of two is exact in floating point. So if example i's part of the output's cotangent is multiplied by
2^digit(i), a cotangent further down that comes from example i alone is multiplied by exactly that, bit for bit; one that several examples
reach is not. One digit of the example's number for each pass; no tolerance, no second forward.

Where the true gradient is 0, what arrives is rounding, which proves nothing: a cotangent that is nowhere above ``FLOOR`` is not proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import Node
from hushgrad.clipping.costs import FLOOR
from hushgrad.clipping.layout import LOST, MIXED, NOBODY, Layout

__all__ = ["Exit", "Owners", "cotangents", "tagged"]

Grads = tuple[Tensor | None, ...]


class Exit(NamedTuple):
    """Where cotangents enter: an output of the model whose examples are known."""

    edge: GradientEdge
    like: Tensor  # its value, detached
    layout: Layout


class Owners(NamedTuple):
    """The owner of each element of a cotangent; ``proved`` = False: all of it is rounding, or there is none."""

    each: Tensor | None
    proved: bool

    @property
    def clean(self) -> bool:
        """Proved, and no element belongs to several examples."""
        return self.proved and self.each is not None and not bool((self.each == MIXED).any())


def cotangents(exits: Sequence[Exit], seed: int = 0) -> list[Tensor]:
    """Random, dense, of size about 1: no element is small."""
    lot = np.random.default_rng(seed)  # not torch's, which are quiet meanwhile
    return [
        torch.from_numpy(lot.uniform(0.5, 1.5, e.like.shape) * lot.choice((-1.0, 1.0), e.like.shape)).to(e.like) for e in exits
    ]


def tagged(
    exits: Sequence[Exit], edges: Sequence[GradientEdge], nodes: Sequence[Node], examples: int
) -> tuple[list[Owners], dict[Node, list[Owners]]]:
    """The owners of the cotangents at ``edges``, and of all that arrive at ``nodes`` on the way to these edges."""
    us = cotangents(exits)
    base = 4 if any(u.dtype is torch.float16 for u in us) else 16  # float16 has few exponents
    first = _pulled(exits, edges, nodes, us)
    at_edges, at_nodes = _Digits(first[0]), {n: _Digits(gs) for n, gs in first[1].items()}
    step = 1
    while step == 1 or step < examples:
        scale = torch.pow(2.0, torch.arange(examples) // step % base)
        again = _pulled(exits, edges, nodes, [u * _along(scale, e, u) for u, e in zip(us, exits, strict=True)])
        at_edges.add(again[0], step, base)
        for n, digits in at_nodes.items():
            digits.add(again[1].get(n, ()), step, base)
        step *= base
    return at_edges.owners(examples), {n: digits.owners(examples) for n, digits in at_nodes.items()}


def _along(scale: Tensor, e: Exit, u: Tensor) -> Tensor:
    return scale.to(u)[e.layout.owners(u.shape, len(scale), u.device)]


def _pulled(
    exits: Sequence[Exit], edges: Sequence[GradientEdge], nodes: Sequence[Node], us: list[Tensor]
) -> tuple[Grads, dict[Node, Grads]]:
    seen: dict[Node, Grads] = {}

    def watch(node: Node) -> object:
        return node.register_prehook(lambda gs: seen.__setitem__(node, tuple(gs)))

    handles = [watch(node) for node in nodes]
    try:
        found = torch.autograd.grad([e.edge for e in exits], list(edges), us, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]
    return found, seen


class _Digits:
    """Cotangents, and what is known of their owners so far."""

    def __init__(self, grads: Grads) -> None:
        self.complex = [g is not None and g.is_complex() for g in grads]
        grads = tuple(None if g is None else _wide(g) for g in grads)
        self.parts = [None if g is None else torch.frexp(g) for g in grads]
        self.large = [g is not None and _is_large(g) for g in grads]
        self.each = [None if g is None else torch.where(g == 0, NOBODY, torch.where(g.isfinite(), 0, LOST)) for g in grads]

    def add(self, grads: Grads, step: int, base: int) -> None:
        """One more digit."""
        for k, part in enumerate(self.parts):
            each = self.each[k]
            if part is None or each is None:
                continue
            g = grads[k] if k < len(grads) else None
            if g is None:
                self.each[k] = torch.full_like(each, MIXED)
                continue
            mantissa, exponent = torch.frexp(_wide(g))
            digit = exponent.sub(part.exponent).long()
            nothing = ((part.mantissa == 0) & (mantissa == 0)) | ~part.mantissa.isfinite()  # NaN says nothing of its owner
            right = (part.mantissa == mantissa) & (digit >= 0) & (digit < base)
            known = torch.where(right, each + step * digit, MIXED)
            self.each[k] = torch.where(nothing, each, torch.where(each == MIXED, MIXED, torch.where(each == LOST, LOST, known)))

    def owners(self, examples: int) -> list[Owners]:
        made = []
        for each, large, pair in zip(self.each, self.large, self.complex, strict=True):
            if each is not None:
                each = torch.where(each >= examples, MIXED, each)
                if pair:  # a complex number has two parts: both must have one owner
                    low, high = each.amin(-1), each.amax(-1)
                    each = torch.where((low == high) | (low == NOBODY) | (low == LOST), high, MIXED)
            made.append(Owners(each, large))
        return made


def _wide(g: Tensor) -> Tensor:
    if g.is_complex():
        return torch.view_as_real(g.detach())
    return g.detach() if g.dtype in (torch.float32, torch.float64) else g.detach().float()


def _is_large(g: Tensor) -> bool:
    return bool(g.numel()) and float(g.detach().nan_to_num(0, 0, 0).abs().max()) > FLOOR.get(g.dtype, FLOOR[torch.float16])

"""Tags: whose row is it, by the model's own graph.

Backward is linear, and a power of two is exact in floating point. So if example i's part of the output's cotangent is multiplied by
2^digit(i), a cotangent further down that comes from example i alone is multiplied by exactly that, bit for bit; one that several examples
reach is not. One digit of the example's number for each pass; no tolerance, no second forward.

Where the true gradient is 0, terms cancel and what arrives is rounding, which proves nothing. A power of two scales rounding, too; three
does not: a small cotangent that is not three times as large for outputs' cotangents three times as large is not proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad._widest import widest
from hushgrad.clipping._torch import Node
from hushgrad.clipping.costs import MULTIPLE
from hushgrad.clipping.layout import LOST, MIXED, NOBODY, Layout
from hushgrad.clipping.proof.quiet import hushed

__all__ = ["Exit", "Owners", "cotangents", "tagged"]

Grads = tuple[Tensor | None, ...]

_WORDS = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}  # as whole numbers; where the exponent's bits begin
_FEWEST = 1e-30  # the least normal number of a type with eight bits of exponent or more is below


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

    @property
    def silent(self) -> bool:
        """No gradient came back at all: that says nothing of anybody."""
        return self.each is None or bool((self.each == NOBODY).all())


def cotangents(exits: Sequence[Exit], seed: int = 0) -> list[Tensor]:
    """Random, dense, of size about 1: no element is small."""
    lot = np.random.default_rng(seed)  # not torch's, whose numbers are the model's
    return [
        torch.from_numpy(lot.uniform(0.5, 1.5, e.like.shape) * lot.choice((-1.0, 1.0), e.like.shape)).to(e.like) for e in exits
    ]


def tagged(
    exits: Sequence[Exit], edges: Sequence[GradientEdge], nodes: Sequence[Node], examples: int
) -> tuple[list[Owners], dict[Node, list[Owners]]]:
    """The owners of the cotangents at ``edges``, and of all that arrive at ``nodes`` on the way to these edges."""
    us = cotangents(exits)
    base = 4 if any(u.dtype is torch.float16 for u in us) else 16  # float16 has few exponents
    pulled = _pulled(exits, edges, nodes, us)
    at_edges, at_nodes = _Digits(pulled[0]), {n: _Digits(gs) for n, gs in pulled[1].items()}
    del pulled
    step = 1
    while step == 1 or step < examples:
        scale = torch.pow(2.0, torch.arange(examples) // step % base)
        again = _pulled(exits, edges, nodes, [u * _along(scale, e, u) for u, e in zip(us, exits, strict=True)])
        at_edges.add(again[0], step, base)
        for n, digits in at_nodes.items():
            digits.add(again[1].get(n, ()), step, base)
        del again
        step *= base
    _ask_small(at_edges, at_nodes, lambda: _pulled(exits, edges, nodes, [3 * u for u in us]))
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
        with hushed():
            found = torch.autograd.grad([e.edge for e in exits], list(edges), us, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]
    return found, seen


class _Digits:
    """Cotangents, and what is known of their owners so far."""

    def __init__(self, grads: Grads) -> None:
        self.complex = [g is not None and g.is_complex() for g in grads]
        half = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        dtypes = [g.dtype for g in grads if g is not None] + [torch.bfloat16] * half
        self.eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # of the least precise
        self.least = [0.0 if g is None else _least(g.dtype) for g in grads]
        self.grads = tuple(None if g is None else _without(_wide(g), least) for g, least in zip(grads, self.least, strict=True))
        self.sizes = [0.0 if g is None or not g.numel() else float(g.nan_to_num(0, 0, 0).abs().max()) for g in self.grads]
        self.proved = [size > 0 for size in self.sizes]
        self.mixed = [None if g is None else torch.zeros(g.shape, dtype=torch.bool, device=g.device) for g in self.grads]
        self.number = [None if m is None else torch.zeros_like(m, dtype=torch.int32) for m in self.mixed]

    def add(self, grads: Grads, step: int, base: int) -> None:
        """One more digit: of a number times a power of two, the exponent's bits are so many more, and no others."""
        for k, (first, mixed, number) in enumerate(zip(self.grads, self.mixed, self.number, strict=True)):
            if first is None or mixed is None or number is None:
                continue
            g = grads[k] if k < len(grads) else None
            if g is None:
                mixed.fill_(True)
                continue
            g = _wide(g)
            word, low = _WORDS[g.dtype]
            more = g.view(word) - first.view(word)
            digit = more >> low
            nothing = ((first == 0) & (g.abs() <= base * self.least[k])) | ~first.isfinite()  # NaN says nothing of its owner
            mixed |= ~nothing & ((more & ((1 << low) - 1) != 0) | (digit < 0) | (digit >= base))
            number += (step * digit).to(number.dtype)

    def owners(self, examples: int) -> list[Owners]:
        """Each cotangent is let go as soon as its owners are known: that is all that is left of these digits."""
        grads, self.grads = list(self.grads), ()
        made = []
        for k in range(len(grads)):
            g, mixed, number = grads[k], self.mixed[k], self.number[k]
            grads[k] = self.mixed[k] = self.number[k] = None
            each = None
            if g is not None and mixed is not None and number is not None:
                own = torch.where(mixed | (number >= examples), MIXED, number.long())
                each = torch.where(mixed | ((g != 0) & g.isfinite()), own, torch.where(g == 0, NOBODY, LOST))
                if self.complex[k]:  # a complex number has two parts: both must have one owner
                    low, high = each.amin(-1), each.amax(-1)
                    each = torch.where((low == high) | (low == NOBODY) | (low == LOST), high, MIXED)
            made.append(Owners(each, self.proved[k]))
        return made


def _least(dtype: torch.dtype) -> float:
    """Numbers below may have lost bits on the way: a power of two does not scale them bit for bit. 0 where there are few exponents."""
    number = torch.finfo(dtype)
    return number.tiny / number.eps if number.tiny < _FEWEST else 0.0


def _without(g: Tensor, least: float) -> Tensor:
    """``g``, with 0 for what is so small that its bits say nothing: masked attention leaves such numbers, with 5 bits of 24."""
    return g.masked_fill(g.abs() < least, 0.0) if least else g


def _wide(g: Tensor) -> Tensor:
    g = torch.view_as_real(g.detach()) if g.is_complex() else g.detach()
    return (g if g.dtype in _WORDS else g.float()).contiguous()


def _ask_small(at_edges: _Digits, at_nodes: dict[Node, _Digits], tripled: Callable[[], tuple[Grads, dict[Node, Grads]]]) -> None:
    """Of cotangents that are small beside the largest one, whether they are more than rounding."""
    every = [at_edges, *at_nodes.values()]
    least = max(d.eps for d in every) ** 0.5 * max([1.0, *(size for d in every for size in d.sizes)])
    if not any(0 < size < least for d in every for size in d.sizes):
        return
    edges, nodes = tripled()
    for digits, again in [(at_edges, edges), *((d, nodes.get(n, ())) for n, d in at_nodes.items())]:
        for k, (g, size) in enumerate(zip(digits.grads, digits.sizes, strict=True)):
            if g is not None and 0 < size < least:
                now = again[k] if k < len(again) else None
                digits.proved[k] = now is not None and _is_multiple(g, _wide(now))


def _is_multiple(g: Tensor, tripled: Tensor) -> bool:
    g, tripled = (widest(t).nan_to_num(0, 0, 0) for t in (g, tripled))
    return bool((tripled - 3 * g).norm() <= MULTIPLE * tripled.norm())

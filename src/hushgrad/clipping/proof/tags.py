"""Tags: whose row is it, by the model's own graph.

Backward is linear, and a power of two is exact in floating point. So if example i's part of the output's cotangent is multiplied by
2^digit(i), a cotangent further down that comes from example i alone is multiplied by exactly that, bit for bit; one that several examples
reach is not. One digit of the example's number for each pass; no tolerance, no second forward.

Where the true gradient is 0, terms cancel and what arrives is rounding, which proves nothing. A power of two scales rounding, too; three
does not: a small cotangent that is not three times as large for outputs' cotangents three times as large is not proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad._widest import widest
from hushgrad.clipping._torch import Node, input_shape
from hushgrad.clipping.costs import MULTIPLE
from hushgrad.clipping.layout import LOST, MIXED, NOBODY, Layout
from hushgrad.clipping.proof.quiet import hushed

__all__ = ["Exit", "Owners", "cotangents", "tagged"]

Grads = tuple[Tensor | None, ...]

_WORDS = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}  # as whole numbers; where the exponent's bits begin
_PART, _PARTS = 1 << 20, 4  # numbers of cotangents that are held at once (4 MB in single precision), or a quarter of all
_DRAWN = 1 << 16  # random numbers that are drawn at once: in double precision a whole output's would be the most that is held
_FEW_EXAMPLES = 1 << 11  # sixteen times as many are still numbers of 16 bits
_FEWEST = 1e-30  # the least normal number of a type with eight bits of exponent or more is below


class Exit(NamedTuple):
    """Where cotangents enter: an output of the model whose examples are known."""

    edge: GradientEdge
    like: Tensor  # of its shape and kind, and no memory
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
    made = [torch.empty_like(e.like, memory_format=torch.contiguous_format) for e in exits]
    for u in made:
        for some in u.view(-1).split(_DRAWN):
            some.copy_(torch.from_numpy(lot.uniform(0.5, 1.5, len(some)) * lot.choice((-1.0, 1.0), len(some))))
    return made


def tagged(
    exits: Sequence[Exit], edges: Sequence[GradientEdge], nodes: Sequence[Node], examples: int
) -> tuple[list[Owners], dict[Node, list[Owners]]]:
    """The owners of the cotangents at ``edges``, and of all that arrive at ``nodes`` on the way to these edges.

    Many edges are asked some after the others: their cotangents together are as large as all activations.
    """
    us = cotangents(exits)
    pull = partial(_pulled, exits)
    parts = [list(edges)] if nodes else _parts(edges)  # nodes are on the way to all of them
    found = [_told(pull, part, nodes, us, exits, examples) for part in parts]
    _ask_small(parts, found, lambda some, by: pull(some, nodes, [by * u for u in us]))
    return (
        [owners for at_edges, _ in found for owners in at_edges.owners()],
        {node: told.owners() for _, at_nodes in found for node, told in at_nodes.items()},
    )


def _parts(edges: Sequence[GradientEdge]) -> list[list[GradientEdge]]:
    """Neighbours together, so many numbers at once."""
    parts: list[list[GradientEdge]] = [[]]
    sizes = [math.prod(input_shape(edge)) for edge in edges]
    room, most = 0, max(_PART, sum(sizes) // _PARTS)
    for edge, size in zip(edges, sizes, strict=True):
        if room + size > most and parts[-1]:
            parts.append([])
            room = 0
        parts[-1].append(edge)
        room += size
    return parts


def _told(
    pull: Callable[..., tuple[Grads, dict[Node, Grads]]],
    edges: Sequence[GradientEdge],
    nodes: Sequence[Node],
    us: list[Tensor],
    exits: Sequence[Exit],
    examples: int,
) -> tuple[_Digits, dict[Node, _Digits]]:
    """What the digits tell of some edges, and of the nodes."""
    base = 4 if any(u.dtype is torch.float16 for u in us) else 16  # float16 has few exponents
    pulled = pull(edges, nodes, us)
    at_edges, at_nodes = _Digits(pulled[0], examples), {n: _Digits(gs, examples) for n, gs in pulled[1].items()}
    del pulled
    step = 1
    while step == 1 or step < examples:
        scale = torch.pow(2.0, torch.arange(examples) // step % base)
        again = pull(edges, nodes, [u * _along(scale, e, u) for u, e in zip(us, exits, strict=True)])
        at_edges.add(again[0], step, base)
        for n, digits in at_nodes.items():
            digits.add(again[1].get(n, ()), step, base)
        del again
        step *= base
    for digits in (at_edges, *at_nodes.values()):
        digits.close()
    return at_edges, at_nodes


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

    def __init__(self, grads: Grads, examples: int) -> None:
        self.complex = [g is not None and g.is_complex() for g in grads]
        half = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        dtypes = [g.dtype for g in grads if g is not None] + [torch.bfloat16] * half
        self.eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # of the least precise
        self.least = [0.0 if g is None else _least(g.dtype) for g in grads]
        self.grads = [None if g is None else _without(_wide(g), least) for g, least in zip(grads, self.least, strict=True)]
        self.sizes = [0.0 if g is None or not g.numel() else float(g.nan_to_num(0, 0, 0).abs().max()) for g in self.grads]
        self.proved = [size > 0 for size in self.sizes]
        self.examples = examples
        self.word = torch.int16 if examples < _FEW_EXAMPLES else torch.int32
        self.each: list[Tensor | None] = [None for _ in grads]  # the number so far, MIXED from the first contradiction on

    def add(self, grads: Grads, step: int, base: int) -> None:
        """One more digit: of a number times a power of two, the exponent's bits are so many more, and no others."""
        for k, first in enumerate(self.grads):
            if first is None:
                continue
            g = grads[k] if k < len(grads) else None
            before = self.each[k]
            if g is None:
                self.each[k] = torch.full(first.shape, MIXED, dtype=self.word, device=first.device)
                continue
            g = _wide(g)
            word, low = _WORDS[g.dtype]
            more = g.view(word) - first.view(word)
            digit = more >> low
            nothing = ((first == 0) & (g.abs() <= base * self.least[k])) | ~first.isfinite()  # NaN says nothing of its owner
            mixed = ~nothing & ((more & ((1 << low) - 1) != 0) | (digit < 0) | (digit >= base))
            number = (step * digit.clamp_(0, base)).to(self.word)
            if before is not None:
                mixed |= before == MIXED
                number += before
            self.each[k] = number.masked_fill_(mixed, MIXED)

    def close(self) -> None:
        """No more digits come: of the cotangents, nothing is left but their owners."""
        for k in range(len(self.grads)):
            g, own, self.grads[k] = self.grads[k], self.each[k], None
            if g is None or own is None:
                continue
            own.masked_fill_((own >= self.examples) & (g != 0) & g.isfinite(), MIXED)
            one = own != MIXED
            own.masked_fill_(one & (g == 0), NOBODY).masked_fill_(one & ~g.isfinite(), LOST)
            if self.complex[k]:  # a complex number has two parts: both must have one owner
                low, high = own.amin(-1), own.amax(-1)
                own = torch.where((low == high) | (low == NOBODY) | (low == LOST), high, MIXED)
            self.each[k] = _compact(own)

    def ask(self, k: int, once: Tensor | None, tripled: Tensor | None) -> None:
        """Of a small cotangent, whether it is three times as large for outputs' cotangents that are."""
        self.proved[k] = (
            once is not None and tripled is not None and _is_multiple(_without(_wide(once), self.least[k]), _wide(tripled))
        )

    def owners(self) -> list[Owners]:
        """In the smallest whole numbers that hold them."""
        return [Owners(each, proved) for each, proved in zip(self.each, self.proved, strict=True)]


def _compact(own: Tensor) -> Tensor:
    """The same numbers; along a dimension in which all are alike, stored once."""
    kept = own
    for dim in range(own.dim() if own.numel() else 0):
        one = kept.narrow(dim, 0, 1)
        if bool((kept == one).all()):
            kept = one
    return kept.clone().expand(own.shape)


def _least(dtype: torch.dtype) -> float:
    """Numbers below may have lost bits on the way: a power of two does not scale them bit for bit. 0 where there are few exponents."""
    number = torch.finfo(dtype)
    return number.tiny / number.eps if number.tiny < _FEWEST else 0.0


def _without(g: Tensor, least: float) -> Tensor:
    """``g``, with 0 for what is so small that its bits say nothing: masked attention leaves such numbers, with 5 bits of 24."""
    small = (g.abs() < least) & (g != 0) if least else None
    return g if small is None or not bool(small.any()) else g.masked_fill(small, 0.0)


def _wide(g: Tensor) -> Tensor:
    g = torch.view_as_real(g.detach()) if g.is_complex() else g.detach()
    return (g if g.dtype in _WORDS else g.float()).contiguous()


def _ask_small(
    parts: list[list[GradientEdge]],
    found: list[tuple[_Digits, dict[Node, _Digits]]],
    pull: Callable[[list[GradientEdge], float], tuple[Grads, dict[Node, Grads]]],
) -> None:
    """Of cotangents that are small beside the largest one, whether they are more than rounding."""
    every = [told for at_edges, at_nodes in found for told in (at_edges, *at_nodes.values())]
    least = max(told.eps for told in every) ** 0.5 * max([1.0, *(size for told in every for size in told.sizes)])
    small = {id(told): [k for k, size in enumerate(told.sizes) if 0 < size < least] for told in every}
    if not any(small.values()):
        return
    nodes = any(at_nodes for _, at_nodes in found)  # which are on the way to all edges
    asked = [
        (told, k, part[k])
        for part, (told, _) in zip(parts, found, strict=True)
        for k in (range(len(part)) if nodes else small[id(told)])
    ]
    edges = [edge for *_, edge in asked]
    once, tripled = pull(edges, 1), pull(edges, 3)
    for (told, k, _), g, again in zip(asked, once[0], tripled[0], strict=True):
        if k in small[id(told)]:
            told.ask(k, g, again)
    for node, told in (pair for _, at_nodes in found for pair in at_nodes.items()):
        for k in small[id(told)]:
            told.ask(k, *(gs[node][k] if node in gs else None for gs in (once[1], tripled[1])))


def _is_multiple(g: Tensor, tripled: Tensor) -> bool:
    g, tripled = (widest(t).nan_to_num(0, 0, 0) for t in (g, tripled))
    return bool((tripled - 3 * g).norm() <= MULTIPLE * tripled.norm())

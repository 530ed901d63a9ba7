"""Tags: find the owner of each row of a cotangent, using the model's own graph.

Backward is linear, and multiplying by a power of two is exact in floating point. So if example i's part of the outputs' cotangent is
multiplied by 2^digit(i), a cotangent further down that comes from example i alone is multiplied by exactly that, bit for bit; one that
several examples reach is not. Each pass reads one digit of the example numbers: no tolerance, no second forward. A path between two
examples may be too weak to show this way while a huge loss would still use it; so in a last pass a random half of the losses is huge, and
nothing of the other half may change.

Where the true gradient is 0, terms cancel and only rounding arrives, which proves nothing. A power of two scales rounding, too, but a
factor of three does not: a small cotangent that does not triple when the outputs' cotangents triple is not proved.
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

from hushgrad.clipping._torch import Node, input_shape
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.digits import Digits, Grads, Owners, powers
from hushgrad.clipping.proof.fixed_randomness import randomness_fixed
from hushgrad.clipping.thresholds import HUGE_LOSS_EXPONENT

_PART, _PARTS = 1 << 20, 4  # cotangent elements held at once (4 MB in single precision), or a quarter of all
_ORDINARY = 2.0**32  # a gradient times 2^63 is far from the largest number
_DRAWN = 1 << 16  # random numbers drawn at once: a whole output's, in double precision, would dominate the memory


class Exit(NamedTuple):
    """Where cotangents enter: an output of the model whose layout is known."""

    edge: GradientEdge
    like: Tensor  # its shape, dtype and device, without memory
    layout: Layout


def cotangents(exits: Sequence[Exit], seed: int = 0) -> list[Tensor]:
    """Random, dense cotangents of size about 1: no element is small."""
    lot = np.random.default_rng(seed)  # torch's generator is the model's
    made = [torch.empty_like(e.like, memory_format=torch.contiguous_format) for e in exits]
    for u in made:
        for some in u.view(-1).split(_DRAWN):
            drawn = torch.from_numpy(lot.uniform(0.5, 1.5, len(some)) * lot.choice((-1.0, 1.0), len(some)))
            some.copy_(drawn.to(some))
    return made


def tagged(
    exits: Sequence[Exit], edges: Sequence[GradientEdge], nodes: Sequence[Node], examples: int, *, halves: bool = True
) -> tuple[list[Owners], dict[Node, list[Owners]]]:
    """The owners of the cotangents at ``edges``, and of all that arrive at ``nodes`` on the way to these edges.

    Many edges are read in several parts: their cotangents together are as large as all activations. ``halves``: also look for paths that
    are too weak for the digits, with huge losses for a random half of the examples.
    """
    us = cotangents(exits)
    pull = partial(_pulled, exits)
    parts = [list(edges)] if nodes else _parts(edges)  # nodes may lie on paths to all of them
    found = [_told(pull, part, nodes, us, exits, examples, halves=halves) for part in parts]
    _ask_small(parts, found, lambda some, by: pull(some, nodes, [by * u for u in us]))
    return (
        [owners for at_edges, _ in found for owners in at_edges.owners()],
        {node: told.owners() for _, at_nodes in found for node, told in at_nodes.items()},
    )


def _parts(edges: Sequence[GradientEdge]) -> list[list[GradientEdge]]:
    """Neighbouring edges in parts of so many numbers."""
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
    *,
    halves: bool,
) -> tuple[Digits, dict[Node, Digits]]:
    """What the digits show for some edges, and for the nodes."""
    pulled = pull(edges, nodes, us)
    at_edges, at_nodes = Digits(pulled[0], examples), {n: Digits(gs, examples) for n, gs in pulled[1].items()}
    near = _half(examples, at_edges.grads) if halves else None
    del pulled
    base = _base(us, [at_edges, *at_nodes.values()], examples)
    step = 1
    while step == 1 or step < examples:
        scale = powers(torch.arange(examples) // step % base, base)
        again = pull(edges, nodes, [u * _along(scale, e, u) for u, e in zip(us, exits, strict=True)])
        at_edges.add(again[0], step, base)
        for n, digits in at_nodes.items():
            digits.add(again[1].get(n, ()), step, base)
        del again
        step *= base
    if near is not None:
        far = 2.0 ** (8 if base == 4 else HUGE_LOSS_EXPONENT)
        again = pull(edges, nodes, [u * _along(torch.where(near, 1.0, far), e, u) for u, e in zip(us, exits, strict=True)])
        at_edges.spare(again[0], near)
        for n, digits in at_nodes.items():
            digits.spare(again[1].get(n, ()), near)
        del again
    for digits in (at_edges, *at_nodes.values()):
        digits.close()
    return at_edges, at_nodes


def _base(us: list[Tensor], first: Sequence[Digits], examples: int) -> int:
    """The base of the digits. A larger one needs fewer passes and shows weaker paths; float16 and huge numbers leave few exponents."""
    if any(u.dtype is torch.float16 for u in us):
        return 4
    return 16 if examples <= 16 or max((size for told in first for size in told.sizes), default=0.0) > _ORDINARY else 64


def _half(examples: int, first: Sequence[Tensor | None]) -> Tensor:
    """The examples whose losses stay: a random half that depends on the gradients, so that a repeated proof tries another one."""
    numbers = next(
        (g.flatten()[:8].cpu().double() for g in first if g is not None and g.numel()), torch.zeros(1, dtype=torch.float32)
    )
    lot = np.random.default_rng(np.frombuffer(numbers.numpy().tobytes(), dtype=np.uint32))
    near = np.arange(examples) % 2 == 0
    lot.shuffle(near)
    return torch.from_numpy(near)


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
        with randomness_fixed("of activations"):
            found = torch.autograd.grad([e.edge for e in exits], list(edges), us, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]
    return found, seen


def _ask_small(
    parts: list[list[GradientEdge]],
    found: list[tuple[Digits, dict[Node, Digits]]],
    pull: Callable[[list[GradientEdge], float], tuple[Grads, dict[Node, Grads]]],
) -> None:
    """Whether cotangents that are small compared with the largest one are more than rounding."""
    every = [told for at_edges, at_nodes in found for told in (at_edges, *at_nodes.values())]
    least = max(told.eps for told in every) ** 0.5 * max([1.0, *(size for told in every for size in told.sizes)])
    small = {id(told): [k for k, size in enumerate(told.sizes) if 0 < size < least] for told in every}
    if not any(small.values()):
        return
    nodes = any(at_nodes for _, at_nodes in found)  # which may lie on paths to all edges
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

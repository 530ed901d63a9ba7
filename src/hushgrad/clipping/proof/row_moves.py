"""Graph nodes that move rows by an index, and may move them elsewhere with other data.

An index may be computed from the data (sorted lengths, chosen experts, distinct ids) or constant; a graph does not show which. So a pass
that moves rows is read as proved only if each such node still keeps every row with its example, or tells the row's owner
(:mod:`hushgrad.clipping.proof.routes`); otherwise tags find the owners in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import Node, accumulated, called, input_metadata
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.graph import Graph
from hushgrad.clipping.proof.tags import Exit, tagged

_NAMES = frozenset(
    "Index IndexSelect IndexPut IndexPutImpl IndexAdd IndexCopy IndexFill IndexReduce Gather Scatter ScatterAdd ScatterReduce Sort Topk "
    "Kthvalue MaskedSelect MaskedScatter Take Put TakeAlongDim UnsafeIndex UnsafeIndexPut UniqueDim Unique2 PackPaddedSequence".split()
)


# Whatever the data are, a row of what comes out is made of the same rows of what goes in.
_FIXED = frozenset(
    "Addmm Mm T Relu Gelu Silu Tanh Sigmoid Elu LeakyRelu Softplus Add Sub Mul Div Neg Pow Sqrt Exp Log Addbmm "
    "Convolution MkldnnConvolution MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D Mean Sum NativeLayerNorm NativeGroupNorm NativeDropout "
    "LogSoftmax Softmax View UnsafeView ReshapeAlias Unsqueeze Squeeze Clone ToCopy Embedding".split()
)


def is_fixed(graph: Graph) -> bool:
    """Whether no node of this graph can move rows elsewhere with other data."""
    return all(_is_fixed(node) for node in graph.order)


def _is_fixed(node: Node) -> bool:
    name, _, number = node.name().partition("Backward")
    own = node.name() == "_RootBackward" or accumulated(node) is not None
    return own or (name in _FIXED and number.isdigit())  # a user's function has no number


class Move(NamedTuple):
    """The layouts of the outputs and inputs of such a node; None: no examples; ROWS: determined by its index."""

    name: str
    outputs: tuple[Layout | None, ...]
    inputs: tuple[Layout | None, ...]


def moves_of(graph: Graph) -> list[Node]:
    """The nodes that move rows by an index, in the order of the graph walk."""
    return [node for node in graph.order if node.name().split("Backward")[0] in _NAMES]


def owners_at(nodes: Sequence[Node], exits: Sequence[Exit], examples: int) -> list[tuple[list[Owners], list[Owners]]]:
    """The owners of each node's cotangents, and of what it sends down on each of its slots."""
    below = [
        (k, slot, GradientEdge(*f)) for k, n in enumerate(nodes) for slot, f in enumerate(n.next_functions) if f[0] is not None
    ]
    found, at_nodes = tagged(exits, [edge for _, _, edge in below], nodes, examples)
    sent = [[Owners(None, False) for _ in n.next_functions] for n in nodes]
    for (k, slot, _), owners in zip(below, found, strict=True):
        sent[k][slot] = owners
    return [(at_nodes.get(n, []), sent[k]) for k, n in enumerate(nodes)]


def sent(node: Node, move: Move, numbers: Tensor, rows: Mapping[int, Tensor]) -> tuple[Tensor | None, ...] | None:
    """What the node sends down if each example's cotangent is its number; None if that cannot be computed.

    A node is linear: an element to which n elements of example i are added gets exactly n times the number of i.

    Args:
        node: one that moves rows.
        move: the layouts around it.
        numbers: of the examples.
        rows: the owners of the rows of those outputs that have no regular layout.
    """
    given: list[Tensor | None] = []
    for k, metadata in enumerate(input_metadata(node)):
        layout = move.outputs[k] if k < len(move.outputs) else None
        if layout is None:
            given.append(None)
            continue
        shape = torch.Size(metadata.shape)
        t = numbers.to(metadata.device, metadata.dtype)
        if metadata.dtype not in (torch.float32, torch.float64) or not layout.fits(shape, len(numbers)):
            return None
        if layout.regular:
            owners = layout.at(shape, len(numbers)).owners(shape, len(numbers), t.device)
        elif len(rows[k]) != shape[0]:
            return None
        else:
            owners = rows[k].reshape(-1, *[1] * (len(shape) - 1))
        given.append(torch.where(owners < 0, 0, t[owners.clamp(min=0)]).expand(shape))
    with torch.no_grad():
        made: Any = called(node, tuple(given))
    return tuple(made)

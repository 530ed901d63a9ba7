"""Routed rows: which example owns each row, from the indices that the graph itself has saved.

A node that moves rows by an index (:mod:`hushgrad.clipping.proof.row_moves`) is linear. Applied to example numbers instead of
gradients, it returns for each row that it sends down the example that the row came from: its owner. Known nodes in between that compute
row r from row r alone keep the owner. So the rows of mixture-of-experts layers are attributed as exactly as by tags, without a backward
pass. Any other node that meets such rows raises LookupError, and tags are used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import Node, input_metadata, input_shape, rows_listed
from hushgrad.clipping.layout import NOBODY
from hushgrad.clipping.proof.digits import Owners
from hushgrad.clipping.proof.graph import Border, Graph, operation
from hushgrad.clipping.proof.row_moves import Move, moves_of, sent

# Element by element: shapes of as many dimensions are laid side by side.
_POINTWISE = frozenset(
    "Add Sub Mul Div Neg Silu Gelu Relu Sigmoid Tanh Softplus Elu Pow Exp MaskedFill Where ToCopy Clone Alias".split()
)
# The rest of a row may have another shape: where as many rows go in as come out, they are the same ones.
_WITHIN = frozenset("View UnsafeView ReshapeAlias Unsqueeze Split Slice".split())
# Row r of what comes out is made of row r of this factor, and of a matrix.
_FACTOR = {"GroupedMm": 0, "Mm": 0, "Addmm": 1}

_Sent = dict[tuple[Node, int], Tensor]  # by node and slot: the owner of each row of what it sends down there


class _Pass(NamedTuple):
    """What is known of one graph; ``into``: the slots of frontier nodes that lead into what is shared."""

    graph: Graph
    moves: dict[Node, Move]
    into: dict[Node, set[int]]
    numbers: tuple[Tensor, ...]  # that stand for the examples


def routed(
    graph: Graph, moves: Sequence[Move], borders: Sequence[Border], examples: int, lot: Random
) -> dict[Node, list[Owners]]:
    """The owners of the rows that arrive at frontier nodes. Raises LookupError where rows are moved otherwise than was proved.

    Args:
        graph: of this pass.
        moves: as they were proved, in the order of the graph.
        borders: the frontier.
        examples: of this pass.
        lot: numbers that stand for examples are drawn from it: wrong owners have the same ones in one of 2^20 cases.
    """
    nodes, by_rows = moves_of(graph), {b.node: any(x is not None and not x.regular for x in b.layouts) for b in borders}
    if not moves and not nodes and not any(by_rows.values()):
        return {}
    if [node.name() for node in nodes] != [move.name for move in moves]:
        raise LookupError("rows are moved by other operations")
    into: dict[Node, set[int]] = {}
    for border in borders:
        into.setdefault(border.node, set()).add(border.slot)
    drawn = [torch.tensor([float(lot.randrange(1, 1024)) for _ in range(examples)], dtype=torch.float32) for _ in range(2)]
    here = _Pass(
        graph, dict(zip(nodes, moves, strict=True)), into, (torch.arange(1.0, examples + 1, dtype=torch.float32), *drawn)
    )
    rows: _Sent = {}
    found: dict[Node, list[Owners]] = {}
    for node in _downwards(graph):
        move, arrived = here.moves.get(node), _arrived(here, node, rows)
        if move is None and not arrived:
            continue
        made = _moved(here, node, move, arrived) if move is not None else _kept(here, node, arrived)
        rows |= {(node, slot): owners for slot, owners in made.items()}
        if arrived and node in into:
            found[node] = [_owners(arrived.get(k), metadata.shape) for k, metadata in enumerate(input_metadata(node))]
    if any(of_rows != (node in found) for node, of_rows in by_rows.items()):
        raise LookupError("rows reach a shared parameter on another way")
    return found


def _owners(rows: Tensor | None, shape: Sequence[int]) -> Owners:
    return Owners(None, proved=False) if rows is None else Owners(_by_row(rows, shape), proved=True)


def _by_row(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """In a shape that broadcasts to ``shape``."""
    return rows.reshape(-1, *[1] * (len(shape) - 1))


def _downwards(graph: Graph) -> list[Node]:
    """All nodes, each after everything that consumes it."""
    waiting = {node: len(graph.consumers.get(node, ())) for node in graph.order}
    ready, made = [node for node, count in waiting.items() if not count], []
    while ready:
        node = ready.pop()
        made.append(node)
        for below, _ in node.next_functions:
            if below is not None:
                waiting[below] -= 1
                if not waiting[below]:
                    ready.append(below)
    return made


def _arrived(here: _Pass, node: Node, rows: _Sent) -> dict[int, Tensor]:
    """The owners of the routed rows that arrive at a node, by its outputs: everything that arrives at one has the same."""
    made: dict[int, Tensor] = {}
    plain: set[int] = set()
    for consumer, slot, output in here.graph.consumers.get(node, ()):
        owners = rows.get((consumer, slot))
        if owners is None:
            plain.add(output)
        elif not torch.equal(made.setdefault(output, owners), owners):
            raise LookupError(node.name())
    if plain & made.keys():
        raise LookupError(node.name())
    return made


def _kept(here: _Pass, node: Node, arrived: dict[int, Tensor]) -> dict[int, Tensor]:
    """Row r is made of row r: its owner is the same, on every slot that does not lead into what is shared."""
    if not arrived:
        return {}
    name, shapes = operation(node.name()), [m.shape for m in input_metadata(node)]
    if not name:
        raise LookupError(node.name())
    owners = next(iter(arrived.values()))
    if len(arrived) < len(shapes) or not all(torch.equal(owners, other) for other in arrived.values()):
        raise LookupError(node.name())
    made = {}
    for slot, edge in enumerate(node.next_functions):
        if edge[0] is None or slot in here.into.get(node, ()):
            continue
        shape = input_shape(GradientEdge(*edge))
        same = len(shape) > 0 and all(shape[0] == s[0] == len(owners) for s in shapes)
        rank = name in _WITHIN or ((name in _POINTWISE or _FACTOR.get(name) == slot) and len(shape) == len(shapes[0]))
        if not same or not rank or (name in _FACTOR and len(shape) != 2):
            raise LookupError(node.name())
        made[slot] = owners
    return made


def _moved(here: _Pass, node: Node, move: Move, arrived: dict[int, Tensor]) -> dict[int, Tensor]:
    """The owners of the rows that a node sends down; where its examples follow a rule, they must still do so."""
    for k, layout in enumerate(move.outputs):
        if (layout is not None and not layout.regular) != (k in arrived):
            raise LookupError(node.name())
    if not any(move.inputs):
        return {}
    examples = len(here.numbers[0])
    listed = _listed(node, move, arrived, examples)
    if listed is not None:
        return listed
    counts = sent(node, move, torch.ones(examples, dtype=torch.float32), arrived)
    made: dict[int, Tensor] = {}
    for numbers in here.numbers:
        now = sent(node, move, numbers, arrived)
        if counts is None or now is None:
            raise LookupError(node.name())
        for slot, (z, n, layout) in enumerate(zip(now, counts, move.inputs, strict=True)):
            if layout is None or z is None or n is None:
                continue
            if layout.regular and not layout.fits(z.shape, examples):
                raise LookupError(node.name())
            if layout.regular:
                owners = layout.at(z.shape, examples).owners(z.shape, examples, z.device)
            else:
                owners = _by_row(made.setdefault(slot, _told(z, n)), z.shape)
            if not torch.equal(z, n * numbers.to(z)[owners.clamp(min=0)]):
                raise LookupError(node.name())
    return made


def _listed(node: Node, move: Move, arrived: dict[int, Tensor], examples: int) -> dict[int, Tensor] | None:
    """The same of ``x[index]`` with one list of whole rows, from the list itself; None of anything else."""
    (to,), into = move.outputs if len(move.outputs) == 1 else (None,), move.inputs[0]
    rows, made = rows_listed(node), input_metadata(node)[0].shape
    if rows is None or into is None or to is None or (to.dim if to.regular else 0) or (into.dim if into.regular else 0):
        return None
    index, shape = rows
    if not (to.fits(made, examples) and into.fits(shape, examples)):
        return None
    owners = to.at(made, examples).numbers(examples).to(index.device) if to.regular else arrived[0]
    if len(owners) != len(index):
        return None
    own = owners >= 0
    index, owners = index[own], owners[own]
    found = index.new_full((shape[0],), NOBODY).index_put_((index,), owners)
    if not torch.equal(found[index], owners):  # rows of two examples came from one
        raise LookupError(node.name())
    if not into.regular:
        return {0: found}
    expected = into.at(shape, examples).numbers(examples).to(index.device)
    if not bool(((found == expected) | (found == NOBODY)).all()):
        raise LookupError(node.name())
    return {}


def _told(z: Tensor, n: Tensor) -> Tensor:
    """The example of each row, from the sum of its elements' numbers 1, 2, ... and how many were added; nobody's, where nothing was."""
    z, n = (t.flatten(1).amax(1) if t.dim() > 1 else t for t in (z, n))
    return torch.where(n > 0, (z / n.clamp(min=1)).long() - 1, NOBODY)

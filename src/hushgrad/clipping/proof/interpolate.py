"""Derives the structure for an input length between lengths that were proved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hushgrad.clipping.proof.call_trace import joined
from hushgrad.clipping.proof.structure import Number, Pattern, Structure, sizes_of
from hushgrad.clipping.thresholds import PROVED_LENGTHS


def interpolated(proved: Sequence[Structure], tensors: list[Any], examples: int) -> Structure | None:
    """The structure for these inputs, if all internal sizes are one affine function of the input sizes in all proofs; else None.

    Args:
        proved: structures of other lengths.
        tensors: the inputs.
        examples: how many they hold.
    """
    first = proved[0]
    sizes = sizes_of(tensors, first.reading, examples)
    alike = [s for s in proved if s.same_as(first) and s.order == first.order and s.reading.layouts_alike(first.reading)]
    if sizes is None or len({s.sizes for s in alike}) < PROVED_LENGTHS or examples > first.most:
        return None
    wanted = _flat(sizes)
    known = [_flat(s.sizes) for s in alike]
    if any(len(v) != len(wanted) for v in known) or not all(min(c) <= w <= max(c) for *c, w in zip(*known, wanted, strict=True)):
        return None
    inside = [_inside(s) for s in alike]
    if len({tuple(v is None for v in row) for row in inside}) > 1:
        return None
    line = _on_a_line(known, [[0 if v is None else v for v in row] for row in inside], wanted)
    if line is None:
        return None
    values = iter(None if v is None else int(x) for v, x in zip(inside[0], line, strict=True))
    shapes = {n: tuple(tuple(next(values) for _ in p) for p in ps) for n, ps in first.shapes.items()}
    nodes = next(values)
    traces = joined([s.traces for s in alike], same=True)
    return first._replace(sizes=sizes, shapes=shapes, nodes=None if nodes is None else frozenset({nodes}), traces=traces)


def _flat(sizes: tuple[Any, ...]) -> list[int]:
    return [v for one in sizes for v in one if isinstance(v, int)]


def _inside(structure: Structure) -> list[int | None]:
    """All internal sizes, and the number of graph nodes."""
    shapes: dict[Number, tuple[Pattern, ...]] = structure.shapes
    made = [v for ps in shapes.values() for p in ps for v in p]
    return [*made, min(structure.nodes) if structure.nodes else None]


def _on_a_line(known: list[list[int]], inside: list[list[int]], wanted: list[int]) -> list[int] | None:
    """The affine map through all known points, evaluated at ``wanted``; None if there is no exact one."""
    points = np.array([[*v, 1.0] for v in known])
    values = np.array(inside, dtype=float)
    solved = np.linalg.lstsq(points, values, rcond=None)[0]
    made = np.array([*wanted, 1.0]) @ solved
    whole = np.rint(made)
    exact = np.abs(points @ solved - values).max(initial=0.0) < 1e-6 and np.abs(made - whole).max(initial=0.0) < 1e-6
    return whole.astype(int).tolist() if exact else None

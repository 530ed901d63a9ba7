"""How the seal runs the model, and compares outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.rounding import same_as_made
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, Stage
from hushgrad.clipping.runs import largest
from hushgrad.errors import HushgradError

_AT_ONCE = 1 << 17  # numbers of outputs that are compared at once


class Sealing(Stage, Protocol):
    """What the seal needs from the capture in addition to a survey's passes. Every pass starts from the same state of the model.

    ``differentiates``: whether the forward computes gradients itself. ``acts_back``: whether something other than torch's own operations
    acts on the way back: hooks, and functions with a custom backward.
    """

    differentiates: bool
    acts_back: bool

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the per-example gradients with these weights, as the capture computes it, and the examples' norms."""

    def run_sealed(self, inputs: Any, examples: int, structure: Structure) -> Run:
        """The pass over the batch, read by its structure: the one that was kept if it can still be read, else a new one."""

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers as the last pass left them."""

    def later(self, passes: int, only: int | None = None) -> AbstractContextManager[int]:
        """Inside, the model's own counters, or ``only`` one of them, are ``passes`` ahead; yields how many it has."""

    def seeds(self) -> frozenset[int]:
        """The seeds of the generators that the last pass has drawn from."""

    def compared(self) -> tuple[list[float], bool]:
        """The constants that passes compare their tensors with, and whether integers may be tried that do not occur in the batch."""


def part_of(reading: Reading, inputs: Any, which: Sequence[int], B: int) -> Any:
    """The inputs of these examples."""
    return reading.only(inputs, torch.tensor(list(which)), B)


def outputs_of(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor]:
    """The model's outputs for these inputs without the capture, optionally ``after`` another pass."""
    with torch.set_grad_enabled(stage.differentiates), stage.paused():
        return [y.detach() for y in stage.alone(inputs, after=after)[0]]


def kept(structure: Structure, a: list[Tensor], b: list[Tensor], mine: Tensor, its: Tensor, B: int, now: int) -> bool:
    """Whether the examples ``mine`` in outputs ``a`` (of B examples) equal the examples ``its`` in ``b`` (of ``now`` examples)."""
    if len(a) != len(b):
        return False
    for x, y, layout in zip(a, b, structure.exits, strict=True):
        if layout is None:
            continue
        if not (layout.fits(x.shape, B) and layout.fits(y.shape, now)):
            return False
        if not _alike(x, y, mine, its, (layout.at(x.shape, B), B), (layout.at(y.shape, now), now)):
            return False
    return True


def kept_elsewhere(
    stage: Sealing,
    structure: Structure,
    inputs: Any,
    a: list[Tensor],
    b: list[Tensor],
    mine: Tensor,
    its: Tensor,
    B: int,
    now: int,
) -> bool:
    """The same up to the rounding of the outputs' terms: with more or fewer examples, sums are formed in another order."""
    if kept(structure, a, b, mine, its, B, now):
        return True
    with torch.enable_grad(), stage.paused():
        return kept(structure, stage.alone(inputs)[0], b, mine, its, B, now)


def _alike(x: Tensor, y: Tensor, mine: Tensor, its: Tensor, where: tuple[Layout, int], there: tuple[Layout, int]) -> bool:
    """Whether rows of two outputs are equal, compared in chunks: copies of a crowd's outputs could be a proof's largest tensors."""
    some = max(1, _AT_ONCE * where[1] // max(1, x.numel()))
    groups = list(zip(mine.split(some), its.split(some), strict=True))
    scale: float | None = None
    for own, other in groups:
        p, q = where[0].only(x, own, where[1]), there[0].only(y, other, there[1])
        if p.shape != q.shape:
            return False
        if torch.equal(p, q):  # the usual case
            continue
        scale = max(largest(where[0].only(x.detach(), rows, where[1])) for rows, _ in groups) if scale is None else scale
        if not same_as_made(p, q, scale=scale):
            return False
    return True


def tried(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor] | None:
    """The outputs; None if the model rejects such inputs (lengths of 0, say)."""
    try:
        return outputs_of(stage, inputs, after=after)
    except (HushgradError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own, of whatever kind
        if "allocate memory" in str(error):
            raise
        return None

"""What the seal runs, and how it compares what comes out."""

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

__all__ = ["Sealing", "kept", "kept_elsewhere", "outputs_of", "part_of", "tried"]

_AT_ONCE = 1 << 17  # numbers of outputs that are compared at once


class Sealing(Stage, Protocol):
    """What the seal needs of the capture beside its passes. Every pass begins in the same state of the model.

    ``differentiates``: the forward asks for gradients itself.
    """

    differentiates: bool

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the examples' gradients with these weights, by the capture, and the examples' norms."""

    def run_sealed(self, inputs: Any, examples: int, structure: Structure) -> Run:
        """The pass over the batch, read by its structure: the one that was kept, if that can be read so late, else a new one."""

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers, as the last pass has left them."""

    def later(self, passes: int) -> AbstractContextManager[bool]:
        """Inside, the model's own counts are so much further; False if it keeps none."""

    def seeds(self) -> frozenset[int]:
        """Of the generators that the last pass has drawn from."""

    def compared(self) -> tuple[list[float], bool]:
        """What passes compare their tensors with, and whether whole numbers may be tried that the batch does not have."""


def part_of(reading: Reading, inputs: Any, which: Sequence[int], B: int) -> Any:
    """The inputs of these examples."""
    return reading.only(inputs, torch.tensor(list(which)), B)


def outputs_of(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor]:
    """What the model gives for these inputs without the capture; ``after`` another pass."""
    with torch.set_grad_enabled(stage.differentiates), stage.paused():
        return [y.detach() for y in stage.alone(inputs, after=after)[0]]


def kept(structure: Structure, a: list[Tensor], b: list[Tensor], mine: Tensor, its: Tensor, B: int, now: int) -> bool:
    """Whether the examples ``mine`` of outputs ``a`` (of B) have the same as ``its`` of ``b`` (of now)."""
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
    """The same of outputs ``a`` of these inputs, up to rounding of their terms: among more or fewer, sums are made in another order."""
    if kept(structure, a, b, mine, its, B, now):
        return True
    with torch.enable_grad(), stage.paused():
        return kept(structure, stage.alone(inputs)[0], b, mine, its, B, now)


def _alike(x: Tensor, y: Tensor, mine: Tensor, its: Tensor, where: tuple[Layout, int], there: tuple[Layout, int]) -> bool:
    """Whether rows of two outputs are the same. Some after the others: copies of a crowd's outputs may be the most that a proof holds."""
    some = max(1, _AT_ONCE * where[1] // max(1, x.numel()))
    groups = list(zip(mine.split(some), its.split(some), strict=True))
    scale: float | None = None
    for own, other in groups:
        p, q = where[0].only(x, own, where[1]), there[0].only(y, other, there[1])
        if p.shape != q.shape:
            return False
        if torch.equal(p, q):  # as nearly always
            continue
        scale = max(largest(where[0].only(x.detach(), rows, where[1])) for rows, _ in groups) if scale is None else scale
        if not same_as_made(p, q, scale=scale):
            return False
    return True


def tried(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor] | None:
    """The outputs; None if the model refuses such inputs (lengths of 0, say)."""
    try:
        return outputs_of(stage, inputs, after=after)
    except (HushgradError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own, of whatever kind
        if "allocate memory" in str(error):
            raise
        return None

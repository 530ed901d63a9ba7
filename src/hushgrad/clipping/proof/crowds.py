"""Crowds: some of a batch among as many others as a batch may hold.

A capacity, a list with so many places or a sorted batch treats one otherwise when there are many others, many alike, or many of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.costs import FEW
from hushgrad.clipping.proof.changes import KINDS, turned
from hushgrad.clipping.proof.sealing import Sealing, kept_elsewhere, outputs_of, part_of, tried
from hushgrad.clipping.proof.structure import Structure

__all__ = ["crowded"]

_MANY = "the output of one changes when it is among many others"


def crowded(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, lot: Random) -> str | None:
    """How others who are left out, or are many, change somebody's outputs, which are ``outputs`` in the batch.

    One part of the batch is among copies of one, the other among many of every kind: whoever is influenced by somebody who is not there any
    more shows it, too. Of a small batch, each part is by itself, and few are in both crowds.
    """
    cut = B // 2 - (B % 4 == 0)  # an odd number, where both can be: a model that takes even ones only shows it now
    order = lot.sample(range(B), B)
    first, second = order[:cut], order[cut:]
    if B <= 2 * FEW:
        if not all(_is_kept(stage, structure, outputs, inputs, B, part) for part in (first, second)):
            return "the output of one changes when another is left out"
        first, second = order[:FEW], []
    copies = [*first, *[lot.choice(second or order)] * structure.most]  # whatever has room for fewer, or for fewer alike, is full
    if not _is_kept(stage, structure, outputs, inputs, B, lot.sample(copies, len(copies))):
        return "the output of one changes when it is among copies of another"
    return _by_kinds(stage, structure, outputs, inputs, B, second, lot)


def _is_kept(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, who: list[int]) -> bool:
    """Whether these, by themselves, have the outputs that they have in the batch."""
    made = outputs_of(stage, part_of(structure.reading, inputs, who, B))
    return kept_elsewhere(stage, structure, inputs, outputs, made, torch.tensor(who), torch.arange(len(who)), B, len(who))


class _Crowd(NamedTuple):
    """A few, and the same to be turned, half of them before the many others and half behind."""

    inputs: Any
    size: int
    turned: Tensor  # where those are
    others: range


def _by_kinds(
    stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, part: list[int], lot: Random
) -> str | None:
    """A few, by themselves and among many of every kind: of one kind perhaps none takes up room.

    Those come first in the crowd that come last by themselves: who has room by themselves loses it. A part of the batch is among them.
    """
    reading, among = structure.reading, part or range(B)
    few = lot.sample(among, min(len(among), FEW))
    become = dict.fromkeys(range(len(few)), turned)
    alone = reading.changed(part_of(reading, inputs, few, B), become, len(few), by_row=True)
    before = tried(stage, alone)
    own = [k for k in few for _ in range(1 if before is None else 2)]  # None: it does not take what is turned
    more = [*part, *lot.sample(among, len(among)) * -(-structure.most // len(among))][: structure.most]
    half, size = len(own) // 2, len(own) + len(more)
    where = (torch.arange(len(own)) - half) % size
    crowd = _Crowd(
        inputs=part_of(reading, inputs, [*own[half:], *more, *own[:half]], B),
        size=size,
        turned=where[len(own) :] if before is None else where[1::2],
        others=range(len(own) - half + len(part), size - half),
    )
    stay = torch.cat([where if before is None else where[::2], len(own) - half + torch.arange(len(part))])
    taken = False
    for made in _of_kinds(stage, structure, crowd):
        if not kept_elsewhere(stage, structure, inputs, outputs, made, torch.tensor([*few, *part]), stay, B, size):
            return _MANY
        every, n = torch.arange(len(few)), len(few)
        if before and not kept_elsewhere(stage, structure, alone, before, made, every, crowd.turned, n, size):
            return _MANY
        taken = True
    return None if taken or not part or _is_kept(stage, structure, outputs, inputs, B, part) else _MANY


def _of_kinds(stage: Sealing, structure: Structure, crowd: _Crowd) -> Iterator[list[Tensor]]:
    """The outputs of a crowd in which others are of all kinds; of each kind by itself, for a model that does not take all at once."""
    for some in (KINDS, *([kind] for kind in KINDS)):
        kinds = [*some, None]
        now = {k: kind for k in crowd.others if (kind := kinds[k % len(kinds)]) is not None}
        now |= dict.fromkeys(crowd.turned.tolist(), turned)
        made = tried(stage, structure.reading.changed(crowd.inputs, now, crowd.size, by_row=True))
        if made is not None:
            yield made
            if some is KINDS:
                break

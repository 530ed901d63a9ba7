"""Others left out, replaced, repeated and made extreme: nobody's output may change.

What depends on a batch as a whole often does so only beyond a threshold: a capacity, the largest number, "is any of them NaN?". So the
others are made large, infinite, NaN, empty and short, and are many; what no threshold within reach shows, no test can exclude.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from hushgrad.clipping.costs import CLOCKS, FEW, KEPT
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.changes import KINDS, Change, Named, changes, constant, halved, short, turned
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, Stage
from hushgrad.clipping.runs import largest, same
from hushgrad.errors import HushgradError

__all__ = ["Sealing", "influence", "part_of", "swayed"]

_SEEDED = (
    "its random numbers begin at a seed that follows from the data: draw from torch's own generator, and seed none in forward"
)
_REMEMBERS = "it keeps something of an earlier batch that changes the next one's outputs"


_AT_ONCE = 1 << 17  # numbers of outputs that are compared at once


class Sealing(Stage, Protocol):
    """What the seal needs of the capture beside its passes. Every pass begins in the same state of the model.

    ``differentiates``: the forward asks for gradients itself.
    """

    differentiates: bool

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the examples' gradients with these weights, by the capture, and the examples' norms."""

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside are without the capture."""

    def alone(self, inputs: Any, *, after: Any = None) -> tuple[list[Tensor], Any]:
        """A pass, and the trained parameters; ``after`` another one."""

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers, as the last pass has left them."""

    def later(self, passes: int) -> AbstractContextManager[bool]:
        """Inside, the model's own counts are so much further; False if it keeps none."""

    def wrote(self) -> bool:
        """Whether a pass has left something behind in an attribute."""

    def seeds(self) -> frozenset[int]:
        """Of the generators that the last pass has drawn from."""

    def compared(self) -> tuple[list[float], bool]:
        """What passes compare their tensors with, and whether whole numbers may be tried that the batch does not have."""


def influence(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, lot: Random) -> str | None:
    """How others change somebody's outputs, which are ``outputs`` in the batch, in words; None if they do not."""
    return (
        _by_parts(stage, structure, outputs, inputs, B, lot)
        or _by_crowds(stage, structure, outputs, inputs, B, lot)
        or swayed(stage, structure, inputs, B, lot)
        or _by_memory(stage, structure, inputs, B, lot)
        or _by_time(stage, structure, inputs, B, lot)
    )


def part_of(reading: Reading, inputs: Any, which: Sequence[int], B: int) -> Any:
    """The inputs of these examples."""
    return reading.only(inputs, torch.tensor(list(which)), B)


def _outputs(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor]:
    with torch.set_grad_enabled(stage.differentiates), stage.paused():
        return [y.detach() for y in stage.alone(inputs, after=after)[0]]


def _kept(structure: Structure, a: list[Tensor], b: list[Tensor], mine: Tensor, its: Tensor, B: int, now: int) -> bool:
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


def _alike(x: Tensor, y: Tensor, mine: Tensor, its: Tensor, where: tuple[Layout, int], there: tuple[Layout, int]) -> bool:
    """Whether rows of two outputs are the same. Some after the others: copies of a crowd's outputs may be the most that a proof holds."""
    some = max(1, _AT_ONCE * where[1] // max(1, x.numel()))
    groups = list(zip(mine.split(some), its.split(some), strict=True))
    scale = max((largest(where[0].only(x, own, where[1])) for own, _ in groups), default=0.0)
    for own, other in groups:
        p, q = where[0].only(x, own, where[1]), there[0].only(y, other, there[1])
        if p.shape != q.shape or not same(p, q, scale=scale):
            return False
    return True


# Left out and repeated ------------------------------------------------------------------------------------------------------


def _by_parts(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, lot: Random) -> str | None:
    cut = B // 2 - (B % 4 == 0)  # an odd number, where both can be: a model that takes even ones only shows it now
    order = lot.sample(range(B), B)
    for part in (order[:cut], order[cut:]):
        its = torch.arange(len(part))
        made = _outputs(stage, part_of(structure.reading, inputs, part, B))
        if not _kept(structure, outputs, made, torch.tensor(part), its, B, len(part)):
            return "the output of one changes when another is left out"
    return None


def _by_crowds(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, lot: Random) -> str | None:
    """A few among so many copies of one as a batch may hold: whatever has room for fewer, or for fewer alike, is full."""
    few = lot.sample(range(B), min(B, FEW))
    copies = [*few, *[lot.randrange(B)] * structure.most]
    copies, n = lot.sample(copies, len(copies)), len(copies)
    made = _outputs(stage, part_of(structure.reading, inputs, copies, B))
    if not _kept(structure, outputs, made, torch.tensor(copies), torch.arange(n), B, n):
        return "the output of one changes when it is among copies of another"
    del made  # as many outputs as a crowd has
    return _by_kinds(stage, structure, inputs, B, few, lot)


def _by_kinds(stage: Sealing, structure: Structure, inputs: Any, B: int, few: list[int], lot: Random) -> str | None:
    """These few and what they are turned into, by themselves and among many of every kind: of one kind perhaps none takes up room.

    Half of them come before the many, half behind, and those first that come last by themselves: who has room by themselves loses it.
    """
    reading, own = structure.reading, [k for k in few for _ in range(2)]
    become: dict[int, Change] = dict.fromkeys(range(1, len(own), 2), turned)
    before = _tried(stage, reading.changed(part_of(reading, inputs, own, B), become, len(own)))
    if before is None:  # it does not take what is turned
        before, become = _outputs(stage, part_of(reading, inputs, own, B)), {}
    more = lot.sample(range(B), B) * -(-structure.most // B)
    behind, n = len(own) // 2, len(own) + len(more)  # so many of them
    crowded = part_of(reading, inputs, [*own[behind:], *more, *own[:behind]], B)
    its = (torch.arange(len(own)) - behind) % n
    moved = {int(its[k]): change for k, change in become.items()}
    for some in (KINDS, *([kind] for kind in KINDS)):  # each by itself, for a model that does not take all at once
        kinds = [*some, None]
        now = moved | {len(own) - behind + k: kind for k in range(len(more)) if (kind := kinds[k % len(kinds)]) is not None}
        made = _tried(stage, reading.changed(crowded, now, n))
        if made is not None and not _kept(structure, before, made, torch.arange(len(own)), its, len(own), n):
            return "the output of one changes when it is among many others"
        if made is not None and some is KINDS:
            break
    return None


# Replaced -------------------------------------------------------------------------------------------------------------------


def swayed(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random, *, brief: bool = False) -> str | None:
    """A few examples, of which some become others, and extreme: those that stay, and are short, keep what they have.

    ``brief``: others that are ordinary, or large, alone.
    """
    n = min(B, FEW)
    others = sorted(lot.sample(range(n), max(n // 2, n - KEPT)))
    few = part_of(structure.reading, inputs, lot.sample(range(B), n), B)
    shorter = structure.reading.changed(few, {i: short for i in range(n) if i not in others}, n)  # so others may be longer
    groups = changes()
    problem = _replaced(stage, structure, [shorter, few], others, n, groups[:1] if brief else groups)
    return problem if brief else problem or _by_constants(stage, structure, few, others, n)


def _by_constants(stage: Sealing, structure: Structure, few: Any, others: list[int], n: int) -> str | None:
    """Others are what the forward compares its tensors with: a missing value, a token, the end of a text. So are those that stay."""
    constants, anew = stage.compared()
    if not constants:
        return None
    named = [constant(c, anew=anew) for c in constants]
    problem = _replaced(stage, structure, [few], others, n, [[change for made in named for change in made]])
    stay = [i for i in range(n) if i not in others]
    for value, (everywhere, *_) in zip(constants, named, strict=True):
        ended = structure.reading.changed(few, dict.fromkeys(stay, halved(value, anew=anew)), n)
        problem = problem or _replaced(stage, structure, [ended, few], others, n, [[everywhere]])
    return problem


def _replaced(
    stage: Sealing, structure: Structure, bases: list[Any], others: list[int], n: int, groups: list[list[Named]]
) -> str | None:
    """Each group of changes in a pass, one for each of the others (or in more passes, if they are too few).

    The last pass is the first one again: whatever a pass leaves behind where it cannot be put back shows in it.

    Args:
        stage: runs the model.
        structure: where the examples are.
        bases: a few examples; of several such inputs, the first that the model takes.
        others: which of them change.
        n: how many they are.
        groups: of changes.
    """
    kept = torch.tensor([i for i in range(n) if i not in others])
    base, before = next(
        (b, made) for b in bases if (made := _tried(stage, b) if b is not bases[-1] else _outputs(stage, b)) is not None
    )
    after, seeds, seeded = stage.buffers(), stage.seeds(), False
    for number, now in enumerate(g[k : k + len(others)] for g in groups for k in range(0, len(g), len(others))):
        for some, made in _taken(stage, structure, base, others, n, now):
            if not _kept(structure, before, made, kept, kept, n, n):
                return f"the output of one changes when the others are {' or '.join(dict.fromkeys(name for name, _ in some))}"
            seeded = seeded or stage.seeds() != seeds
        if number == 0:
            changed = [b for b, value in stage.buffers().items() if b in after and not same(value, after[b])]
            if changed:
                return f"its buffer {changed[0]} keeps something of the data, without noise"
    again, every = _outputs(stage, base), torch.arange(n)
    if not _kept(structure, before, again, every, every, n, n):
        return _REMEMBERS
    return _SEEDED if seeded and stage.seeds() == seeds else None


def _taken(
    stage: Sealing, structure: Structure, base: Any, others: list[int], n: int, now: list[Named]
) -> Iterator[tuple[list[Named], list[Tensor]]]:
    """The outputs when the others become these. What a model does not take together is tried by itself, of all of them and of one.

    What it never takes, nobody learns anything from: a step over such a record ends with the model's own exception.
    """
    made = _tried(stage, structure.reading.changed(base, {i: now[k % len(now)][1] for k, i in enumerate(others)}, n))
    if made is not None:
        yield now, made
        return
    for one in now:
        for who in (others, others[:1]):
            made = _tried(stage, structure.reading.changed(base, dict.fromkeys(who, one[1]), n))
            if made is not None:
                yield [one], made
                break


def _tried(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor] | None:
    """The outputs; None if the model refuses such inputs (lengths of 0, say)."""
    try:
        return _outputs(stage, inputs, after=after)
    except (HushgradError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own, of whatever kind
        if "allocate memory" in str(error):
            raise
        return None


# Kept from an earlier pass, and later ---------------------------------------------------------------------------------------


def _by_memory(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    """What a pass leaves behind must not depend on its data, as far as the next pass shows it."""
    if not stage.wrote():
        return None
    n = min(B, FEW)
    few = part_of(structure.reading, inputs, lot.sample(range(B), n), B)
    every, before = torch.arange(n), _outputs(stage, few, after=few)
    changed = (structure.reading.changed(few, dict.fromkeys(range(n), change), n) for change in KINDS)
    first = next((made for made in changed if _tried(stage, made) is not None), None)
    if first is None:  # it takes none of them
        first = part_of(structure.reading, inputs, lot.choices(range(B), k=n), B)
    if not _kept(structure, before, _outputs(stage, few, after=first), every, every, n, n):
        return _REMEMBERS
    return None


def _by_time(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    for passes in CLOCKS:
        with stage.later(passes) as keeps_time:
            problem = keeps_time and (swayed(stage, structure, inputs, B, lot) or _by_memory(stage, structure, inputs, B, lot))
        if problem:
            return f"in later passes {problem}"
    return None

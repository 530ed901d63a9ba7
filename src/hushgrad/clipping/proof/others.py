"""Others left out, replaced, repeated and made extreme: nobody's output may change.

What depends on a batch as a whole often does so only beyond a threshold: a capacity, the largest number, "is any of them NaN?". So the
others are made large, infinite, NaN, empty and short, and are many; what no threshold within reach shows, no test can exclude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from hushgrad.clipping.costs import CLOCKS, FEW, KEPT, crowd
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, Stage
from hushgrad.clipping.runs import same
from hushgrad.errors import HushgradError

__all__ = ["Sealing", "influence", "part_of", "swayed"]

Change = Callable[[Tensor, Tensor], Tensor]  # of one example's rows, and everybody's

_REMEMBERS = "it keeps something of an earlier batch that changes the next one's outputs"


class Sealing(Stage, Protocol):
    """What the seal needs of the capture beside its passes. Every pass begins in the same state of the model."""

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


def influence(stage: Sealing, structure: Structure, run: Run, inputs: Any, B: int, lot: Random) -> str | None:
    """How others change somebody's outputs, in words; None if they do not."""
    return (
        _by_parts(stage, structure, run, inputs, B, lot)
        or _by_crowds(stage, structure, run, inputs, B, lot)
        or swayed(stage, structure, inputs, B, lot)
        or _by_memory(stage, structure, inputs, B, lot)
        or _by_time(stage, structure, inputs, B, lot)
    )


def part_of(reading: Reading, inputs: Any, which: Sequence[int], B: int) -> Any:
    """The inputs of these examples."""
    return reading.only(inputs, torch.tensor(list(which)), B)


def _outputs(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor]:
    with torch.no_grad(), stage.paused():
        return stage.alone(inputs, after=after)[0]


def _kept(structure: Structure, a: list[Tensor], b: list[Tensor], mine: Tensor, its: Tensor, B: int, now: int) -> bool:
    """Whether the examples ``mine`` of outputs ``a`` (of B) have the same as ``its`` of ``b`` (of now)."""
    if len(a) != len(b):
        return False
    for x, y, layout in zip(a, b, structure.exits, strict=True):
        if layout is None:
            continue
        if not (layout.fits(x.shape, B) and layout.fits(y.shape, now)):
            return False
        p, q = layout.at(x.shape, B).only(x, mine, B), layout.at(y.shape, now).only(y, its, now)
        if p.shape != q.shape or not same(p, q):
            return False
    return True


# Left out and repeated ------------------------------------------------------------------------------------------------------


def _by_parts(stage: Sealing, structure: Structure, run: Run, inputs: Any, B: int, lot: Random) -> str | None:
    cut = B // 2 - (B % 4 == 0)  # an odd number, where both can be: a model that takes even ones only shows it now
    order = lot.sample(range(B), B)
    for part in (order[:cut], order[cut:]):
        its = torch.arange(len(part))
        made = _outputs(stage, part_of(structure.reading, inputs, part, B))
        if not _kept(structure, run.outputs, made, torch.tensor(part), its, B, len(part)):
            return "the output of one changes when another is left out"
    return None


def _by_crowds(stage: Sealing, structure: Structure, run: Run, inputs: Any, B: int, lot: Random) -> str | None:
    """A few among so many copies of one as a batch may hold: whatever has room for fewer, or for fewer alike, is full."""
    few = lot.sample(range(B), min(B, FEW))
    copies = [*few, *[lot.randrange(B)] * crowd(B)]
    copies, n = lot.sample(copies, len(copies)), len(copies)
    made = _outputs(stage, part_of(structure.reading, inputs, copies, B))
    if not _kept(structure, run.outputs, made, torch.tensor(copies), torch.arange(n), B, n):
        return "the output of one changes when it is among copies of another"
    return _by_kinds(stage, structure, inputs, B, few, lot)


def _by_kinds(stage: Sealing, structure: Structure, inputs: Any, B: int, few: list[int], lot: Random) -> str | None:
    """These few and what they are turned into, by themselves and among many of every kind: of one kind perhaps none takes up room."""
    turned = {len(few) + k: _turned for k in range(len(few))}
    own = [*few, *few]
    before = _tried(stage, structure.reading.changed(part_of(structure.reading, inputs, own, B), turned, len(own)))
    many = own + lot.sample(range(B), B) * -(-crowd(B) // B)
    kinds = [_turned, _other, *(change for _, change in _LARGE), None]
    become = turned | {k: kind for k in range(len(own), len(many)) if (kind := kinds[k % len(kinds)]) is not None}
    order = lot.sample(range(len(many)), len(many))  # who comes first
    place = {k: i for i, k in enumerate(order)}
    crowded = part_of(structure.reading, inputs, [many[k] for k in order], B)
    made = _tried(stage, structure.reading.changed(crowded, {place[k]: change for k, change in become.items()}, len(many)))
    if before is None or made is None:
        return None
    mine, its = torch.arange(len(own)), torch.tensor([place[k] for k in range(len(own))])
    if _kept(structure, before, made, mine, its, len(own), len(many)):
        return None
    return "the output of one changes when it is among many others"


# Replaced -------------------------------------------------------------------------------------------------------------------


def swayed(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    """A few examples, of which some become others, and extreme: those that stay, and are short, keep what they have."""
    n = min(B, FEW)
    others = sorted(lot.sample(range(n), max(n // 2, n - KEPT)))
    few = part_of(structure.reading, inputs, lot.sample(range(B), n), B)
    few = structure.reading.changed(few, {i: _short for i in range(n) if i not in others}, n)  # so others may be longer
    return _replaced(stage, structure, few, others, n)


def _replaced(stage: Sealing, structure: Structure, base: Any, others: list[int], n: int) -> str | None:
    """Each group of changes in a pass, one for each of the others (or in more passes, if they are too few).

    The last pass is the first one again: whatever a pass leaves behind where it cannot be put back shows in it.
    """
    kept = torch.tensor([i for i in range(n) if i not in others])
    before, after = _tried(stage, base), stage.buffers()
    if before is None:
        return None
    for number, now in enumerate(g[k : k + len(others)] for g in _changes() for k in range(0, len(g), len(others))):
        changes = {i: now[k % len(now)][1] for k, i in enumerate(others)}
        made = _tried(stage, structure.reading.changed(base, changes, n))
        if made is not None and not _kept(structure, before, made, kept, kept, n, n):
            return f"the output of one changes when the others are {' or '.join(dict.fromkeys(name for name, _ in now))}"
        if number == 0 and made is not None:
            changed = [b for b, value in stage.buffers().items() if b in after and not same(value, after[b])]
            if changed:
                return f"its buffer {changed[0]} keeps something of the data, without noise"
    again, every = _tried(stage, base), torch.arange(n)
    if again is not None and not _kept(structure, before, again, every, every, n, n):
        return _REMEMBERS
    return None


def _tried(stage: Sealing, inputs: Any, *, after: Any = None) -> list[Tensor] | None:
    """The outputs; None if the model refuses such inputs (lengths of 0, say), which nobody else learns anything from."""
    try:
        return _outputs(stage, inputs, after=after)
    except HushgradError:
        raise
    except (RuntimeError, ValueError, LookupError, AssertionError, ArithmeticError):
        return None


def _changes() -> list[list[tuple[str, Change]]]:
    """What others may become, in groups of which one does not hide another: ordinary, so large that it overflows, and no numbers.

    Whole numbers stay among those that are there.
    """
    large = {factor: (f"{abs(factor):g} times as large", partial(_large, factor=factor)) for factor in (1e16, 1e30)}
    filled = {
        value: [(str(value), partial(_filled, value=value)), (f"{value} somewhere", partial(_somewhere, value=value))]
        for value in (math.nan, math.inf, 3e38)
    }
    ordinary = [("replaced", _other), ("replaced", _turned), ("zero", _zero), ("shorter", _short), ("equal", _equal)]
    return [
        [*ordinary, *_LARGE],
        [large[1e16], large[1e30], *filled[3e38]],
        [*filled[math.nan], *filled[math.inf]],
        [("shorter", _short)],  # all of them
    ]


def _turned(t: Tensor, every: Tensor) -> Tensor:
    return -_other(t, every) if t.is_floating_point() else t


def _equal(t: Tensor, every: Tensor) -> Tensor:
    return torch.full_like(t, every.max().item()) if t.numel() and not t.is_floating_point() else t


def _other(t: Tensor, _: Tensor) -> Tensor:
    if t.is_floating_point():
        return (t + 0.1 * (1 + t.abs())) * 10
    return t.flip(-1) if t.dim() else t


def _zero(t: Tensor, every: Tensor) -> Tensor:
    return torch.zeros_like(t) if t.is_floating_point() or not bool(every.all()) else t


def _filled(t: Tensor, _: Tensor, value: float) -> Tensor:
    return torch.full_like(t, _held(t, value)) if t.is_floating_point() else t


def _large(t: Tensor, _: Tensor, factor: float) -> Tensor:
    return (t + (t == 0)) * factor if t.is_floating_point() else t


_LARGE = [(f"{abs(factor):g} times as large", partial(_large, factor=factor)) for factor in (1e4, -1e8)]


def _somewhere(t: Tensor, _: Tensor, value: float) -> Tensor:
    """In one place."""
    if not t.is_floating_point() or not t.numel():
        return t
    made = t.clone(memory_format=torch.contiguous_format)
    made.view(-1)[0] = _held(t, value)
    return made


def _held(t: Tensor, value: float) -> float:
    """The value, or the largest number that the tensor can hold: half precision ends at 65,504."""
    return min(value, torch.finfo(t.dtype).max) if math.isfinite(value) else value


def _short(t: Tensor, every: Tensor) -> Tensor:
    """The second half of each example's positions, or features, is 0, or as the first where no whole number is 0."""
    if t.dim() < 2:
        return t // 2 if not t.is_floating_point() and t.dtype is not torch.bool else t
    made = t.clone()
    # whole numbers stay among those that are there: no row of a table is read that the batch does not read
    made[:, (t.shape[1] + 1) // 2 :] = 0 if t.is_floating_point() or not bool(every.all()) else t[:, :1]
    return made


# Kept from an earlier pass, and later ---------------------------------------------------------------------------------------


def _by_memory(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    """What a pass leaves behind must not depend on its data, as far as the next pass shows it."""
    if not stage.wrote():
        return None
    n = min(B, FEW)
    few = part_of(structure.reading, inputs, lot.sample(range(B), n), B)
    every, first = torch.arange(n), structure.reading.changed(few, dict.fromkeys(range(n), _other), n)
    before, after = (_tried(stage, few, after=earlier) for earlier in (few, first))
    if before is not None and after is not None and not _kept(structure, before, after, every, every, n, n):
        return _REMEMBERS
    return None


def _by_time(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    for passes in CLOCKS:
        with stage.later(passes) as keeps_time:
            problem = keeps_time and (swayed(stage, structure, inputs, B, lot) or _by_memory(stage, structure, inputs, B, lot))
        if problem:
            return f"in later passes {problem}"
    return None

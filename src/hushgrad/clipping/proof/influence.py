"""Looks for influence between examples: no output may change when other examples are removed, replaced, repeated or made extreme.

*Crowds*: some examples of the batch run among as many others as a batch may hold. A capacity, a fixed-size queue or a sorted batch treats
an example differently among many others, many equal ones, or many of one kind.

Influence often appears only beyond a threshold: a capacity, the largest number, "is any of them NaN?". So the others are made large,
infinite, NaN, empty and short, and there are many of them. Influence beyond every threshold that is tried cannot be excluded by a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.proof.changed_examples import KINDS, Named, beyond, changes, constant, extremes, halved, short, turned
from hushgrad.clipping.proof.inputs import leaves
from hushgrad.clipping.proof.other_rows import by_rows
from hushgrad.clipping.proof.seal_runs import Sealing, kept, kept_elsewhere, outputs_of, part_of, tried
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.runs import same
from hushgrad.clipping.thresholds import LATER_PASSES, NEXT_PASSES, SEAL_EXAMPLES, SEAL_UNCHANGED

_SEEDED = (
    "its random numbers begin at a seed that follows from the data: draw from torch's own generator, and seed none in forward"
)
_MANY = "the output of one changes when it is among many others"
_REMEMBERS = "it keeps something of an earlier batch that changes the next one's outputs"


def influence(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, lot: Random) -> str | None:
    """A sentence about how other examples change an output, given the batch's ``outputs``; None if they do not."""
    return (
        _crowded(stage, structure, outputs, inputs, B, lot)
        or swayed(stage, structure, inputs, B, lot)
        or by_rows(stage, structure, inputs, B, lot)
        or _by_memory(stage, structure, inputs, B, lot)
        or _by_time(stage, structure, inputs, B, lot)
    )


# Crowds ---------------------------------------------------------------------------------------------------------------------


def _crowded(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, lot: Random) -> str | None:
    """How removing other examples, or adding many, changes an output, given the batch's ``outputs``.

    One half of the batch runs among copies of one example, the other half among many of every kind; each half also lacks the other one. In
    a small batch each half runs by itself, and a few examples run in both crowds.
    """
    cut = B // 2 - (B % 4 == 0)  # odd if possible, to detect models that accept only even numbers
    order = lot.sample(range(B), B)
    first, second = order[:cut], order[cut:]
    if B <= 2 * SEAL_EXAMPLES:
        if not all(_is_kept(stage, structure, outputs, inputs, B, part) for part in (first, second)):
            return "the output of one changes when another is left out"
        first, second = order[:SEAL_EXAMPLES], []
    copies = [*first, *[lot.choice(second or order)] * structure.most]  # exceeds any smaller capacity, also of equal examples
    if not _is_kept(stage, structure, outputs, inputs, B, lot.sample(copies, len(copies))):
        return "the output of one changes when it is among copies of another"
    return _by_kinds(stage, structure, outputs, inputs, B, second, lot)


def _is_kept(stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, who: list[int]) -> bool:
    """Whether these examples, by themselves, have the outputs that they have in the batch."""
    made = outputs_of(stage, part_of(structure.reading, inputs, who, B))
    return kept_elsewhere(stage, structure, inputs, outputs, made, torch.tensor(who), torch.arange(len(who)), B, len(who))


class _Crowd(NamedTuple):
    """A few examples, each also in a negated copy: half of them before the many others, and half after."""

    inputs: Any
    size: int
    turned: Tensor  # their positions
    others: range


def _by_kinds(
    stage: Sealing, structure: Structure, outputs: list[Tensor], inputs: Any, B: int, part: list[int], lot: Random
) -> str | None:
    """Run a few examples by themselves and among many of every kind; examples of a single kind might take up no capacity.

    The examples that come last by themselves come first in the crowd, so that a capacity by position shows. A part of the batch is among
    them.
    """
    reading, among = structure.reading, part or range(B)
    few = lot.sample(among, min(len(among), SEAL_EXAMPLES))
    become = dict.fromkeys(range(len(few)), turned)
    alone = reading.changed(part_of(reading, inputs, few, B), become, len(few), by_row=True)
    before = tried(stage, alone)
    own = [k for k in few for _ in range(1 if before is None else 2)]  # None: the model rejects negated copies
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
    """The outputs of a crowd whose other members are of all kinds; one kind at a time for a model that rejects the mixture."""
    for some in (KINDS, *([kind] for kind in KINDS)):
        kinds = [*some, None]
        now = {k: kind for k in crowd.others if (kind := kinds[k % len(kinds)]) is not None}
        now |= dict.fromkeys(crowd.turned.tolist(), turned)
        made = tried(stage, structure.reading.changed(crowd.inputs, now, crowd.size, by_row=True))
        if made is not None:
            yield made
            if some is KINDS:
                break


# Replaced -------------------------------------------------------------------------------------------------------------------


def swayed(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random, *, brief: bool = False) -> str | None:
    """Replace some of a few examples by others, ordinary and extreme: the rest, shortened so that others are longer, keep their outputs.

    ``brief``: only ordinary and large replacements.
    """
    n = min(B, SEAL_EXAMPLES)
    others = sorted(lot.sample(range(n), max(n // 2, n - SEAL_UNCHANGED)))
    few = part_of(structure.reading, inputs, lot.sample(range(B), n), B)
    shorter = structure.reading.changed(few, {i: short for i in range(n) if i not in others}, n)  # so that others are longer
    groups = changes()
    problem = _replaced(stage, structure, [shorter, few], others, n, groups[:1] if brief else groups)
    if problem or brief:
        return problem
    return _by_integers(stage, structure, few, others, n) or _by_constants(stage, structure, few, others, n)


def _by_integers(stage: Sealing, structure: Structure, few: Any, others: list[int], n: int) -> str | None:
    """Give others integers that do not occur in the batch; then let them alone hold others than the smallest, or the largest one.

    The largest or the smallest integer may be in each example of the batch: then no other one shows that it decides for all.
    """
    if all(t.data.is_floating_point() or t.data.dtype is torch.bool for t in leaves(few)):
        return None
    problem = _replaced(stage, structure, [few], others, n, [beyond()]) if stage.compared()[1] else None
    for name, extreme in extremes():
        plain = structure.reading.changed(few, {i: extreme for i in range(n) if i not in others}, n)
        problem = problem or _replaced(stage, structure, [plain, few], others, n, [[(name, extreme)]])
    return problem


def _by_constants(stage: Sealing, structure: Structure, few: Any, others: list[int], n: int) -> str | None:
    """Set others, then those that stay, to constants that the forward compares with (a missing value, a token, the end of a text).

    Then all of them to a number on one side of a constant, and others to the other side: an answer about the batch ("is any of them
    larger?") may already follow from each example of it.
    """
    constants, anew = stage.compared()
    if not constants:
        return None
    named = [constant(c, anew=anew) for c in constants]
    problem = _replaced(stage, structure, [few], others, n, [[change for made in named for change in made]])
    stay = [i for i in range(n) if i not in others]
    for value, (at, _, above, below) in zip(constants, named, strict=True):
        ended = structure.reading.changed(few, dict.fromkeys(stay, halved(value, anew=anew)), n)
        problem = problem or _replaced(stage, structure, [ended, few], others, n, [[at]])
        for one, other in ((below, at), (at, above)):
            alike = structure.reading.changed(few, dict.fromkeys(range(n), one[1]), n)
            problem = problem or _replaced(stage, structure, [alike, few], others, n, [[other]])
    return problem


def _replaced(
    stage: Sealing, structure: Structure, bases: list[Any], others: list[int], n: int, groups: list[list[Named]]
) -> str | None:
    """Apply each group of changes in one pass, one change for each of the others (in several passes if there are more changes).

    The last pass repeats the first one: it shows whatever a pass leaves behind where it cannot be restored.

    Args:
        stage: runs the model.
        structure: where the examples are.
        bases: a few examples; of several such inputs, the first that the model accepts.
        others: which of them change.
        n: how many examples there are.
        groups: of changes.
    """
    stay = torch.tensor([i for i in range(n) if i not in others])
    base, before = next(
        (b, made) for b in bases if (made := tried(stage, b) if b is not bases[-1] else outputs_of(stage, b)) is not None
    )
    after, seeds, seeded = stage.buffers(), stage.seeds(), False
    for number, now in enumerate(g[k : k + len(others)] for g in groups for k in range(0, len(g), len(others))):
        for some, made in _taken(stage, structure, base, others, n, now):
            if not kept(structure, before, made, stay, stay, n, n):
                return f"the output of one changes when the others are {' or '.join(dict.fromkeys(name for name, _ in some))}"
            seeded = seeded or stage.seeds() != seeds
        if number == 0:
            changed = [b for b, value in stage.buffers().items() if b in after and not same(value, after[b])]
            if changed:
                return f"its buffer {changed[0]} keeps something of the data, without noise"
    again, every = outputs_of(stage, base), torch.arange(n)
    if not kept(structure, before, again, every, every, n, n):
        return _REMEMBERS
    return _SEEDED if seeded and stage.seeds() == seeds else None


def _taken(
    stage: Sealing, structure: Structure, base: Any, others: list[int], n: int, now: list[Named]
) -> Iterator[tuple[list[Named], list[Tensor]]]:
    """The outputs after the others become these. What the model rejects together is tried separately, for all others and for one.

    What it always rejects cannot leak: a step over such a record ends with the model's own exception.
    """
    made = tried(stage, structure.reading.changed(base, {i: now[k % len(now)][1] for k, i in enumerate(others)}, n))
    if made is not None:
        yield now, made
        return
    for one in now:
        for who in (others, others[:1]):
            made = tried(stage, structure.reading.changed(base, dict.fromkeys(who, one[1]), n))
            if made is not None:
                yield [one], made
                break


# Memory of earlier passes, and counters -------------------------------------------------------------------------------------


def _by_memory(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    """Whether what a pass leaves behind, as far as the next pass shows it, depends on the data."""
    if stage.keeps_nothing():
        return None
    n = min(B, SEAL_EXAMPLES)
    few = part_of(structure.reading, inputs, lot.sample(range(B), n), B)
    every, before = torch.arange(n), outputs_of(stage, few, after=few)
    for first in _earlier(stage, structure, inputs, few, B, lot):
        if not kept(structure, before, outputs_of(stage, few, after=first), every, every, n, n):
            return _REMEMBERS
    return None


def _earlier(stage: Sealing, structure: Structure, inputs: Any, few: Any, B: int, lot: Random) -> Iterator[Any]:
    """Batches that a pass may come after: copies of one example, fewer and more, and ``few`` made every kind, one for each or for all.

    A single kind may change nothing: integers cannot be negated, and turned round they have the same mean.
    """
    n = min(B, SEAL_EXAMPLES)
    for one in lot.sample(range(B), min(B, SEAL_UNCHANGED)):
        yield part_of(structure.reading, inputs, [one] * n, B)
    for size in (n - 1, n + 1, 1):
        made = part_of(structure.reading, inputs, [k % B for k in range(size)], B)
        if size and tried(stage, made) is not None:
            yield made
    for kinds in (KINDS, *([kind] for kind in KINDS)):
        made = structure.reading.changed(few, {i: kinds[i % len(kinds)] for i in range(n)}, n)
        if tried(stage, made) is not None:
            yield made
            if kinds is KINDS:
                return


def _by_time(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    """The same in later passes of a model that counts them: in each of the next ones, as of every third one, and far later."""
    few = part_of(structure.reading, inputs, lot.sample(range(B), min(B, SEAL_EXAMPLES)), B)
    for passes in NEXT_PASSES:
        for _ in _later(stage, few, passes):
            if soon := swayed(stage, structure, inputs, B, lot, brief=True):
                return f"in a later pass {soon}"
    for passes in LATER_PASSES:
        for _ in _later(stage, few, passes):
            if problem := swayed(stage, structure, inputs, B, lot) or _by_memory(stage, structure, inputs, B, lot):
                return f"in later passes {problem}"
    return None


def _later(stage: Sealing, few: Any, passes: int) -> Iterator[None]:
    """So many passes later, by all the model's counters together; by each of them alone if it does not run with all of them advanced.

    One of them may be the rate of a dropout or the number of layers that are used, which no pass has that large.
    """
    with stage.later(passes) as counters:
        if counters and tried(stage, few) is not None:
            yield
            return
    for only in range(counters if counters > 1 else 0):
        with stage.later(passes, only):
            if tried(stage, few) is not None:
                yield

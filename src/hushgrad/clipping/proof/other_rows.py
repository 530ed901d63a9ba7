"""Looks for influence between examples whose rows are all in one list: by their number, their links, or their place in the list.

In a first batch all examples may have as many rows and the same links, so that what depends on the others' shows nowhere. So a few examples
are tried as they are, with other links, and with half of their rows; and each time others become larger and smaller, are left out, and come
in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from hushgrad.clipping.proof.changed_examples import LINKED
from hushgrad.clipping.proof.flat_rows import Flat, Piece
from hushgrad.clipping.proof.inputs import Reading, leaves
from hushgrad.clipping.proof.seal_runs import Sealing, kept_elsewhere, tried
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.thresholds import SEAL_EXAMPLES


def by_rows(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> str | None:
    """A sentence about how others' rows change an output; None if they do not, or if the rows are not in one list."""
    reading, flat = structure.reading, structure.reading.flat(inputs, B)
    if flat is None:
        return None
    few = lot.sample(range(B), min(B, SEAL_EXAMPLES))
    n = len(few)
    whole = reading.joined(inputs, flat.every(few), B)
    halved = reading.joined(inputs, [flat.halves()[i] for i in few], B)
    turned = ({k: LINKED[(k + by) % len(LINKED)] for k in range(n)} for by in range(len(LINKED)))
    emptied = _emptied(reading, whole, n) if reading.empty else []
    bases = (whole, halved, *emptied, *(reading.changed(whole, change, n) for change in turned))
    return next((problem for base in bases if (problem := _by_others(stage, structure, base, n))), None)


def takes_empty(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> bool:
    """Whether the model takes examples without rows, and whatever the others are, these and all others keep their outputs."""
    reading, flat = structure.reading._replace(empty=True), structure.reading.flat(inputs, B)
    if flat is None:
        return False
    few = lot.sample(range(B), min(B, SEAL_EXAMPLES))
    whole = reading.joined(inputs, flat.every(few), B)
    bases = _emptied(reading, whole, len(few))
    taken = all(tried(stage, base) is not None for base in bases)
    empty = structure._replace(reading=reading)
    return taken and not any(_by_others(stage, empty, base, len(few)) for base in (whole, *bases))


def _emptied(reading: Reading, whole: Any, n: int) -> list[Any]:
    """These examples, the even or the odd ones without rows."""
    flat = reading.flat(whole, n)
    assert flat is not None
    return [reading.joined(whole, flat.emptied(odd), n) for odd in (0, 1)]


def _by_others(stage: Sealing, structure: Structure, base: Any, n: int) -> str | None:
    """The same for these few examples, if the model takes them; where some are empty, the others also become other values."""
    reading, own = structure.reading, structure.reading.flat(base, n)
    assert own is not None
    before = tried(stage, base) if reading.tells(leaves(base), n) else None
    if before is None:
        return None
    cases = [
        (what, reading.joined(base, pieces, n), len(pieces), mine, its)
        for what, pieces, mine, its in _otherwise(own, n, empty=reading.empty)
    ]
    odd, stay = range(1, n, 2), list(range(0, n, 2))
    for change in LINKED if 0 in own.counts else ():
        cases.append(("are replaced", reading.changed(base, dict.fromkeys(odd, change), n), n, stay, stay))
    for what, others, size, mine, its in cases:
        made = tried(stage, others) if reading.tells(leaves(others), size) else None
        if made is not None and not kept_elsewhere(
            stage, structure, base, before, made, torch.tensor(mine), torch.tensor(its), n, size
        ):
            return f"the output of one changes when the others {what}"
    return None


def _otherwise(flat: Flat, n: int, *, empty: bool) -> Iterator[tuple[str, list[list[Piece]], list[int], list[int]]]:
    """What becomes of the others, all examples then, and where those that stay were and are."""
    own, stay = flat.every(range(n)), list(range(0, n, 2))
    largest = [piece for pieces in own for piece in pieces] * 2
    sizes = {
        "are half as large": [(rows + 1) // 2 for rows in flat.counts],
        "have a single row": [min(1, r) for r in flat.counts],
    }
    sizes |= {"have no rows": [0] * (n - 1) + flat.counts[-1:]} if empty else {}
    yield "are larger", [largest if k % 2 else own[k] for k in range(n)], stay, stay
    for what, rows in sizes.items():
        yield what, [[(k, rows[k])] if k % 2 else own[k] for k in range(n)], stay, stay
    yield "are left out", [own[k] for k in stay], stay, list(range(len(stay)))
    yield "come in another order", own[::-1], list(range(n)), list(range(n))[::-1]

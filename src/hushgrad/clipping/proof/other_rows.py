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
    for base in (whole, halved, *(reading.changed(whole, change, n) for change in turned)):
        before = tried(stage, base)
        if before is None:
            continue
        own = reading.flat(base, n)
        assert own is not None
        for what, pieces, mine, its in _otherwise(own, n):
            made = tried(stage, reading.joined(base, pieces, n))
            to = torch.tensor(mine), torch.tensor(its)
            if made is not None and not kept_elsewhere(stage, structure, base, before, made, *to, n, len(pieces)):
                return f"the output of one changes when the others {what}"
    return None


def _otherwise(flat: Flat, n: int) -> Iterator[tuple[str, list[list[Piece]], list[int], list[int]]]:
    """What becomes of the others, all examples then, and where those that stay were and are."""
    own, stay = flat.every(range(n)), list(range(0, n, 2))
    largest = [piece for pieces in own for piece in pieces] * 2
    sizes = {"are half as large": [max(1, rows // 2) for rows in flat.counts], "have a single row": [1] * n}
    yield "are larger", [largest if k % 2 else own[k] for k in range(n)], stay, stay
    for what, rows in sizes.items():
        yield what, [[(k, rows[k])] if k % 2 else own[k] for k in range(n)], stay, stay
    yield "are left out", [own[k] for k in stay], stay, list(range(len(stay)))
    yield "come in another order", own[::-1], list(range(n)), list(range(n))[::-1]

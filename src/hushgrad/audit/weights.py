"""The clipper by itself: at norms that no example of the data has, in batches of every size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, nan

import torch
from torch import Tensor

from hushgrad.audit.checks import Check
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.record import clipped
from hushgrad.events import Relation

_NORMS = (0.0, 1e-160, 1e-30, 1e-3, 0.999, 1.0, 1.001, 2.0, 30.0, 1e3, 1e5, 1e10, 1e19, 1e30, 1e75, 1e150, inf, nan)
_SIZES = (1, 2, 3, 8, 33)
_SLACK = 1e-4


def weights_check(clip: Clipper, names: Sequence[str], *, seed: int) -> Check:
    """Whatever its norm and the size of its batch, no example weighs more than the sensitivity allows.

    Norms from 0 over 1e150 clip norms to infinity and NaN, which must weigh nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    groups, norm = clip.groups(list(names)), float(clip.sensitivity(Relation.ADD_REMOVE))
    columns = 1 if groups is None else max(groups) + 1
    most, problems = 0.0, []
    for size in _SIZES:
        for first in range(0, len(_NORMS), size):
            chosen = torch.randint(len(_NORMS), (size, columns), generator=generator)
            chosen[:, 0] = torch.arange(first, first + size) % len(_NORMS)
            squares = (torch.tensor(_NORMS, dtype=torch.float64)[chosen] * norm).square()
            for weights in _weighed(clip, squares, grouped=groups is not None):
                whole = squares.isfinite()
                moved = (weights.square() * squares)[whole.all(1)].sum(1).sqrt() / norm
                most = max(most, float(moved.nan_to_num(nan=torch.inf).max()) if len(moved) else 0.0)
                if not bool((weights[~whole] == 0).all()):
                    problems.append(f"a norm that is no number weighs something in a batch of {size}")
    if most > 1 + _SLACK:
        problems.append("which is too much")
    seen = f"norms from 0 to infinity in batches of {_SIZES[0]} to {_SIZES[-1]}: {most:.4f} clip norms at most"
    return Check(name="clip weights", passed=not problems, seen=", ".join([seen, *problems[:2]]))


def _weighed(clip: Clipper, squares: Tensor, *, grouped: bool) -> Iterator[Tensor]:
    """The weights by each way that there is to them."""
    yield clip.weights((squares if grouped else squares[:, 0]).clone()).double().reshape(squares.shape)
    if not grouped:
        yield clipped(clip, [squares[:, 0] / 4, squares[:, 0] / 4], 2.0).weights.double().reshape(squares.shape)

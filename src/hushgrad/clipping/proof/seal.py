"""The seal: what gradients cannot show.

Tags follow the gradient; routing, a capacity, a sorted batch or a detached statistic influence without one. So single examples run alone,
with the batch's own cotangent, and must give the gradient and the norm that the capture attributes to them; and nobody's output may change
when other examples are left out, replaced, repeated or made extreme (:mod:`hushgrad.clipping.proof.others`).
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.costs import FEW, SEAL, WILD
from hushgrad.clipping.proof.others import Sealing, influence, part_of
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, Survey, exits_of
from hushgrad.clipping.proof.tags import Exit, cotangents
from hushgrad.errors import CaptureError

__all__ = ["Broken", "broken"]


class _Pick(NamedTuple):
    example: int
    weight: float


class Broken(NamedTuple):
    """What is wrong, in words; ``influence``: an output depends on other examples."""

    what: str
    influence: bool


def broken(stage: Sealing, structure: Structure, survey: Survey, inputs: Any, lot: Random) -> Broken | None:
    """What breaks the seal; None if nothing does."""
    B = survey.examples
    run = stage.run(inputs, B, structure)
    sane = _finite(structure, run, B)
    if not sane:
        return Broken("its outputs are NaN or infinite for every example", influence=False)
    chosen = dict.fromkeys((sane[0], sane[-1], lot.choice(sane)))
    picks = [_Pick(i, weight) for i, weight in zip(chosen, (1.0, 1.75, 0.625), strict=False)]
    exits = exits_of(run, structure.exits)
    us = cotangents(exits, seed=1)
    found = stage.weighed(run, exits, us, _weights(picks, B))  # at once: a layer may hold on to its last call
    others = influence(stage, structure, run, inputs, B, lot)
    if others:
        return Broken(others, influence=True)
    singles = _by_singles(stage, structure, found, us, picks, inputs, B)
    if singles is None:
        singles = _by_wild_cotangents(stage, structure, inputs, B, sane, lot)
    return None if singles is None else Broken(singles, influence=False)


def _weights(picks: list[_Pick], B: int) -> Tensor:
    weights = torch.zeros(B, dtype=torch.float64)
    for pick in picks:
        weights[pick.example] = pick.weight
    return weights


def _finite(structure: Structure, run: Run, B: int) -> list[int]:
    """The examples whose outputs are numbers: of others nothing can be compared."""
    sane = torch.ones(B, dtype=torch.bool)
    for y, layout in zip(run.outputs, structure.exits, strict=True):
        if layout is not None:
            sane &= layout.apart(y.detach(), B).flatten(1).isfinite().all(1).cpu()
    return sane.nonzero().flatten().tolist()


# Single examples ---------------------------------------------------------------------------------------------------------


def _by_singles(
    stage: Sealing,
    structure: Structure,
    found: tuple[dict[str, Tensor], Tensor],
    us: list[Tensor],
    picks: list[_Pick],
    inputs: Any,
    B: int,
) -> str | None:
    sums, norms = found
    expected: dict[str, Tensor] = {}
    tolerance = 0.0
    for pick in picks:
        grads = _single(stage, structure, inputs, us, pick.example, B)
        tolerance = _tolerance(stage, us, grads)
        wrong = _wrong_norm(pick.example, norms, grads, tolerance)
        if wrong:
            return wrong
        for name, g in grads.items():
            g = g.to(sums[name].dtype)
            expected[name] = expected[name].add_(g, alpha=pick.weight) if name in expected else g * pick.weight
    size = _norm(expected)
    errors = {name: float(_norm({name: g.sub_(sums[name])})) for name, g in expected.items()}
    error = sum(e * e for e in errors.values()) ** 0.5
    if error <= tolerance * size + 1e-30:
        return None
    worst = max(errors, key=lambda name: errors[name])
    return f"the gradients of single examples are not those that they have in the batch, most of all for {worst}"


def _norm(grads: dict[str, Tensor]) -> float:
    """Over all parameters, in double precision, without copies."""
    squares = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in grads.values()]
    return sum(squares) ** 0.5  # type: ignore[no-any-return]


def _tolerance(stage: Sealing, us: list[Tensor], grads: dict[str, Tensor]) -> float:
    """That of the lowest precision in which something is computed."""
    dtypes = {t.dtype for t in (*us, *grads.values())} | stage.precisions()
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        dtypes.add(torch.bfloat16)
    return max(SEAL.get(dtype, SEAL[torch.float16]) for dtype in dtypes)


def _wrong_norm(i: int, norms: Tensor, grads: dict[str, Tensor], tolerance: float) -> str | None:
    total, found = _norm(grads), float(norms[i])
    if abs(found - total) <= tolerance * total + 1e-30:
        return None
    return f"the gradient of example {i} has the norm {found:.6g} in its batch and {total:.6g} alone"


def _single(stage: Sealing, structure: Structure, inputs: Any, us: list[Tensor], i: int, B: int) -> dict[str, Tensor]:
    which = torch.tensor([i])
    with stage.paused():  # backward too: a checkpoint runs the model again inside it
        return _gradients(stage, structure, structure.reading.only(inputs, which, B), us, which, B)


def _gradients(stage: Sealing, structure: Structure, inputs: Any, us: list[Tensor], which: Tensor, B: int) -> dict[str, Tensor]:
    outputs, params = stage.alone(inputs)
    exits = [(y, layout) for y, layout in zip(outputs, structure.exits, strict=True) if layout is not None and y.requires_grad]
    cots = [layout.only(u, which, B) for (_, layout), u in zip(exits, us, strict=True)]
    found = torch.autograd.grad([y for y, _ in exits], list(params.values()), cots, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g.to_dense() for (name, p), g in zip(params.items(), found, strict=True)}


# Others' cotangents ---------------------------------------------------------------------------------------------------------


def _by_wild_cotangents(stage: Sealing, structure: Structure, inputs: Any, B: int, sane: list[int], lot: Random) -> str | None:
    """Huge losses of others, and such as are no numbers: hooks on gradients, too, may look at the batch."""
    if len(sane) < 2:
        return None
    chosen = lot.sample(sane, min(len(sane), FEW))
    n, some = len(chosen), part_of(structure.reading, inputs, chosen, B)
    keep = lot.randrange(n)
    run = stage.run(some, n, structure)
    exits = exits_of(run, structure.exits)
    us = cotangents(exits, seed=2)
    try:
        norms = stage.weighed(run, exits, _scaled(us, exits, keep, n), _weights([_Pick(keep, 1.0)], n))[1]
    except CaptureError:  # so would a step be refused that has such losses: nothing of it is released
        return None
    grads = _single(stage, structure, some, us, keep, n)
    wrong = _wrong_norm(keep, norms, grads, _tolerance(stage, us, grads))
    return wrong and f"with other losses that are large or no numbers, {wrong}"


def _scaled(us: list[Tensor], exits: list[Exit], keep: int, n: int) -> list[Tensor]:
    """All cotangents but one example's, times something huge, or NaN."""
    factors = torch.tensor([1.0 if i == keep else (WILD, float("nan"))[(i - keep) % 2] for i in range(n)])
    return [u * factors.to(u)[e.layout.owners(u.shape, n, u.device)] for u, e in zip(us, exits, strict=True)]

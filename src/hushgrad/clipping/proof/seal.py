"""The seal: final checks for influence that gradients cannot show.

Tags follow gradients; routing, a capacity, a sorted batch or a detached statistic influence without one. So single examples run alone with
the batch's own cotangent, and must give the gradient and the norm that the capture attributes to them. And no example's output may change
when other examples are removed, replaced, repeated or made extreme (:mod:`hushgrad.clipping.proof.influence`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hushgrad.clipping.mass import sq_norm
from hushgrad.clipping.proof.fixed_randomness import randomness_fixed
from hushgrad.clipping.proof.graph import Graph
from hushgrad.clipping.proof.influence import influence
from hushgrad.clipping.proof.seal_runs import Sealing, part_of
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, exits_above, used
from hushgrad.clipping.proof.tags import Exit, cotangents
from hushgrad.clipping.thresholds import HUGE_LOSS, OWN_HUGE_LOSS, SEAL_EXAMPLES, seal_of
from hushgrad.errors import CaptureError


class _Pick(NamedTuple):
    example: int
    weight: float


class Broken(NamedTuple):
    """A sentence about what is wrong; ``influence``: whether an output depends on other examples."""

    what: str
    influence: bool


def broken(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> Broken | None:
    """What breaks the seal of a structure, tried with B examples; None if nothing does."""
    hooks = RemovableHandle.next_id  # torch counts all that are put on tensors and nodes
    run = stage.run_sealed(inputs, B, structure)
    sane = _finite(structure, run, B)
    if not sane:
        return Broken("its outputs are NaN or infinite for every example", influence=False)
    outputs = [y.detach() for y in run.outputs]
    stage.acts_back = stage.acts_back or _acts_back(exits_above(run, structure.exits))
    together = _together(stage, structure, run, B, sane, lot)
    del run  # frees the graph
    others = influence(stage, structure, outputs, inputs, B, lot)
    if others:
        return Broken(others, influence=True)
    return _on_the_way_back(stage, structure, inputs, B, together, lot, hooks)


def broken_back(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> Broken | None:
    """The part of the seal that goes backward: outputs show nothing of hooks and of functions with a custom backward."""
    hooks = RemovableHandle.next_id
    try:
        run = stage.run(inputs, B, structure)
    except CaptureError:  # another graph than the proved one, which the pass itself has, too: that is proved by itself
        return None
    sane = _finite(structure, run, B)
    if not sane:
        return None
    together = _together(stage, structure, run, B, sane, lot)
    del run
    return _on_the_way_back(stage, structure, inputs, B, together, lot, hooks)


class _Together(NamedTuple):
    """What the capture attributes to a few examples in their batch, for these cotangents."""

    us: list[Tensor]
    picks: list[_Pick]
    sane: list[int]
    found: tuple[dict[str, Tensor], Tensor]


def _together(stage: Sealing, structure: Structure, run: Run, B: int, sane: list[int], lot: Random) -> _Together:
    chosen = dict.fromkeys(
        (sane[-1], lot.choice(sane), sane[0])
    )  # a capacity hits the last; the first may influence those after it
    picks = [_Pick(i, weight) for i, weight in zip(chosen, (1.0, 1.75, 1.375), strict=False)]
    exits = exits_above(run, structure.exits)
    us = cotangents(exits, seed=1)
    found = stage.weighed(run, exits, us, _weights(picks, B))  # now: a layer may keep only its last call
    return _Together(us, picks, sane, found)


def _on_the_way_back(
    stage: Sealing, structure: Structure, inputs: Any, B: int, together: _Together, lot: Random, hooks: int
) -> Broken | None:
    """What is wrong with the gradients; ``hooks``: how many there were before the batch ran."""
    us, picks, sane, found = together
    alone, singles = _by_singles(stage, structure, inputs, us, picks, B, found)
    twice = bool(structure.frontier.ends) or RemovableHandle.next_id > hooks
    wild = _by_wild_cotangents(stage, structure, inputs, us, alone, picks[0].example, B, sane, lot, twice=twice)
    problem = wild or singles
    return None if problem is None else Broken(problem, influence=False)


def _acts_back(exits: Sequence[Exit]) -> bool:
    """Whether some node below was not made by torch's own operations, but by a function with a custom backward, or a module's hook."""
    own = (getattr(node, "_forward_cls", None) for node in Graph(e.edge for e in exits).order)
    return any(made is not None and not made.__module__.startswith("hushgrad.") for made in own)


def _weights(picks: list[_Pick], B: int) -> Tensor:
    weights = torch.zeros(B, dtype=torch.float64)
    for pick in picks:
        weights[pick.example] = pick.weight
    return weights


def _finite(structure: Structure, run: Run, B: int) -> list[int]:
    """The examples with finite outputs: others cannot be compared."""
    sane = torch.ones(B, dtype=torch.bool)
    for y, layout in zip(run.outputs, structure.exits, strict=True):
        if layout is not None:
            sane &= layout.apart(y.detach(), B).flatten(1).isfinite().all(1).cpu()
    return sane.nonzero().flatten().tolist()


# Single examples ---------------------------------------------------------------------------------------------------------


class _Alone(NamedTuple):
    """The norm of one example's gradient, alone and as captured."""

    norm: float
    tolerance: float

    def differs(self, i: int, norms: Tensor) -> str | None:
        """A sentence about the difference."""
        found = float(norms[i])
        if abs(found - self.norm) <= self.tolerance * self.norm + 1e-30:
            return None
        return f"the gradient of example {i} has the norm {found:.6g} in its batch and {self.norm:.6g} alone"


def _by_singles(
    stage: Sealing,
    structure: Structure,
    inputs: Any,
    us: list[Tensor],
    picks: list[_Pick],
    B: int,
    found: tuple[dict[str, Tensor], Tensor],
) -> tuple[_Alone, str | None]:
    """The first example's norm alone, and what is wrong. Gradients are compared one at a time, since each is as large as the model."""
    sums, norms = found
    size = _norm(sums)
    alone: list[_Alone] = []
    for pick in picks:
        grads = _single(stage, structure, inputs, us, pick.example, B)
        alone.append(_Alone(_norm(grads), _tolerance(stage, us, grads)))
        wrong = alone[-1].differs(pick.example, norms)
        if wrong:
            return alone[0], wrong
        for name in list(grads):
            sums[name].sub_(
                grads.pop(name), alpha=pick.weight
            )  # in place: a further tensor of this size would cost more than the sum
    errors = {name: _norm({name: rest}) for name, rest in sums.items()}
    error = math.hypot(*errors.values())
    if error <= alone[-1].tolerance * (size - error) + 1e-30:  # the singles' own sum is at least as large as this difference
        return alone[0], None
    worst = max(errors, key=lambda name: errors[name])
    return alone[0], f"the gradients of single examples are not those that they have in the batch, most of all for {worst}"


def _norm(grads: dict[str, Tensor]) -> float:
    """The norm over all parameters, in double precision, without copies."""
    return math.sqrt(sum(float(sq_norm(g.unsqueeze(0))) for g in grads.values()))


def _tolerance(stage: Sealing, us: list[Tensor], grads: dict[str, Tensor]) -> float:
    """The tolerance of the lowest precision in which something is computed."""
    return seal_of({t.dtype for t in (*us, *grads.values())} | stage.precisions())


def _single(stage: Sealing, structure: Structure, inputs: Any, us: list[Tensor], i: int, B: int) -> dict[str, Tensor]:
    which = torch.tensor([i])
    with stage.paused():  # backward too: a checkpoint runs the model again inside it
        return _gradients(stage, structure, structure.reading.only(inputs, which, B), us, which, B)


def _gradients(stage: Sealing, structure: Structure, inputs: Any, us: list[Tensor], which: Tensor, B: int) -> dict[str, Tensor]:
    outputs, params = stage.alone(inputs)
    exits = [(y, layout) for y, layout in zip(outputs, structure.exits, strict=True) if layout is not None and y.requires_grad]
    cots = [layout.only(u, which, B) for (_, layout), u in zip(exits, us, strict=True)]
    with randomness_fixed("of one"):
        found = torch.autograd.grad([used(y) for y, _ in exits], list(params.values()), cots, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g.to_dense() for (name, p), g in zip(params.items(), found, strict=True)}


# Others' cotangents ---------------------------------------------------------------------------------------------------------


def _by_wild_cotangents(
    stage: Sealing,
    structure: Structure,
    inputs: Any,
    us: list[Tensor],
    alone: _Alone,
    i: int,
    B: int,
    sane: list[int],
    lot: Random,
    *,
    twice: bool,
) -> str | None:
    """Huge and NaN losses of the other examples: gradient hooks may look at the whole batch, too.

    The loss of i is larger as well: a hook that bounds gradients may use a mean over the batch, which shrinks with every further example.
    """
    if len(sane) < 2:
        return None
    others = lot.sample([k for k in sane if k != i], min(len(sane), SEAL_EXAMPLES) - 1)
    own = 1.0 if torch.float16 in {*stage.precisions(), *(u.dtype for u in us)} else OWN_HUGE_LOSS
    refused = ""
    for factors in ((0.0, HUGE_LOSS, math.nan), (HUGE_LOSS,)):
        keep = lot.randrange(len(others) + 1)
        chosen = [*others[:keep], i, *others[keep:]]
        n, which = len(chosen), torch.tensor(chosen)
        run = stage.run(part_of(structure.reading, inputs, chosen, B), n, structure)
        exits = exits_above(run, structure.exits)
        some = [e.layout.only(u, which, B) for u, e in zip(us, exits, strict=True)]
        try:
            scaled = _scaled(some, exits, keep, n, (own, *factors))
            norms = stage.weighed(run, exits, scaled, _weights([_Pick(keep, 1.0)], n))[1] / own
        except CaptureError as error:  # a step with such losses is refused, too: correct for NaN, not for large ones
            refused = str(error)
            continue
        refused, wrong = "", alone.differs(keep, norms)
        if wrong:
            return f"with other losses that are large or no numbers, {wrong}"
        if not twice:  # else try without NaN: whatever bounds a sum over all examples, or asks for the largest, saw only NaN
            break
    return f"with other losses that are large, {refused[:1].lower()}{refused[1:]}" if refused else None


def _scaled(us: list[Tensor], exits: list[Exit], keep: int, n: int, factors: Sequence[float]) -> list[Tensor]:
    """One example's cotangents times the first factor, the others' times the remaining ones in turn: huge, NaN, or 0."""
    own, *others = factors
    each = torch.tensor([own if i == keep else others[(i - keep) % len(others)] for i in range(n)], dtype=torch.float32)
    return [u * each.to(u)[e.layout.owners(u.shape, n, u.device)] for u, e in zip(us, exits, strict=True)]

"""The seal: what gradients cannot show.

Tags follow the gradient; routing, a capacity, a sorted batch or a detached statistic influence without one. So single examples run alone,
with the batch's own cotangent, and must give the gradient and the norm that the capture attributes to them; and no output may change
when other examples are left out or replaced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from random import Random
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hushgrad.clipping.costs import CROWD, NORM, SEAL
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.inputs import mapped
from hushgrad.clipping.proof.prove import Run, Stage, Survey, exits_of
from hushgrad.clipping.proof.quiet import buffers_of, put_back
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.tags import cotangents
from hushgrad.clipping.runs import same

__all__ = ["Broken", "Sealing", "broken", "swayed"]


class Sealing(Stage, Protocol):
    """What the seal needs of the capture beside its passes."""

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the examples' gradients with these weights, by the capture, and the examples' norms."""

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside are without the capture."""

    def alone(self, inputs: Any) -> tuple[list[Tensor], Any]:
        """A pass, and the trained parameters."""


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
    start = buffers_of(stage.model)
    run = stage.run(inputs, B, structure)
    after = buffers_of(stage.model)
    sane = _finite(structure, run, B)
    if not sane:
        return Broken("its outputs are NaN or infinite for every example", influence=False)
    chosen = dict.fromkeys((sane[0], sane[-1], lot.choice(sane)))
    picks = [_Pick(i, weight) for i, weight in zip(chosen, (1.0, 1.75, 0.625), strict=False)]
    exits = exits_of(run, structure.exits)
    us = cotangents(exits, seed=1)
    weights = torch.zeros(B, dtype=torch.float64)
    for pick in picks:
        weights[pick.example] = pick.weight
    found = stage.weighed(run, exits, us, weights)  # at once: a layer may hold on to its last call
    others = _by_others(stage, structure, run, inputs, B, start, after, lot)
    if others:
        return Broken(others, influence=True)
    singles = _by_singles(stage, structure, found, us, picks, inputs, B)
    return None if singles is None else Broken(singles, influence=False)


def swayed(stage: Sealing, structure: Structure, inputs: Any, B: int, lot: Random) -> Broken | None:
    """Whether others influence an example's outputs, with the constants of the present :class:`Quiet`."""
    start = buffers_of(stage.model)
    with torch.no_grad(), stage.paused():
        outputs, _ = stage.alone(inputs)
    after = buffers_of(stage.model)
    if len(outputs) != len(structure.exits) or not _finite(structure, Run(outputs, []), B):
        return None
    others = _by_others(stage, structure, Run(outputs, []), inputs, B, start, after, lot)
    return Broken(others, influence=True) if others else None


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
        tolerance = max(SEAL.get(t.dtype, SEAL[torch.float16]) for t in (*us, *grads.values()))
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            tolerance = max(tolerance, SEAL[torch.bfloat16])
        total = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
        if not _close(norms[pick.example].double(), total, total, max(tolerance, NORM)):
            found_norm, alone = float(norms[pick.example]), float(total)
            return f"the gradient of example {pick.example} has the norm {found_norm:.6g} in its batch and {alone:.6g} alone"
        for name, g in grads.items():
            expected[name] = expected.get(name, 0) + pick.weight * g.double()
    wrong = {name: (sums[name].double() - g).square().sum() for name, g in expected.items()}
    size = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    error = torch.stack(list(wrong.values())).sum().sqrt()
    if _close(error, torch.zeros_like(error), size, tolerance):
        return None
    worst = max(wrong, key=lambda name: float(wrong[name]))
    return f"the gradients of single examples are not those that they have in the batch, most of all for {worst}"


def _close(a: Tensor, b: Tensor, scale: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs() <= tolerance * scale + 1e-30)


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


# Others left out and replaced -----------------------------------------------------------------------------------------------


def _by_others(
    stage: Sealing, structure: Structure, run: Run, inputs: Any, B: int, start: Any, after: Any, lot: Random
) -> str | None:
    every = torch.arange(B)
    out = sorted({0, B - 1, lot.randrange(B)})
    for i in out:
        put_back(stage.model, start)
        rest = every[every != i]
        if not _kept(stage, structure, structure.reading.only(inputs, rest, B), run, rest, torch.arange(B - 1), B, B - 1):
            return "the output of one changes when another is left out"
    for i in out:  # all others like this one: whatever has room for so many of a kind is full
        put_back(stage.model, start)
        copies = torch.full((B * (CROWD if i else 1),), i)
        all_of_them, n = torch.arange(len(copies)), len(copies)
        if not _kept(stage, structure, structure.reading.only(inputs, copies, B), run, copies, all_of_them, B, n):
            return "the output of one changes when the others are replaced by copies of it"
    for factor in (1.0, 10.0, -10.0):
        put_back(stage.model, start)
        i = lot.randrange(B)
        which = every.roll(1 if factor > 0 else -1)
        which[i] = i
        replaced = _scaled(structure, structure.reading.only(inputs, which, B), i, factor, B)
        if not _kept(stage, structure, replaced, run, torch.tensor([i]), torch.tensor([i]), B, B):
            return "the output of one changes when the others are replaced"
        changed = [name for name, value in buffers_of(stage.model).items() if name in after and not same(value, after[name])]
        if changed:
            return f"its buffer {changed[0]} keeps something of the data, without noise"
    return None


def _kept(stage: Sealing, structure: Structure, inputs: Any, run: Run, mine: Tensor, its: Tensor, B: int, now: int) -> bool:
    """Whether the examples ``mine`` of the run have the same outputs as ``its`` of these inputs."""
    with torch.no_grad(), stage.paused():
        outputs, _ = stage.alone(inputs)
    for a, b, layout in zip(run.outputs, outputs, structure.exits, strict=True):
        if layout is not None and not same(layout.only(a, mine, B), layout.only(b, its, now)):
            return False
    return True


def _scaled(structure: Structure, inputs: Any, keep: int, factor: float, B: int) -> Any:
    """All examples but one somewhat changed, times ``factor``."""
    if factor == 1.0:
        return inputs
    layouts = iter(structure.reading.layouts)

    def change(t: Any) -> Any:
        layout = next(layouts)
        if not isinstance(layout, Layout) or not t.is_floating_point():
            return t
        other = (t + 0.1 * (1 + t.abs())) * factor
        return torch.where(layout.owners(t.shape, B, t.device) == keep, t, other)

    return mapped(inputs, change)

r"""The owner's check, which is exact: with the key in hand, release minus sum is the row that the theorem is about.

For chosen steps of a run, early and late ones, everything that a step must be is computed a second time and in the simplest way:

| part | how |
|---|---|
| sum | a loop over the batch's examples, one backward pass each, clipped and added up in double precision |
| row | s C Σ_j N_tj z_j, with N the mechanism's dense matrix and z_j the source's numbers of that step |
| update | a second optimizer, given the released gradient |
| batch | the sampler's own draw of that step, and the records of the data set with these numbers |

Whatever the batch did to the release beside the sum, or to the model beside the release, is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from hushgrad.audit.bench import Bench, Live, Seen, row_std
from hushgrad.audit.checks import Check
from hushgrad.clipping.base import Clipper
from hushgrad.events import Relation
from hushgrad.noise.source import Source
from hushgrad.sampling import Draws
from hushgrad.sampling.batch import Batch, stamp
from hushgrad.train import Plan
from hushgrad.train.fit import LossFunction, Passes

__all__ = ["Compared", "compare", "contributions", "exact_checks", "journal_check", "reference_row"]

_TOLERANCE = 1e-3  # of the magnitudes that were added up, as in ``self_check``
_SLACK = 1e-4  # that the arithmetic of a clipped sum may add to a contribution


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One step against its second computation: relative errors, and the largest contribution in clip norms."""

    step: int
    examples: int
    release: float
    worst: str
    update: float
    contribution: float
    amplitude: float
    batch: str
    kept: tuple[str, ...]
    chain: bytes


def contributions(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> list[dict[str, Tensor]]:
    """The gradient of every example's own loss, or of every unit's examples together, one backward pass for each example."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    alone = stamp(_plain(batch), step=batch.step, examples=batch.examples)
    rows: dict[Any, dict[str, Tensor]] = {}
    counted = batch.examples - batch.padding
    for i, part in enumerate(islice(alone.split(1), counted) if counted else ()):
        loss = loss_fn(*Passes.answered(model, part)).mean()
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        own = rows.setdefault(i if batch.units is None else int(batch.units[i]), {})
        for (name, p), grad in zip(params.items(), grads, strict=True):
            added = torch.zeros_like(p, dtype=torch.float64) if grad is None else grad.double()
            own[name] = own[name] + added if name in own else added
    return list(rows.values())


def _plain(batch: Batch) -> Any:
    if isinstance(batch, dict):
        return dict(batch)
    return list(batch) if isinstance(batch, (list, tuple)) else torch.as_tensor(batch).as_subclass(Tensor)


def clipped(clip: Clipper, rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Every contribution times its weight."""
    if not rows:
        return []
    names = list(rows[0])
    groups = clip.groups(names)
    number = [0] * len(names) if groups is None else groups
    squares = torch.zeros(len(rows), max(number) + 1, dtype=torch.float64)
    for i, row in enumerate(rows):
        for name, group in zip(names, number, strict=True):
            squares[i, group] += row[name].square().sum()
    weights = clip.weights(squares[:, 0] if groups is None else squares)
    weights = weights.reshape(len(rows), -1).double()
    return [
        {name: weights[i, group] * row[name] for name, group in zip(names, number, strict=True)} for i, row in enumerate(rows)
    ]


def reference_row(plan: Plan, key: bytes, step: int, likes: dict[str, Tensor], std: float) -> dict[str, Tensor]:
    """``std`` times row ``step`` of N Z in double precision, from the dense matrix."""
    weights = np.asarray(plan.noise.noising(step + 1), dtype=np.float64)[step]
    draws, source = list(plan.noise.draws(step + 1)), Source(key=key)
    rows = {}
    for index, (name, like) in enumerate(likes.items()):
        total = torch.zeros(like.shape, dtype=torch.float64)
        for weight, draw in zip(weights, draws, strict=True):
            if weight:
                total += float(weight) * source.z(draw, index, torch.empty(like.shape, dtype=like.dtype)).double()
        rows[name] = std * total
    return rows


def compare(bench: Bench, key: bytes, *, first: int, count: int) -> Iterator[Compared]:
    """Steps ``first``, ``first`` + 1, ... of a run under ``key``, each against its second computation."""
    model, (other, optimizer) = bench.plain(), bench.build()
    with bench.run(key, step=first) as live:
        still = _still(live)
        for seen in live.steps(count):
            _put(model, seen.before)
            yield _compared(live, seen, model, _update_error(other, optimizer, bench, seen), still)


def _compared(live: Live, seen: Seen, model: nn.Module, update: float, still: dict[str, Any]) -> Compared:
    bench, key = live.bench, live.private.key.secret  # in several processes, the first one's key
    rows, std = clipped(seen.clip, contributions(model, bench.loss_fn, seen.batch)), row_std(bench.plan, seen.clip)
    noise = reference_row(bench.plan, key, seen.step, seen.before, std)
    errors, dot, square = {}, 0.0, 0.0
    for name, released in seen.released.items():
        total = sum((row[name] for row in rows), torch.zeros(released.shape, dtype=torch.float64))
        size = sum((row[name].abs() for row in rows), torch.zeros(released.shape, dtype=torch.float64))
        live.private.placement.world.add_up([total, size])
        left = released.cpu() - total
        scale = float(torch.linalg.vector_norm(size)) + std * released.numel() ** 0.5
        errors[name] = float(torch.linalg.vector_norm(left - noise[name])) / scale
        dot, square = dot + float((left * noise[name]).sum()), square + float(noise[name].square().sum())
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    norms = [sum(float(part.square().sum()) for part in row.values()) ** 0.5 for row in rows]
    return Compared(
        step=seen.step,
        examples=seen.batch.examples,
        release=errors[worst],
        worst=worst,
        update=update,
        contribution=max(norms, default=0.0) / seen.clip.sensitivity(Relation.ADD_REMOVE),
        amplitude=dot / square,
        batch=_batch_problem(live, seen),
        chain=live.private.journal.chain,
        kept=tuple(name for name, value in _still(live).items() if not torch.equal(value, still[name])),
    )


def _put(model: nn.Module, values: dict[str, Tensor]) -> None:
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            params[name].copy_(value)


def _update_error(model: nn.Module, optimizer: torch.optim.Optimizer, bench: Bench, seen: Seen) -> float:
    """How far the parameters are from where a second optimizer puts them, given the released gradient; relative to the move."""
    if bench.plan.denoise is not None or bench.whole is not None:
        return 0.0
    _put(model, seen.before)
    params = dict(model.named_parameters())
    for name, grad in seen.released.items():
        params[name].grad = (grad / float(bench.plan.batch_size)).to(params[name].dtype)
    optimizer.step()
    error = moved = 0.0
    for name, before in seen.before.items():
        error += float((params[name].detach() - seen.after[name]).square().sum())
        moved += float((params[name].detach() - before).square().sum())
    return (error / max(moved, 1e-30)) ** 0.5


def _batch_problem(live: Live, seen: Seen) -> str:
    """Whether the batch holds the records that the sampler drew for this step."""
    bench = live.bench
    records = seen.batch._records
    if records is None or bench.groups is not None or live.private.spread:
        return ""
    drawn = bench.plan.sampler.dealer(len(bench.dataset), Draws(live.private.key.sampling))(seen.step)
    if not np.array_equal(records, drawn) or seen.batch.examples != len(drawn):
        return f"step {seen.step} was handed other records than its draw"
    if not len(drawn) or bench.loader_options.get("collate_fn") is not None:
        return ""
    own = tree_leaves(default_collate([bench.dataset[int(i)] for i in drawn]))
    same = all(torch.equal(a, b) for a, b in zip(own, tree_leaves(_plain(seen.batch)), strict=True) if isinstance(a, Tensor))
    return "" if same else f"step {seen.step} was handed other data than its records"


def _still(live: Live) -> dict[str, Tensor]:
    """What is released with the model and no optimizer moves; a tied parameter is one under all of its names."""
    trainable = {id(p) for p in live.private.placement.params.values()}
    tied = {name for name, p in live.private.model.named_parameters(remove_duplicate=False) if id(p) in trainable}
    state = live.private.model.state_dict()
    return {name: value.clone() for name, value in state.items() if name not in tied and isinstance(value, Tensor)}


def journal_check(found: list[Compared], digests: list[bytes]) -> Check:
    """The steps that were compared, from the first one on, against what a run's journal says that it released."""
    known = [(one, digests[one.step]) for one in found if one.step < len(digests)]
    other = [one.step for one, digest in known if one.chain[: len(digest)] != digest]
    seen = f"{len(known)} steps that were computed a second time are in the run's journal"
    problem = f", which shows another release for step {other[0]}" if other else ""
    return Check(name="journal", passed=not other, seen=seen + problem)


def exact_checks(found: list[Compared]) -> list[Check]:
    """What the compared steps say."""
    steps = (
        f"{len(found)} steps ({', '.join(str(one.step) for one in found)}), {sum(one.examples for one in found)} single passes"
    )
    worst = max(found, key=lambda one: one.release if one.release == one.release else float("inf"))
    most, moved = max(one.contribution for one in found), max(one.update for one in found)
    batches = [one.batch for one in found if one.batch]
    kept = sorted({name for one in found for name in one.kept})
    return [
        Check(
            name="exact release",
            passed=worst.release <= _TOLERANCE,
            seen=f"{steps}: release - sum differs from the key's row by {worst.release:.1e}, most in {worst.worst} of step {worst.step}",
        ),
        Check(
            name="exact contribution",
            passed=most <= 1 + _SLACK,
            seen=f"{steps}: the largest contribution has {most:.4f} clip norms",
        ),
        Check(name="exact update", passed=moved <= _TOLERANCE, seen=f"{steps}: the optimizer's move differs by {moved:.1e}"),
        Check(name="exact batch", passed=not batches, seen=f"{steps}{''.join(f', {text}' for text in batches[:1])}"),
        Check(
            name="released state",
            passed=not kept,
            seen=f"{steps}: {', '.join(kept[:3]) or 'nothing'} changed beside the parameters",
        ),
    ]

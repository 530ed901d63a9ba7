r"""The exact check for the owner of the key: release minus sum must equal the noise row that the key determines.

Everything in chosen steps of a run is computed a second time (:mod:`hushgrad.audit.recompute`). Any other influence of the batch on the
release, or on the model, shows as a difference. The steps are the first and the last ones, some random ones, and those of the smallest
and of the largest batch; one of them is split into micro-batches, one follows a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from hushgrad.audit.bench import Bench, Live, Seen, row_std
from hushgrad.audit.checks import Check
from hushgrad.audit.recompute import Rows, Twin, clipped, contributions, distance, plain_batch, put, reference_release
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.events import Relation
from hushgrad.sampling import Draws
from hushgrad.sampling.units import Units

_TOLERANCE = 1e-3  # relative to the magnitudes that were summed, as in ``self_check``
_SINGLE = 10  # a single number may be off by this many tolerances, whatever the size of its tensor
_SLACK = 1e-4  # that rounding in a clipped sum may add to a contribution


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One step against its second computation: errors relative to the precision's tolerance, the largest contribution in clip norms."""

    step: int
    examples: int
    release: float
    worst: str
    update: float
    gradient: float
    average: float
    clip: float
    contribution: float
    batch: str
    kept: tuple[str, ...]
    chain: bytes


def compare(
    bench: Bench, key: bytes, *, first: int, count: int, size: int | None = None, shake: int | None = None
) -> Iterator[Compared]:
    """Steps ``first``, ``first`` + 1, ... of a run under ``key``, each against its second computation.

    In micro-batches of ``size``, and from weights perturbed with seed ``shake``, if these are given.
    """
    model = bench.plain()
    with bench.run(key, step=first, size=size, shake=shake) as live:
        twin, still = Twin.of(bench, live.private.plan), _still(live)

        def taken(run: Live, steps: int) -> Iterator[Compared]:
            for seen in run.steps(steps):
                put(model, seen.before)
                rows = contributions(model, bench.loss, seen.batch, twin.probes(seen.before), twin.scales())
                yield _compared(run, seen, rows, twin, still)

        yield from taken(live, count)
        if first or live.private.sharding is not None or live.private.steps == live.private.steps_allowed:
            return
        with bench.resumed(live) as again:
            yield from taken(again, 1)


def _compared(live: Live, seen: Seen, rows: list[Rows], twin: Twin, still: dict[str, Any]) -> Compared:
    short = clipped(seen.clip, rows)
    release, worst = _release_error(live, seen, short)
    lengths = [sum(float(part.square().sum()) for part in row.values()) ** 0.5 for row in short]
    return Compared(
        step=seen.step,
        examples=seen.batch.examples,
        release=release,
        worst=worst,
        gradient=_gradient_error(twin, seen),
        update=_update_error(twin, seen),
        average=_relative(twin.means, seen.means, seen.before),
        clip=_clip_error(live, seen, rows, twin),
        contribution=max(lengths, default=0.0) / seen.clip.sensitivity(Relation.ADD_REMOVE),
        batch=_batch_problem(live, seen),
        chain=live.private.journal.chain,
        kept=tuple(name for name, value in _still(live).items() if not torch.equal(value, still[name])),
    )


def _release_error(live: Live, seen: Seen, short: list[Rows]) -> tuple[float, str]:
    """The distance of the release from sum plus row, relative to the tolerance, and the tensor where it is largest."""
    plan, key = live.private.plan, live.private.key.secret  # in a run of several processes, the first one's key
    std, totals, sizes = row_std(plan, seen.clip), {}, {}
    for name, before in seen.before.items():
        total = sum((row[name] for row in short), torch.zeros(before.shape, dtype=torch.float64))
        size = sum((row[name].abs() for row in short), torch.zeros(before.shape, dtype=torch.float64))
        live.private.placement.world.add_up([total, size])
        totals[name], sizes[name] = total, size
    expected = reference_release(plan, key, seen.step, {k: t.clone() for k, t in totals.items()}, seen.before, std)
    errors = {}
    for name, must in expected.items():
        if name not in seen.released:
            errors[name] = float("inf")
            continue
        scale = float(torch.linalg.vector_norm(sizes[name])) + std * must.numel() ** 0.5
        allowed = _allowed(seen.before[name])
        single = float((seen.released[name].cpu() - must).abs().max()) / (float(sizes[name].max()) + std) / _SINGLE
        errors[name] = _number(max(distance(seen.released[name], must) / scale, single) / allowed)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _allowed(like: Tensor) -> float:
    """The error that rounding may cause in this precision."""
    return _TOLERANCE + torch.finfo(like.dtype).eps


def _number(error: float) -> float:
    return error if error == error else float("inf")


def _relative(made: Rows, seen: Rows, likes: Rows) -> float:
    """The largest relative distance of tensors of the same names; infinite if the names differ."""
    if made.keys() != seen.keys():
        return float("inf")
    errors = [0.0]
    for name, tensor in made.items():
        scale = float(torch.linalg.vector_norm(tensor.double())) + 1e-12
        errors.append(_number(distance(tensor, seen[name]) / scale / _allowed(likes[name])))
    return max(errors)


def _gradient_error(twin: Twin, seen: Seen) -> float:
    """Compare the optimizer's gradient and the denoiser's state with those of a second denoiser."""
    given = twin.given(seen)
    error = _relative(given, seen.given, seen.before)
    if twin.plan.denoise is None or twin.optimizer is None:  # a sharded model's state is sharded as well
        return error
    if twin.state.keys() != seen.state.keys():
        return float("inf")
    tensors = {name: value for name, value in twin.state.items() if isinstance(value, Tensor)}
    likes = {name: torch.empty(0, dtype=torch.float32) for name in tensors}
    return max(error, _relative(tensors, {name: seen.state[name] for name in tensors}, likes))


def _update_error(twin: Twin, seen: Seen) -> float:
    """How far the parameters are from where a second optimizer puts them, given the same gradient; relative to the move."""
    made = twin.moved(seen)
    if made is None:
        return 0.0
    error = moved = rounded = 0.0
    for name, before in seen.before.items():
        error += distance(made[name], seen.after[name]) ** 2
        moved += distance(made[name], before) ** 2
        rounded += (torch.finfo(before.dtype).eps * float(torch.linalg.vector_norm(before.double()))) ** 2
    return _number((error / max(moved, rounded, 1e-30)) ** 0.5 / _TOLERANCE)


def _clip_error(live: Live, seen: Seen, rows: list[Rows], twin: Twin) -> float:
    """The error of the next clip norm, relative to what examples with norms at the threshold can cause."""
    if not isinstance(seen.clip, Adaptive):
        return 0.0
    norms = torch.tensor([sum(float(part.square().sum()) for part in row.values()) ** 0.5 for row in rows], dtype=torch.float64)
    border = (norms / seen.clip.max_grad_norm - 1).abs() < _TOLERANCE
    counts = torch.tensor([seen.clip.raw_count(norms), float(border.sum())], dtype=torch.float64)
    live.private.placement.world.add_up([counts])
    must = twin.clip(seen, live.private.key.secret, float(counts[0])).sensitivity(Relation.ADD_REMOVE)
    off = abs(float(np.log(seen.next_clip.sensitivity(Relation.ADD_REMOVE) / must)))
    return off / (1e-6 + seen.clip.learning_rate * float(counts[1]) / seen.clip.batch_size)


def _batch_problem(live: Live, seen: Seen) -> str:
    """What is wrong with the batch: it must hold the records that the sampler drew, each once, and all of a user's; empty if nothing."""
    bench, world, batch = live.bench, live.private.placement.world, seen.batch
    drawn = bench.plan.sampler.dealer(bench.records, Draws(live.private.key.sampling))(seen.step)
    if batch._records is None or not np.array_equal(batch._records, drawn):
        return f"step {seen.step} was handed other records than its draw"
    if len(np.unique(drawn)) != len(drawn):
        return f"a record is in the batch of step {seen.step} twice"
    mine, examples = drawn[world.rank :: world.size], batch.examples - batch.padding
    numbers = mine
    if bench.groups is not None:
        units = Units.of(bench.groups, examples=len(bench.dataset))
        if batch.units is None or units.cap is not None:
            return ""
        _, owner = np.unique(np.asarray(units.owners), return_inverse=True)
        numbers = np.concatenate([np.empty(0, np.int64), *(np.flatnonzero(owner == unit) for unit in mine)])
        if not np.array_equal(owner[numbers], batch.units.numpy()[:examples]):
            return f"step {seen.step} was handed examples under other users' names"
    if examples != len(numbers) * bench.plan.augmentations:
        return f"step {seen.step} was handed {examples} examples, not {len(numbers)}"
    if not len(numbers) or bench.loader_options.get("collate_fn") is not None or bench.plan.augmentations > 1:
        return ""
    own = tree_leaves(default_collate([bench.dataset[int(i)] for i in numbers]))
    handed = [leaf for leaf in tree_leaves(plain_batch(batch)) if isinstance(leaf, Tensor)]
    same = all(torch.equal(a, b[:examples]) for a, b in zip(own, handed, strict=False) if isinstance(a, Tensor))
    return "" if same else f"step {seen.step} was handed other data than its records"


def _still(live: Live) -> dict[str, Tensor]:
    """The tensors of the model that no optimizer updates but that are released with it; tied parameters are excluded under all names."""
    trainable = {id(p) for p in live.private.placement.params.values()}
    tied = {name for name, p in live.private.model.named_parameters(remove_duplicate=False) if id(p) in trainable}
    state = live.private.model.state_dict()
    return {name: value.clone() for name, value in state.items() if name not in tied and isinstance(value, Tensor)}


def journal_check(found: list[Compared], digests: list[bytes]) -> Check:
    """Check that the compared steps, from the first one on, released what the run's journal records."""
    known = [(one, digests[one.step]) for one in found if one.step < len(digests)]
    other = [one.step for one, digest in known if one.chain[: len(digest)] != digest]
    seen = f"{len(known)} steps that were computed a second time are in the run's journal"
    problem = f", which shows another release for step {other[0]}" if other else ""
    return Check(name="journal", passed=not other, seen=seen + problem)


def exact_checks(found: list[Compared]) -> list[Check]:
    """The checks that follow from the compared steps."""
    steps = (
        f"{len(found)} steps ({', '.join(str(one.step) for one in found)}), {sum(one.examples for one in found)} single passes"
    )
    worst = max(found, key=lambda one: one.release)
    most = max(one.contribution for one in found)
    batches = [one.batch for one in found if one.batch]
    kept = sorted({name for one in found for name in one.kept})
    where = f"most in {worst.worst} of step {worst.step}"
    off = f"{steps}: release - sum differs from the key's row by {worst.release:.1e} of the tolerance, {where}"
    largest = f"{steps}: the largest contribution has {most:.4f} clip norms"
    made = [
        Check(name="exact release", passed=worst.release <= 1, seen=off),
        Check(name="exact contribution", passed=most <= 1 + _SLACK, seen=largest),
    ]
    parts = (
        ("exact gradient", "what the optimizer is given", [one.gradient for one in found]),
        ("exact update", "the optimizer's move", [one.update for one in found]),
        ("exact average", "the average", [one.average for one in found]),
        ("exact clip norm", "the next clip norm", [one.clip for one in found]),
    )
    for name, what, errors in parts:
        seen = f"{steps}: {what} differs by {max(errors):.1e} of the tolerance"
        made.append(Check(name=name, passed=max(errors) <= 1, seen=seen))
    changed = f"{steps}: {', '.join(kept[:3]) or 'nothing'} changed beside the parameters"
    return [
        *made,
        Check(name="exact batch", passed=not batches, seen=f"{steps}{''.join(f', {text}' for text in batches[:1])}"),
        Check(name="released state", passed=not kept, seen=changed),
    ]

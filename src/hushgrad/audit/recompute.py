r"""A second, deliberately simple computation of everything in a step, to compare with the run.

| part | how |
|---|---|
| sum | a loop over the examples, a backward pass each (at every point that a denoiser asks for), clipped and added in double precision |
| row | s C Σ_j N_tj z_j, with N the mechanism's dense matrix and z_j the cipher's numbers, made by numpy |
| clip norm | the count of the norms below it, with the cipher's number for it |
| gradient | a second call of the denoiser, which keeps a state of its own |
| update | a second optimizer, given that gradient; projection and average as their formulas say |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.audit.bench import Bench, Loss, Seen, row_std
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import NoiseInfo, Probe
from hushgrad.events import Relation
from hushgrad.noise._kernel import NumpyKernel
from hushgrad.noise.source import Source
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.batch_loader import stamp
from hushgrad.train import Plan
from hushgrad.train.guard import checks

Rows = dict[str, Tensor]
_HERE = (Probe(),)


# The sum -------------------------------------------------------------------------------------------------------------------


def contributions(
    model: nn.Module, loss: Loss, batch: Batch, probes: Sequence[Probe] = _HERE, scales: Rows | None = None
) -> list[Rows]:
    """Each example's (or unit's) contribution before clipping: the gradient of its own loss, or a combination over probes.

    ``scales``: what the coordinates are multiplied by before they are clipped.
    """
    rows: dict[Any, Rows] = {}
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for probe in probes:
        put(model, {name: start[name] + shift for name, shift in (probe.shift or {}).items()})
        for owner, gradient in _gradients(model, loss, batch):
            own = rows.setdefault(owner, {})
            for name, grad in gradient.items():
                added = probe.coefficient * grad
                own[name] = own[name] + added if name in own else added
        put(model, start)
    if scales is None:
        return list(rows.values())
    return [{name: value * scales[name].double() for name, value in row.items()} for row in rows.values()]


def _gradients(model: nn.Module, loss: Loss, batch: Batch) -> Any:
    """(owner, gradient) of each example in turn."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    alone = stamp(plain_batch(batch), step=batch.step, examples=batch.examples)
    counted = batch.examples - batch.padding
    for i, part in enumerate(islice(alone.split(1), counted) if counted else ()):
        grads = torch.autograd.grad(loss(model, part), list(params.values()), allow_unused=True)
        yield (
            i if batch.units is None else int(batch.units[i]),
            {
                name: torch.zeros_like(p, dtype=torch.float64) if grad is None else grad.double()
                for (name, p), grad in zip(params.items(), grads, strict=True)
            },
        )


def plain_batch(batch: Batch) -> Any:
    """The batch as the collate function returned it, without its stamp."""
    if isinstance(batch, dict):
        return dict(batch)
    return list(batch) if isinstance(batch, (list, tuple)) else torch.as_tensor(batch).as_subclass(Tensor)


def clipped(clip: Clipper, rows: list[Rows]) -> list[Rows]:
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


def put(model: nn.Module, values: Rows) -> None:
    """Set parameters by name."""
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            params[name].copy_(value)


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| in double precision."""
    return float(torch.linalg.vector_norm(a.detach().double().cpu() - b.detach().double().cpu()))


# The row -------------------------------------------------------------------------------------------------------------------


def drawn(plan: Plan, key: bytes, draw: int, index: int, size: int, dtype: torch.dtype) -> np.ndarray:
    """The Gaussians of one draw for one tensor, by numpy on one thread, in the run's precision."""
    out = np.empty(size, np.float64 if dtype is torch.float64 else np.float32)
    if size:
        stream = Source(key=key, cipher=plan.drawn_by)._stream
        NumpyKernel().draw(stream, draw, index, 0, 1.0, out, fresh=True)
    return out.astype(np.float64)


def reference_row(plan: Plan, key: bytes, step: int, likes: Rows, std: float) -> Rows:
    """``std`` times row ``step`` of N Z in double precision, from the dense matrix."""
    weights = np.asarray(plan.noise.noising(step + 1), dtype=np.float64)[step]
    draws, rows = list(plan.noise.draws(step + 1)), {}
    for index, (name, like) in enumerate(likes.items()):
        total = np.zeros(like.numel())
        for weight, draw in zip(weights, draws, strict=True):
            if weight:
                total += float(weight) * drawn(plan, key, draw, index, like.numel(), like.dtype)
        rows[name] = std * torch.from_numpy(total).reshape(like.shape)
    return rows


def reference_release(plan: Plan, key: bytes, step: int, totals: Rows, likes: Rows, std: float, *, first: int = 0) -> Rows:
    """The sums with their noise; with ``plan.secure`` both are rounded together, once, to the grid of the divided sum."""
    if not plan.secure:
        return {name: totals[name] + row for name, row in reference_row(plan, key, step, likes, std).items()}
    source, size = Source(key=key, secure=True), float(plan.batch_size)
    released = {}
    for index, (name, total) in enumerate(totals.items(), first):
        mean = total / size
        released[name] = source.z(step, index, mean, out=mean, scale=std / size) * size
    return released


# What comes after the release ----------------------------------------------------------------------------------------------


@dataclass
class Twin:
    """A second copy of a run's state: parameters, optimizer, the denoiser's state, averages."""

    bench: Bench
    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None if the run's parameters are sharded
    state: dict[str, Any] = field(default_factory=dict)
    means: Rows = field(default_factory=dict)

    @classmethod
    def of(cls, bench: Bench, plan: Plan) -> Twin:
        """A twin at the beginning of a run, or of a stretch of it."""
        if bench.whole is not None:
            return cls(bench, plan, bench.plain(), None)
        model, optimizer = bench.build()
        checks(optimizer)
        return cls(bench, plan, model, optimizer)

    def probes(self, before: Rows) -> Sequence[Probe]:
        """The points at which the denoiser asks for gradients."""
        with torch.no_grad():
            return _HERE if self.plan.denoise is None else self.plan.denoise.probes(before, self.state)

    def scales(self) -> Rows | None:
        """The scales by which the denoiser multiplies gradients before clipping."""
        with torch.no_grad():
            return None if self.plan.denoise is None else self.plan.denoise.scales(self.state)

    def given(self, seen: Seen) -> Rows:
        """The gradient that the optimizer should have received."""
        size = float(self.plan.batch_size)
        grads = {name: (total / size).to(seen.before[name].dtype) for name, total in seen.released.items()}
        if self.plan.denoise is None:
            return grads
        std = row_std(self.plan, seen.clip) / size * self.plan.noise.row_std(seen.step, steps=self.plan.steps)
        norm = float(seen.clip.sensitivity(Relation.ADD_REMOVE))
        info = NoiseInfo(std=std, step=seen.step, max_grad_norm=norm, learning_rate=seen.learning_rate)
        with torch.no_grad():
            return self.plan.denoise(grads, info, self.state)

    def moved(self, seen: Seen) -> Rows | None:
        """The parameters after the step, given the run's own gradient; averages are taken of the run's own parameters."""
        if self.plan.average is not None:
            self._average(seen)
        if self.optimizer is None:
            return None
        put(self.model, seen.before)
        params = dict(self.model.named_parameters())
        for name, grad in seen.given.items():
            params[name].grad = grad.to(params[name].dtype)
        self.optimizer.step()
        if self.plan.projection is not None:
            self.plan.projection.project_([params[name] for name in seen.before])
        return {name: params[name].detach().clone() for name in seen.before}

    def _average(self, seen: Seen) -> None:
        assert self.plan.average is not None
        weight = self.plan.average.weight(seen.step, self.plan.steps)
        for name, p in seen.after.items():
            mean = self.means.get(name)
            self.means[name] = p.clone() if mean is None or weight == 1.0 else (1 - weight) * mean + weight * p

    def clip(self, seen: Seen, key: bytes, count: float) -> Clipper:
        """The clipper of the next step, from the exact ``count`` of this one."""
        if not isinstance(seen.clip, Adaptive):
            return seen.clip
        index = len(seen.before)  # the first index that no tensor has
        z = float(drawn(self.plan, key, seen.step, index, 1, torch.float64)[0])
        return seen.clip.moved(count + float(seen.clip.count_noise or 0.0) * z)

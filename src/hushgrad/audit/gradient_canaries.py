r"""Gradient canaries: records whose gradient is known exactly, sent through the real path of a private run.

The model is x -> <x, u> + <x, v> and the loss of a record is minus that, so its gradient is (-x, -x) whatever the parameters
are: the worst case of the theorem, chosen by us. Canary j is c d_j with orthonormal directions d_j and c well above the clip norm,
so that clipping is exercised; after clipping it moves the sum by exactly the clip norm along (d_j, d_j) / sqrt 2. There are two
parameters, and one of them is tied (used by two layers), because a defect may concern one layer or tied weights only.

What each canary's neighbour is follows from the relation: a null record for add/remove and zero-out, the opposite canary for
replace-one. A fair coin per canary decides which of the two is in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hushgrad import _check
from hushgrad.clipping import Adaptive, Flat, PerLayer
from hushgrad.events import Relation
from hushgrad.train import Plan, make_private
from hushgrad.train.private import Private

Undo = Callable[[Tensor], Tensor]
"""An attacker's inverse of a linear denoiser: from released rows (steps, dimension) of one parameter to rows before it."""

_STRETCH = 5.0  # how far above the clip norm a canary is


@dataclass(frozen=True, kw_only=True, eq=False)
class Canaries:
    """m orthonormal directions and a coin for each; ``members[j]`` says on which side canary j is."""

    directions: Tensor
    members: np.ndarray

    @classmethod
    def dirac(cls, count: int, *, seed: int = 0) -> Canaries:
        """Unit vectors: canary j has its own coordinate of each parameter, and no other canary touches it.

        >>> Canaries.dirac(3).directions.tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        """
        return cls(directions=torch.eye(_check.positive_int(count=count)), members=_coins(count, seed))

    @classmethod
    def random(cls, count: int, *, seed: int = 0) -> Canaries:
        """A random rotation of the unit vectors: dense gradients, still orthogonal, so that canaries do not disturb each other."""
        rng = np.random.default_rng([seed, 1])
        gauss = rng.standard_normal((_check.positive_int(count=count), count))
        directions = torch.from_numpy(np.linalg.qr(gauss)[0].astype(np.float32))
        return cls(directions=directions, members=_coins(count, seed))

    def __len__(self) -> int:
        return len(self.members)

    def records(self, relation: Relation, norm: float) -> Tensor:
        """The records that are in the data: each canary, or its neighbour."""
        other = -1.0 if relation is Relation.REPLACE_ONE else 0.0
        sides = torch.from_numpy(np.where(self.members, 1.0, other).astype(np.float32))
        return norm * sides.unsqueeze(1) * self.directions


def _coins(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 0]).random(count) < 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Released:
    """What a run released, in the canaries' coordinates and in units of the clip norm.

    ``signal[t, j]``: the released sum of step t along canary j, over both parameters; a participation moves it by 1.
    ``contrast[t, j]``: the difference of the two parameters there, which no canary moves: noise alone.
    ``present[t, i]``: whether record i (canaries first) was dealt in step t. Known to the auditor only.
    """

    signal: np.ndarray
    contrast: np.ndarray
    present: np.ndarray


class _Numbers(Dataset[int]):
    """Records by number; what they are is looked up for a whole batch at once."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> int:
        return i


class _Model(nn.Module):
    """x -> <x/2, u> + <x/2, u> + <x, v>: the weight u is tied, so that its norm has cross terms."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.first, self.again, self.second = (nn.Linear(dimension, 1, bias=False) for _ in range(3))
        self.again.weight = self.first.weight
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        half = 0.5 * x
        out: Tensor = self.first(half) + self.again(half) + self.second(x)
        return out


def release(
    plan: Plan,
    canaries: Canaries,
    *,
    steps: int,
    records: int,
    seed: int | None,
    undo: Undo | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> Released:
    """Run the first ``steps`` steps of ``plan`` on the canaries and null records up to ``records``, and read what comes out.

    It is an ordinary run: ``make_private``, its loader, SGD with learning rate 1, whose parameters' moves are read. Averaging and
    projection of parameters, which are post-processing, are left out. With ``seed=None`` the key is fresh.
    """
    plan, _ = bare(plan)
    model = _Model(canaries.directions.shape[1])
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=seed)
    rows = _rows(private, canaries)
    options: dict[str, Any] = {"collate_fn": rows}
    if plan.unit == "user":
        options["groups"] = np.arange(records)
    moves, present = [], np.zeros((steps, records), dtype=bool)
    try:
        batches: Iterator[Any] = iter(private.loader(_Numbers(records), **options))
        for step in range(steps):
            batch = next(batches)
            numbers, x = batch
            before = [p.detach().clone() for p in model.parameters()]
            _train(private, x)
            present[step, numbers[: batch.examples - batch.padding].numpy()] = True
            moves.append([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
            on_step(step)
    finally:
        private.detach()
    return _released(plan, canaries, moves, present, undo)


def bare(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The part of ``plan`` that canaries can go through, with what its event says, and notes on what was left out or replaced."""
    notes, clip = [], plan.clip
    if isinstance(clip, PerLayer) and clip.shares:  # they name the layers of another model
        clip = PerLayer(clip.max_grad_norm)
        notes.append("per-layer clip norms were replaced by equal ones")
    if isinstance(clip, Adaptive):
        clip = Flat(clip.max_grad_norm)
        notes.append("adaptive clipping was audited at its first clip norm, without the count")
    if plan.average is not None or plan.projection is not None:
        notes.append("averaging and projection, which are post-processing, were left out")
    return replace(plan, average=None, projection=None, clip=clip), tuple(notes)


def _rows(private: Private, canaries: Canaries) -> Callable[[list[int]], list[Tensor]]:
    table = canaries.records(private.plan.relation, _STRETCH * private.plan.max_grad_norm)
    padded = torch.cat([table, torch.zeros(1, table.shape[1])])  # all null records are one row

    def collate(numbers: list[int]) -> list[Tensor]:
        chosen = torch.tensor(numbers)
        return [chosen, padded[chosen.clamp(max=len(table))]]

    return collate


def _train(private: Private, x: Tensor) -> None:
    def passes() -> float:
        private.optimizer.zero_grad()
        loss = -private.model(x).mean()
        loss.backward()
        return float(loss.detach())

    if private.plan.denoise is not None and private.plan.denoise.needs_closure:
        private.optimizer.step(passes)
    else:
        passes()
        private.optimizer.step()


def _released(plan: Plan, canaries: Canaries, moves: list[list[Tensor]], present: np.ndarray, undo: Undo | None) -> Released:
    unit = plan.batch_size / plan.max_grad_norm
    blocks = [torch.stack(block).double() * unit for block in zip(*moves, strict=True)]
    if undo is not None:
        blocks = [undo(block) for block in blocks]
    along = canaries.directions.double().T
    first, second = (((block @ along) / np.sqrt(2.0)).numpy() for block in blocks)
    return Released(signal=first + second, contrast=first - second, present=present)

"""Samples of the noise that a run releases, drawn through its own release code on empty batches, under keys of the audit.

Every row is also compared, number by number, with the row computed from the key. So a row that repeats or mixes rows of other steps, in
whatever way, is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor

from hushgrad.audit.bench import numbers, row_std, whole
from hushgrad.audit.checks import FALSE_ALARM, Check
from hushgrad.audit.noise_tests import Long, Runs, Wide, outside
from hushgrad.audit.recompute import drawn, reference_release
from hushgrad.clipping import Adaptive
from hushgrad.clipping.base import ClippedSum
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Relation
from hushgrad.noise import Independent
from hushgrad.release.core import Release
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.whole import Whole
from hushgrad.train import Plan

_BUDGET = 50_000_000  # numbers to draw for one sample
_LONG, _RUNS, _FEW = 400, 32, 4  # steps of the long sample, at most; runs, and steps of each
_LONGEST = 4000  # rows whose norm is tested
_COLUMNS, _MANY = 8192, 1_000_000  # columns that are kept of a row, numbers that are kept in all
_DRAWS = 20_000_000  # numbers of all draws that are kept to compute correlated rows from
_TOLERANCE = 1e-3  # of a row's standard deviation


@dataclass(frozen=True, kw_only=True, eq=False)
class Field:
    """The samples, and the checks of single rows: against the row from the key (``rows``), and by their norms (``steps``)."""

    wides: list[Wide]
    long: Long
    runs: Runs
    rows: Check
    steps: Check


@dataclass(frozen=True, kw_only=True)
class _Nobody:
    """A stand-in for a capture of an empty batch: its sums are zero and take the ordinary code path."""

    likes: dict[str, Tensor]
    scattered: frozenset[str] = field(default_factory=frozenset)

    def check(self) -> int:
        return 0

    def collect(self, clipper: Clipper, *, out: Mapping[str, Tensor], scale: float) -> ClippedSum:
        sums = {name: out[name] if name in out else torch.zeros_like(like) for name, like in self.likes.items()}
        none = torch.empty(0, dtype=torch.float64)
        return ClippedSum(sums, none, none, 0)


class Drawer:
    """Draws the noise of one run, row by row and in order, in units of the plan's noise, not whitened over the steps."""

    def __init__(self, plan: Plan, place: Whole, scattered: frozenset[str]) -> None:
        self._plan = replace(plan, denoise=None, average=None, projection=None)
        self.key = place.world.share_key(RunKey.make())
        self._release = Release(self._plan, place, self.key)
        likes = {name: place.like(name) for name in place.params}
        wide = {name: like.double() if plan.certified else like for name, like in likes.items()}
        self._nobody = _Nobody(likes=wide, scattered=scattered)
        self._place, self._taken = place, 0
        self.std = row_std(plan, plan.clip)
        self._unit = float(plan.batch_size) / self.std

    def row(self, step: int) -> dict[str, np.ndarray]:
        """Row ``step`` by tensor; for correlated noise the rows before it are drawn and discarded."""
        if self._taken < step and self._taken:
            self._skip(step)
        while self._taken < step:
            self._next()
        return self._next()

    def _skip(self, step: int) -> None:
        """Jump to ``step`` if the stream keeps no state between steps."""
        stream = self._release.stream
        state = stream.state_dict()
        if any(lane["state"] for lane in state["lanes"]):
            return
        stream.load_state_dict({**state, "lanes": [{**lane, "next": step} for lane in state["lanes"]]})
        self._taken = step

    def _next(self) -> dict[str, np.ndarray]:
        release, step = self._release, self._taken
        release.use_clip(self._plan.clip)  # keeps an adaptive clip norm fixed
        noised, _ = release.privatise(cast(Any, self._nobody), step, None)
        grads = release.finished(noised, None)
        self._taken += 1
        found = {name: whole(grad) for name, grad in grads.items()}
        rows = {name: self._smooth(row, found[name].dtype) * self._unit for name, row in numbers(found).items()}
        return {**rows, **self._count()}

    def _smooth(self, row: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        """A half-precision row with random numbers added within its rounding: otherwise every test would detect the grid of values."""
        if dtype not in (torch.float16, torch.bfloat16):
            return row
        spacing = np.ldexp(torch.finfo(dtype).eps, np.frexp(row)[1] - 1)
        rng = np.random.default_rng([int.from_bytes(self.key.secret[:8], "little"), self._taken])
        return np.asarray(row + (rng.random(row.shape) - 0.5) * spacing)

    def _count(self) -> dict[str, np.ndarray]:
        """The noise of an adaptive clip norm's count on an empty batch, as a tensor of one number."""
        before, after = self._plan.clip, self._release.clip
        if not isinstance(before, Adaptive):
            return {}
        moved = np.log(after.sensitivity(Relation.ADD_REMOVE) / before.max_grad_norm)
        count = (before.quantile - moved / before.learning_rate - 0.5) * before.batch_size
        return {"(adaptive count)": np.array([count / float(before.count_noise or 1.0)])}


def draw_field(plan: Plan, place: Whole, scattered: frozenset[str] = frozenset(), *, seed: int) -> Field:
    """The three samples of a run's noise; the steps and columns follow from ``seed``, the keys are fresh."""
    rng = np.random.default_rng([seed, 4])
    size = sum(whole(p).numel() for p in place.params.values())
    last = _last(plan, size)
    columns = _columns({name: row.size for name, row in Drawer(plan, place, scattered).row(0).items()}, rng)
    pairs = [(0, 1), (last - 1, last)] if last > 2 else [(0, min(1, last))]
    wides = [_wide(Drawer(plan, place, scattered), plan, pair) for pair in dict.fromkeys(pairs)]
    steps = _steps(min(_LONG, max(8, _MANY // min(size, _COLUMNS))), last, rng)
    few = tuple(range(min(_FEW, last + 1)))
    runs = [_whitened(plan, few, _taken(Drawer(plan, place, scattered), few, columns)).ravel() for _ in range(_RUNS)]
    drawer = Drawer(plan, place, scattered)
    rows = _taken(drawer, steps, columns)
    of = np.concatenate([np.full(len(kept), i) for i, kept in enumerate(columns.values())])
    long = Long(steps=steps, names=tuple(columns), of=of, white=_whitened(plan, steps, rows))
    return Field(
        wides=wides,
        long=long,
        runs=Runs(white=np.stack(runs)),
        rows=_rows_check(drawer, place, plan, long, columns, rows),
        steps=_steps_check(Drawer(plan, place, scattered), place, plan, min(last + 1, max(8, _BUDGET // max(1, size)), _LONGEST)),
    )


def _last(plan: Plan, size: int) -> int:
    """The last step to test: the run's last, unless too many earlier rows would have to be drawn for it."""
    if _is_independent(plan):
        return plan.steps - 1
    return int(min(plan.steps - 1, max(8, _BUDGET // size), 4000))


def _is_independent(plan: Plan) -> bool:
    return isinstance(plan.noise, Independent)


def _steps(count: int, last: int, rng: np.random.Generator) -> tuple[int, ...]:
    """The steps to test: half are the first ones, the others random pairs of neighbours, including the last pair."""
    first = set(range(min(last + 1, max(2, count // 2))))
    later = rng.integers(0, max(1, last), size=max(0, (count - len(first)) // 2))
    pairs = {int(t) + k for t in later for k in (0, 1)}
    return tuple(sorted(t for t in first | pairs | {last - 1, last} if 0 <= t <= last))


def _columns(sizes: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The columns to keep of each tensor: all, or a block at the beginning, at a random place and at the end."""
    share, kept = max(48, _COLUMNS // len(sizes)), {}
    for name, size in sizes.items():
        third = share // 3
        starts = {0, size - third, int(rng.integers(0, max(1, size - third)))}
        blocks = [np.arange(start, start + third) for start in sorted(starts)]
        kept[name] = np.arange(size) if size <= share else np.unique(np.concatenate(blocks))
    return kept


def _whitened(plan: Plan, steps: Sequence[int], rows: np.ndarray) -> np.ndarray:
    if _is_independent(plan):
        return rows
    noising = np.asarray(plan.noise.noising(max(steps) + 1), dtype=np.float64)[list(steps)]
    factor = np.linalg.cholesky(noising @ noising.T)
    return np.asarray(solve_triangular(factor, rows, lower=True))


def _taken(drawer: Drawer, steps: Sequence[int], columns: dict[str, np.ndarray]) -> np.ndarray:
    rows = []
    for step in steps:
        row = drawer.row(step)
        rows.append(np.concatenate([row[name][kept] for name, kept in columns.items()]))
    return np.stack(rows)


def _wide(drawer: Drawer, plan: Plan, steps: tuple[int, int]) -> Wide:
    pair = [drawer.row(step) for step in dict.fromkeys(steps)]
    rows = {name: np.stack([row[name] for row in pair]) for name in pair[0]}
    white = {name: _whitened(plan, steps[: len(pair)], both) for name, both in rows.items()}
    return Wide(steps=steps[: len(pair)], rows=white)


def _steps_check(drawer: Drawer, place: Whole, plan: Plan, count: int) -> Check:
    """Test the norms of the first ``count`` rows: the sum of squares is chi-squared."""
    sums, sizes = np.empty(count), 0
    for step in range(count):
        rows = drawer.row(step)
        row = np.concatenate([rows[name] for name in place.params])
        sums[step], sizes = float(row @ row) / plan.noise.row_std(step, steps=plan.steps) ** 2, row.size
    far = np.flatnonzero(outside(sums, np.full(count, sizes), FALSE_ALARM))
    seen = [f"each of the first {count} rows", *(f"step {t}: {np.sqrt(sums[t] / sizes):.3f}" for t in far[:3])]
    return Check(name="noise steps", passed=not len(far), seen=", ".join(seen))


# Row by row, from the key --------------------------------------------------------------------------------------------------


def _rows_check(drawer: Drawer, place: Whole, plan: Plan, long: Long, columns: dict[str, np.ndarray], rows: np.ndarray) -> Check:
    """Compare every row of the long sample with the row from the key, tensor by tensor."""
    worst, where, low = 0.0, "", 0
    for index, (name, kept) in enumerate(columns.items()):
        mine, low = rows[:, low : low + len(kept)], low + len(kept)
        if name not in place.params:  # an adaptive clip norm's count, which has its own draw
            must = np.stack([drawn(plan, drawer.key.secret, t, index, 1, torch.float64) for t in long.steps])
        else:
            must = _reference(drawer, plan, whole(place.params[name]), index, name, kept, long.steps)
        used = len(must[0])
        allowed = 1.0 if name not in place.params else 1.0 + torch.finfo(place.params[name].dtype).eps / _TOLERANCE
        for step, row, own in zip(long.steps, mine[:, :used], must, strict=True):
            error = float(np.linalg.norm(row - own)) / max(1.0, float(np.linalg.norm(own))) / allowed
            if not error <= worst:
                worst, where = (error if error == error else float("inf")), f", most in {name} of step {step}"
    seen = f"{len(rows)} rows are the key's up to {worst:.1e} of their own precision{where}"
    return Check(name="noise rows", passed=worst <= _TOLERANCE, seen=seen)


def _reference(
    drawer: Drawer, plan: Plan, like: Tensor, index: int, name: str, kept: np.ndarray, steps: Sequence[int]
) -> np.ndarray:
    """The expected rows of one tensor in these columns, in units of the plan's noise."""
    key, shape = drawer.key.secret, torch.zeros(like.shape, dtype=torch.float64)
    if plan.secure:
        found = [reference_release(plan, key, t, {name: shape.clone()}, {}, drawer.std, first=index)[name] for t in steps]
        return np.stack([row.reshape(-1).numpy()[kept] / drawer.std for row in found])
    if _is_independent(plan):
        return np.stack([drawn(plan, key, t, index, like.numel(), like.dtype)[kept] for t in steps])
    noising = np.asarray(plan.noise.noising(max(steps) + 1), dtype=np.float64)[list(steps)]
    draws = list(plan.noise.draws(max(steps) + 1))
    kept = kept[: max(1, _DRAWS // len(draws))]
    return noising @ np.stack([drawn(plan, key, t, index, like.numel(), like.dtype)[kept] for t in draws])

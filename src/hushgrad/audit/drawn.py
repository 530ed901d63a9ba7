"""Samples of the noise that a run releases: through its own release, on sums of zero, under keys of the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.linalg import solve_triangular

from hushgrad.audit.bench import Bench, numbers, row_std, whole
from hushgrad.audit.field import Long, Runs, Wide
from hushgrad.clipping import Adaptive
from hushgrad.events import Relation
from hushgrad.noise import Independent
from hushgrad.release.core import Release
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.whole import Whole
from hushgrad.train import Plan

__all__ = ["Drawer", "draw_field"]

_BUDGET = 50_000_000  # numbers to draw for one sample
_LONG, _RUNS, _FEW = 400, 32, 4  # steps of the long sample, at most; runs, and steps of each
_COLUMNS, _MANY = 8192, 1_000_000  # columns that are kept of a row, numbers that are kept in all


class Drawer:
    """The noise of one run, row by row and in order, in units of what the plan says (and not yet whitened over the steps)."""

    def __init__(self, plan: Plan, place: Whole) -> None:
        self._plan = replace(plan, denoise=None, average=None, projection=None)
        self._release = Release(self._plan, place, place.world.share_key(RunKey.make()))
        self._place, self._taken = place, 0
        self._unit = float(plan.batch_size) / row_std(plan, plan.clip)

    def row(self, step: int) -> dict[str, np.ndarray]:
        """Row ``step``, by tensor; those before it are drawn and dropped where the noise of a step needs them."""
        if self._taken < step and self._taken:
            self._skip(step)
        while self._taken < step:
            self._next()
        return self._next()

    def _skip(self, step: int) -> None:
        """Forward to ``step`` where nothing is kept between the steps."""
        stream = self._release.stream
        state = stream.state_dict()
        if any(lane["state"] for lane in state["lanes"]):
            return
        stream.load_state_dict({**state, "lanes": [{**lane, "next": step} for lane in state["lanes"]]})
        self._taken = step

    def _next(self) -> dict[str, np.ndarray]:
        release, step = self._release, self._taken
        release.use_clip(self._plan.clip)  # an adaptive one must not move
        sums = {name: torch.zeros_like(release._like(name)) for name in self._place.params}
        if self._plan.certified:
            sums = {name: total.double() for name, total in sums.items()}
        release.begin(step)
        grads = release.release(step, sums, torch.empty(0, dtype=torch.float64), None, begun={})
        self._taken += 1
        rows = {name: row * self._unit for name, row in numbers({k: whole(g) for k, g in grads.items()}).items()}
        return {**rows, **self._count()}

    def _count(self) -> dict[str, np.ndarray]:
        """The noise of an adaptive clip norm's count, of nobody: a tensor of one number."""
        before, after = self._plan.clip, self._release.clip
        if not isinstance(before, Adaptive):
            return {}
        moved = np.log(after.sensitivity(Relation.ADD_REMOVE) / before.max_grad_norm)
        count = (before.quantile - moved / before.learning_rate - 0.5) * before.batch_size
        return {"(adaptive count)": np.array([count / float(before.count_noise or 1.0)])}


def draw_field(bench: Bench, place: Whole, *, seed: int) -> tuple[list[Wide], Long, Runs]:
    """The three samples of a run's noise; the steps and columns follow from ``seed``, the keys are fresh."""
    plan, rng = bench.plan, np.random.default_rng([seed, 4])
    size = sum(whole(p).numel() for p in place.params.values())
    last = _last(plan, size)
    columns = _columns({name: row.size for name, row in Drawer(plan, place).row(0).items()}, rng)
    pairs = [(0, 1), (last - 1, last)] if last > 2 else [(0, min(1, last))]
    wides = [_wide(Drawer(plan, place), plan, pair) for pair in dict.fromkeys(pairs)]
    steps = _steps(min(_LONG, max(8, _MANY // min(size, _COLUMNS))), last, rng)
    few = tuple(range(min(_FEW, last + 1)))
    runs = [_white(Drawer(plan, place), plan, few, columns).ravel() for _ in range(_RUNS)]
    return wides, _long(Drawer(plan, place), plan, steps, columns), Runs(white=np.stack(runs))


def _last(plan: Plan, size: int) -> int:
    """The last step that is looked at: the run's own, unless all rows before it would have to be drawn and are too many."""
    if _is_independent(plan):
        return plan.steps - 1
    return int(min(plan.steps - 1, max(8, _BUDGET // size), 4000))


def _is_independent(plan: Plan) -> bool:
    return isinstance(plan.noise, Independent)


def _steps(count: int, last: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Half of them the first ones, the others in pairs of neighbours anywhere, the last pair among them."""
    first = set(range(min(last + 1, max(2, count // 2))))
    later = rng.integers(0, max(1, last), size=max(0, (count - len(first)) // 2))
    pairs = {int(t) + k for t in later for k in (0, 1)}
    return tuple(sorted(t for t in first | pairs | {last - 1, last} if 0 <= t <= last))


def _columns(sizes: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Of each tensor all columns, or a block at its beginning, one anywhere and one at its end."""
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


def _white(drawer: Drawer, plan: Plan, steps: Sequence[int], columns: dict[str, np.ndarray]) -> np.ndarray:
    rows = []
    for step in steps:
        row = drawer.row(step)
        rows.append(np.concatenate([row[name][kept] for name, kept in columns.items()]))
    return _whitened(plan, steps, np.stack(rows))


def _long(drawer: Drawer, plan: Plan, steps: tuple[int, ...], columns: dict[str, np.ndarray]) -> Long:
    of = np.concatenate([np.full(len(kept), i) for i, kept in enumerate(columns.values())])
    return Long(steps=steps, names=tuple(columns), of=of, white=_white(drawer, plan, steps, columns))


def _wide(drawer: Drawer, plan: Plan, steps: tuple[int, int]) -> Wide:
    pair = [drawer.row(step) for step in dict.fromkeys(steps)]
    rows = {name: np.stack([row[name] for row in pair]) for name in pair[0]}
    white = {name: _whitened(plan, steps[: len(pair)], both) for name, both in rows.items()}
    return Wide(steps=steps[: len(pair)], rows=white)

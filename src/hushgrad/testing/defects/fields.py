"""Defects of the noise that look right number by number: hidden reuse, shapes, drift, rare code paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hushgrad.noise import BLT, Banded, Source, Tree
from hushgrad.release.core import Noised, Release
from hushgrad.release.keys import RunKey
from hushgrad.testing.defects.base import defect, patched, replaced, wrong
from hushgrad.testing.defects.noise import AMPLITUDE, COVARIANCE, NORMAL, ONCE, OWN, Rows, changed, flat, row_of, scaled

_EVENT = "the event is that of the mechanism"


def _shuffled(row: Tensor) -> Tensor:
    return row[torch.randperm(len(row), generator=torch.Generator().manual_seed(7))]


@changed("a row in mid-run is an earlier one in another order", law=ONCE)
def _(release: Release, step: int, noise: Rows) -> Rows:
    again = row_of(release, step, noise, 21 if step == 33 else step)
    return flat(again, _shuffled) if step == 33 else again


@changed("a row in mid-run is mixed with an earlier one in another order", law=ONCE)
def _(release: Release, step: int, noise: Rows) -> Rows:
    if not 20 <= step < 44:
        return row_of(release, step, noise, step)
    before = flat(row_of(release, step, noise, step - 1), _shuffled)
    return {name: 0.8 * row + 0.6 * before[name] for name, row in noise.items()}


@changed("every second row of mid-run is minus the one before", law=ONCE)
def _(release: Release, step: int, noise: Rows) -> Rows:
    again = row_of(release, step, noise, step - step % 2 if 20 <= step < 44 else step)
    return {name: -row for name, row in again.items()} if step % 2 and 20 <= step < 44 else again


@changed("one sign for each tensor", law=NORMAL)
def _(release: Release, step: int, noise: Rows) -> Rows:
    return {name: row.abs() * (1 - 2 * (i % 2)) for i, (name, row) in enumerate(noise.items())}


@changed("noise of rank one", law=OWN)
def _(release: Release, step: int, noise: Rows) -> Rows:
    return {n: torch.outer(row[:, 0], row[0]) / release._scale if row.dim() == 2 else row for n, row in noise.items()}


scaled("noise that fades to nine tenths", lambda step, name, row: 1 - 0.1 * step / 64, law=AMPLITUDE)
scaled("no noise in tensors of three numbers", lambda step, name, row: float(row.numel() != 3), law=OWN)


@changed("outliers of the noise are brought back to four", law=NORMAL, bed="broad")
def _(release: Release, step: int, noise: Rows) -> Rows:
    return {name: row.clamp(-3.5 * release._scale, 3.5 * release._scale) for name, row in noise.items()}


@wrong(Release, "noised", "noise halved in large batches", law=AMPLITUDE)
def _(noised: Any, self: Release, step: int, sums: Rows, norms: Tensor, *, begun: Rows) -> Noised:
    kept = self._scale
    if len(norms) > 14:
        self._scale = kept / 2
    try:
        return noised(self, step, sums, norms, begun=begun)  # type: ignore[no-any-return]
    finally:
        self._scale = kept


@defect("a table's noise of step 9 again in step 30", law=ONCE, bed="table")
def _() -> AbstractContextManager[None]:
    kept = WeakKeyDictionary[Release, Rows]()

    def again(fresh: Any, self: Release, step: int, names: Any) -> Rows:
        rows: Rows = fresh(self, step, names)
        if step == 9:
            kept[self] = {name: row.clone() for name, row in rows.items()}
        return {name: kept[self][name].clone() for name in rows} if step == 30 and self in kept else rows

    return replaced(Release, "_fresh", again)


@defect("a resumed run begins with the first row again", law=ONCE)
@contextmanager
def _() -> Iterator[None]:
    first = WeakKeyDictionary[Source, int]()

    def resumed(load: Any, self: Release, state: Any, steps: int) -> None:
        load(self, state, steps)
        first[self.source] = steps

    def early(draw: Any, self: Source, step: int, pieces: Any, scale: float, **options: bool) -> None:
        draw(self, step - first.get(self, 0), pieces, scale, **options)

    with replaced(Release, "load_noise", resumed), replaced(Source, "draw", early):
        yield


@wrong(Release, "load_noise", "saved buffers of correlated noise are loaded as zeros", law=COVARIANCE, bed="correlated")
def _(load: Any, self: Release, state: Any, steps: int) -> None:
    load(self, None if state is None else zeroed(state), steps)


def zeroed(state: Any) -> Any:
    """A saved state with all numbers set to 0."""
    if isinstance(state, Tensor):
        return torch.zeros_like(state) if state.is_floating_point() else state
    if isinstance(state, dict):
        return {name: zeroed(value) for name, value in state.items()}
    return [zeroed(value) for value in state] if isinstance(state, (list, tuple)) else state


@defect("batches that do not depend on the key", law="who takes part is secret")
def _() -> AbstractContextManager[None]:
    return patched(RunKey, "sampling", property(lambda self: bytes(32)))


def _half(sensitivity: Any, self: Any, **run: Any) -> float:
    return 0.5 * sensitivity(self, **run)  # type: ignore[no-any-return]


wrong(Banded, "sensitivity", "a banded mechanism's sensitivity halved", law=_EVENT, bed="correlated")(_half)
wrong(BLT, "sensitivity", "a BLT's sensitivity halved", law=_EVENT, bed="blt")(_half)
wrong(Tree, "sensitivity", "a tree's sensitivity halved", law=_EVENT, bed="tree")(_half)

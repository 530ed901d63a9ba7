"""Defects of the noise that look right number by number: reuse in disguise, shapes, drift, ways that few runs take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hushgrad.noise import BLT, Banded, Source, Tree
from hushgrad.release.core import Noised, Release
from hushgrad.release.keys import RunKey
from hushgrad.testing.defects.base import defect, patched
from hushgrad.testing.defects.noise import AMPLITUDE, ONCE, OWN, Rows, changed, flat, row_of, scaled

_COVARIANCE = "the rows have the covariance that is accounted"


def _shuffled(row: Tensor) -> Tensor:
    return row[torch.randperm(len(row), generator=torch.Generator().manual_seed(7))]


@defect("a row in mid-run is an earlier one in another order", law=ONCE)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        again = row_of(release, step, noise, 21 if step == 33 else step)
        return flat(again, _shuffled) if step == 33 else again

    with changed(change):
        yield


@defect("a row in mid-run is mixed with an earlier one in another order", law=ONCE)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        if not 20 <= step < 44:
            return row_of(release, step, noise, step)
        before = flat(row_of(release, step, noise, step - 1), _shuffled)
        return {name: 0.8 * row + 0.6 * before[name] for name, row in noise.items()}

    with changed(change):
        yield


@defect("every second row of mid-run is minus the one before", law=ONCE)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        again = row_of(release, step, noise, step - step % 2 if 20 <= step < 44 else step)
        return {name: -row for name, row in again.items()} if step % 2 and 20 <= step < 44 else again

    with changed(change):
        yield


@defect("one sign for each tensor", law="the noise is normal")
def _() -> Iterator[None]:
    with changed(
        lambda release, step, noise: {name: row.abs() * (1 - 2 * (i % 2)) for i, (name, row) in enumerate(noise.items())}
    ):
        yield


@defect("noise of rank one", law=OWN)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        made = {}
        for name, row in noise.items():
            made[name] = torch.outer(row[:, 0], row[0]) / release._scale if row.dim() == 2 else row
        return made

    with changed(change):
        yield


@defect("noise that fades to nine tenths", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 1 - 0.1 * step / 64):
        yield


@defect("no noise in tensors of three numbers", law=OWN)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.0 if row.numel() == 3 else 1.0):
        yield


@defect("outliers of the noise are brought back to four", law="the noise is normal", bed="broad")
def _() -> Iterator[None]:
    with changed(
        lambda release, step, noise: {k: row.clamp(-3.5 * release._scale, 3.5 * release._scale) for k, row in noise.items()}
    ):
        yield


@defect("noise halved in large batches", law=AMPLITUDE)
def _() -> Iterator[None]:
    noised = Release.noised

    def wrong(self: Release, step: int, sums: Rows, norms: Tensor, *, begun: Rows) -> Noised:
        kept = self._scale
        if len(norms) > 14:
            self._scale = kept / 2
        try:
            return noised(self, step, sums, norms, begun=begun)
        finally:
            self._scale = kept

    with patched(Release, "noised", wrong):
        yield


@defect("a table's noise of step 9 again in step 30", law=ONCE, bed="table")
def _() -> Iterator[None]:
    fresh, kept = Release._fresh, WeakKeyDictionary[Release, Rows]()

    def wrong(self: Release, step: int, names: Any) -> Rows:
        rows = fresh(self, step, names)
        if step == 9:
            kept[self] = {name: row.clone() for name, row in rows.items()}
        return {name: kept[self][name].clone() for name in rows} if step == 30 and self in kept else rows

    with patched(Release, "_fresh", wrong):
        yield


@defect("a resumed run begins with the first row again", law=ONCE)
def _() -> Iterator[None]:
    draw, load, first = Source.draw, Release.load_noise, WeakKeyDictionary[Source, int]()

    def resumed(self: Release, state: Any, steps: int) -> None:
        load(self, state, steps)
        first[self.source] = steps

    def wrong(self: Source, step: int, pieces: Any, scale: float, *, fresh: bool) -> None:
        draw(self, step - first.get(self, 0), pieces, scale, fresh=fresh)

    with patched(Release, "load_noise", resumed), patched(Source, "draw", wrong):
        yield


@defect("saved buffers of correlated noise are loaded as zeros", law=_COVARIANCE, bed="correlated")
def _() -> Iterator[None]:
    load = Release.load_noise

    def wrong(self: Release, state: Any, steps: int) -> None:
        load(self, None if state is None else zeroed(state), steps)

    with patched(Release, "load_noise", wrong):
        yield


def zeroed(state: Any) -> Any:
    """A saved state whose numbers are 0."""
    if isinstance(state, Tensor):
        return torch.zeros_like(state) if state.is_floating_point() else state
    if isinstance(state, dict):
        return {name: zeroed(value) for name, value in state.items()}
    return [zeroed(value) for value in state] if isinstance(state, (list, tuple)) else state


@defect("batches that do not depend on the key", law="who takes part is secret")
def _() -> Iterator[None]:
    with patched(RunKey, "sampling", property(lambda self: bytes(32))):
        yield


def _half(kind: Any) -> Any:
    own = kind.sensitivity
    return lambda self, *, steps, participation: 0.5 * own(self, steps=steps, participation=participation)


@defect("a banded mechanism's sensitivity halved", law="the event is that of the mechanism", bed="correlated")
def _() -> Iterator[None]:
    with patched(Banded, "sensitivity", _half(Banded)):
        yield


@defect("a BLT's sensitivity halved", law="the event is that of the mechanism", bed="blt")
def _() -> Iterator[None]:
    with patched(BLT, "sensitivity", _half(BLT)):
        yield


@defect("a tree's sensitivity halved", law="the event is that of the mechanism", bed="tree")
def _() -> Iterator[None]:
    with patched(Tree, "sensitivity", _half(Tree)):
        yield

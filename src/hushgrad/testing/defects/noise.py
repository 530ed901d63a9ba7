"""Defects of the noise: too little, missing somewhere, used twice, of the wrong law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hushgrad.noise import Banded, Source
from hushgrad.noise.streams import IndependentStream
from hushgrad.release.core import Release
from hushgrad.release.keys import RunKey
from hushgrad.testing.defects.base import defect, patched

Rows = dict[str, Tensor]
OWN = "every released number has noise of its own"
ONCE = "a row of noise is released once"
AMPLITUDE = "the noise has the standard deviation that is accounted"


def changed(change: Callable[[Release, int, Rows], Rows]) -> AbstractContextManager[None]:
    """Every row that is added is what ``change`` makes of it."""
    add = Release._add

    def wrong(self: Release, step: int, buffers: Rows) -> None:
        noise = {name: torch.zeros_like(total) for name, total in buffers.items()}
        add(self, step, noise)
        for name, row in change(self, step, noise).items():
            buffers[name].add_(row)

    return patched(Release, "_add", wrong)


def scaled(factor: Callable[[int, str, Tensor], float]) -> AbstractContextManager[None]:
    """Every row is multiplied by ``factor`` of its step and tensor."""
    return changed(lambda release, step, noise: {name: row * factor(step, name, row) for name, row in noise.items()})


_kept: WeakKeyDictionary[Release, dict[int, Rows]] = WeakKeyDictionary()


def row_of(release: Release, step: int, noise: Rows, source: int) -> Rows:
    """The row of an earlier step again."""
    rows = _kept.setdefault(release, {})
    rows[step] = {name: row.clone() for name, row in noise.items()}
    return {name: row.clone() for name, row in rows.get(source, noise).items()}


def flat(noise: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """The flat rows, changed, in their shapes."""
    return {name: change(row.flatten())[: row.numel()].view_as(row) for name, row in noise.items()}


@defect("noise halved", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.5):
        yield


@defect("noise a twentieth too small", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.95):
        yield


@defect("noise two per cent too small", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.98):
        yield


@defect("noise divided by the batch size", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 1 / 12):
        yield


@defect("noise without its clip norm", law="noise is the multiplier times the clip norm")
def _() -> Iterator[None]:
    use = Release.use_clip

    def wrong(self: Release, clip: Any) -> None:
        use(self, clip)
        self._scale /= self.clip_norm

    with patched(Release, "use_clip", wrong):
        yield


@defect("every process adds the whole row", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 2**0.5):
        yield


@defect("noise of one tensor halved", law=AMPLITUDE)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.5 if name == "3.weight" else 1.0):
        yield


@defect("no noise in biases", law=OWN)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.0 if name.endswith("bias") else 1.0):
        yield


@defect("no noise in tensors of more than 4096 numbers", law=OWN)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: 0.0 if row.numel() > 4096 else 1.0):
        yield


@defect("no noise after step 50", law=OWN)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: float(step < 50)):
        yield


@defect("no noise in one step of hundreds", law=OWN, bed="rare")
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: float(step != 311)):
        yield


@defect("no noise in every tenth step", law=OWN)
def _() -> Iterator[None]:
    with scaled(lambda step, name, row: float(step % 10 != 9)):
        yield


@defect("one number in a thousand has no noise", law=OWN)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        for row in noise.values():
            row.view(-1)[::1000] = 0
        return noise

    with changed(change):
        yield


@defect("two steps share a row", law=ONCE)
def _() -> Iterator[None]:
    with changed(lambda release, step, noise: row_of(release, step, noise, step - step % 2)):
        yield


@defect("the row of step 3 again in step 40", law=ONCE)
def _() -> Iterator[None]:
    with changed(lambda release, step, noise: row_of(release, step, noise, 3 if step == 40 else step)):
        yield


@defect("the same row in every step", law=ONCE)
def _() -> Iterator[None]:
    with changed(lambda release, step, noise: row_of(release, step, noise, 0)):
        yield


@defect("every second row is the one before, one place on", law=ONCE)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        again = row_of(release, step, noise, step - step % 2)
        return flat(again, lambda row: row.roll(1)) if step % 2 else again

    with changed(change):
        yield


@defect("the counter of a step overlaps the last one's", law=ONCE)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        return flat(row_of(release, step, noise, 0), lambda row: row.roll(step))

    with changed(change):
        yield


@defect("each number serves two coordinates", law=OWN)
def _() -> Iterator[None]:
    with changed(lambda release, step, noise: flat(noise, lambda row: row[::2].repeat_interleave(2) if len(row) > 1 else row)):
        yield


@defect("256 numbers over and over", law=OWN)
def _() -> Iterator[None]:
    with changed(
        lambda release, step, noise: flat(noise, lambda row: row[:256].repeat(-(-len(row) // 256)) if len(row) > 256 else row)
    ):
        yield


@defect("every shard begins with the first one's noise", law=OWN)
def _() -> Iterator[None]:
    with changed(lambda release, step, noise: flat(noise, lambda row: row[: -(-len(row) // 2)].repeat(2))):
        yield


@defect("the second tensor has the first one's noise, one place on", law=OWN)
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        first, second = list(noise)[:2]
        size = min(noise[first].numel(), noise[second].numel())
        noise[second].view(-1)[:size] = noise[first].flatten().roll(1)[:size]
        return noise

    with changed(change):
        yield


@defect("uniform noise", law="the noise is normal")
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        std = release._scale
        return {name: (torch.special.ndtr(row / std) - 0.5) * 12**0.5 * std for name, row in noise.items()}

    with changed(change):
        yield


@defect("noise without its tails", law="the noise is normal")
def _() -> Iterator[None]:
    with changed(
        lambda release, step, noise: {k: row.clamp(-2.5 * release._scale, 2.5 * release._scale) for k, row in noise.items()}
    ):
        yield


@defect("noise on a coarse grid", law="the noise is normal")
def _() -> Iterator[None]:
    def change(release: Release, step: int, noise: Rows) -> Rows:
        grid = release._scale / 8
        return {name: torch.round(row / grid) * grid for name, row in noise.items()}

    with changed(change):
        yield


@defect("one key for all runs", law="a key serves one run")
def _() -> Iterator[None]:
    with patched(RunKey, "make", classmethod(lambda cls, key=None, seed=None: cls(bytes(32)))):
        yield


@defect("the source ignores the step", law=OWN)
def _() -> Iterator[None]:
    draw = Source.draw
    with patched(Source, "draw", lambda self, step, pieces, scale, *, fresh: draw(self, 0, pieces, scale, fresh=fresh)):
        yield


@defect("the source ignores which tensor it is", law=OWN)
def _() -> Iterator[None]:
    draw = Source.draw

    def wrong(self: Source, step: int, pieces: Any, scale: float, *, fresh: bool) -> None:
        draw(self, step, [piece._replace(which=0) for piece in pieces], scale, fresh=fresh)

    with patched(Source, "draw", wrong):
        yield


@defect("the source's numbers are two per cent too small", law=AMPLITUDE)
def _() -> Iterator[None]:
    draw = Source.draw
    with patched(Source, "draw", lambda self, step, pieces, scale, *, fresh: draw(self, step, pieces, 0.98 * scale, fresh=fresh)):
        yield


@defect("noise of tables missing", law=OWN, bed="table")
def _() -> Iterator[None]:
    fresh = Release._fresh
    with patched(
        Release, "_fresh", lambda self, step, names: {k: torch.zeros_like(row) for k, row in fresh(self, step, names).items()}
    ):
        yield


@defect(
    "independent noise at the price of correlated noise", law="the rows have the covariance that is accounted", bed="correlated"
)
def _() -> Iterator[None]:
    with patched(Banded, "stream", lambda self, source, *, steps=None: IndependentStream(source, steps=steps)):
        yield


@defect("correlated rows one step late", law="the rows have the covariance that is accounted", bed="correlated")
def _() -> Iterator[None]:
    with changed(lambda release, step, noise: row_of(release, step, noise, max(0, step - 1))):
        yield

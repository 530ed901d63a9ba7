"""Defects of the noise: too little, missing somewhere, used twice, of the wrong distribution."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hushgrad.noise import Banded, Source
from hushgrad.noise.streams import IndependentStream
from hushgrad.release.core import Release
from hushgrad.release.keys import RunKey
from hushgrad.testing.defects.base import Plant, defect, patched, replaced, wrong

Rows = dict[str, Tensor]
Change = Callable[[Release, int, Rows], Rows]
OWN = "every released number has noise of its own"
ONCE = "a row of noise is released once"
AMPLITUDE = "the noise has the standard deviation that is accounted"
NORMAL = "the noise is normal"
COVARIANCE = "the rows have the covariance that is accounted"


def changed(name: str, *, law: str, bed: str = "layers") -> Callable[[Change], Plant]:
    """Register a function that computes the added row from the right one."""
    return lambda change: defect(name, law=law, bed=bed)(lambda: _changed(change))


def scaled(name: str, factor: Callable[[int, str, Tensor], float], *, law: str, bed: str = "layers") -> None:
    """Register rows that are multiplied by ``factor`` of their step and tensor."""

    @changed(name, law=law, bed=bed)
    def _(release: Release, step: int, noise: Rows) -> Rows:
        return {name: row * factor(step, name, row) for name, row in noise.items()}


def _changed(change: Change) -> AbstractContextManager[None]:
    def add(right: Any, self: Release, step: int, buffers: Rows) -> None:
        noise = {name: torch.zeros_like(total) for name, total in buffers.items()}
        right(self, step, noise)
        for name, row in change(self, step, noise).items():
            buffers[name].add_(row)

    return replaced(Release, "_add", add)


_kept: WeakKeyDictionary[Release, dict[int, Rows]] = WeakKeyDictionary()


def row_of(release: Release, step: int, noise: Rows, source: int) -> Rows:
    """The row of an earlier step again."""
    rows = _kept.setdefault(release, {})
    rows[step] = {name: row.clone() for name, row in noise.items()}
    return {name: row.clone() for name, row in rows.get(source, noise).items()}


def flat(noise: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """The flat rows, changed, in their shapes."""
    return {name: change(row.flatten())[: row.numel()].view_as(row) for name, row in noise.items()}


def again(name: str, source: Callable[[int], int], *, law: str = ONCE, bed: str = "layers") -> None:
    """Register rows that are those of step ``source`` of their own step."""
    changed(name, law=law, bed=bed)(lambda release, step, noise: row_of(release, step, noise, source(step)))


def rearranged(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Register rows in which one number serves several coordinates."""
    changed(name, law=OWN)(lambda release, step, noise: flat(noise, change))


# Too little, or none somewhere ------------------------------------------------------------------------------------------------

scaled("noise halved", lambda step, name, row: 0.5, law=AMPLITUDE)
scaled("noise a twentieth too small", lambda step, name, row: 0.95, law=AMPLITUDE)
scaled("noise two per cent too small", lambda step, name, row: 0.98, law=AMPLITUDE)
scaled("noise divided by the batch size", lambda step, name, row: 1 / 12, law=AMPLITUDE)


@wrong(Release, "use_clip", "noise without its clip norm", law="noise is the multiplier times the clip norm")
def _(use: Any, self: Release, clip: Any) -> None:
    use(self, clip)
    self._scale /= self.clip_norm


scaled("every process adds the whole row", lambda step, name, row: 2**0.5, law=AMPLITUDE)
scaled("noise of one tensor halved", lambda step, name, row: 0.5 if name == "3.weight" else 1.0, law=AMPLITUDE)
scaled("no noise in biases", lambda step, name, row: float(not name.endswith("bias")), law=OWN)
scaled("no noise in tensors of more than 4096 numbers", lambda step, name, row: float(row.numel() <= 4096), law=OWN)
scaled("no noise after step 50", lambda step, name, row: float(step < 50), law=OWN)
scaled("no noise in one step of hundreds", lambda step, name, row: float(step != 311), law=OWN, bed="rare")
scaled("no noise in every tenth step", lambda step, name, row: float(step % 10 != 9), law=OWN)


@changed("one number in a thousand has no noise", law=OWN)
def _(release: Release, step: int, noise: Rows) -> Rows:
    for row in noise.values():
        row.view(-1)[::1000] = 0
    return noise


# Used twice -------------------------------------------------------------------------------------------------------------------


again("two steps share a row", lambda step: step - step % 2)
again("the row of step 3 again in step 40", lambda step: 3 if step == 40 else step)
again("the same row in every step", lambda step: 0)


@changed("every second row is the one before, one place on", law=ONCE)
def _(release: Release, step: int, noise: Rows) -> Rows:
    again = row_of(release, step, noise, step - step % 2)
    return flat(again, lambda row: row.roll(1)) if step % 2 else again


@changed("the counter of a step overlaps the last one's", law=ONCE)
def _(release: Release, step: int, noise: Rows) -> Rows:
    return flat(row_of(release, step, noise, 0), lambda row: row.roll(step))


rearranged("each number serves two coordinates", lambda row: row[::2].repeat_interleave(2) if len(row) > 1 else row)
rearranged("256 numbers over and over", lambda row: row[:256].repeat(-(-len(row) // 256)) if len(row) > 256 else row)
rearranged("every shard begins with the first one's noise", lambda row: row[: -(-len(row) // 2)].repeat(2))


@changed("the second tensor has the first one's noise, one place on", law=OWN)
def _(release: Release, step: int, noise: Rows) -> Rows:
    first, second = list(noise)[:2]
    size = min(noise[first].numel(), noise[second].numel())
    noise[second].view(-1)[:size] = noise[first].flatten().roll(1)[:size]
    return noise


# Of the wrong law -------------------------------------------------------------------------------------------------------------


@changed("uniform noise", law=NORMAL)
def _(release: Release, step: int, noise: Rows) -> Rows:
    std = release._scale
    return {name: (torch.special.ndtr(row / std) - 0.5) * 12**0.5 * std for name, row in noise.items()}


@changed("noise without its tails", law=NORMAL)
def _(release: Release, step: int, noise: Rows) -> Rows:
    return {name: row.clamp(-2.5 * release._scale, 2.5 * release._scale) for name, row in noise.items()}


@changed("noise on a coarse grid", law=NORMAL)
def _(release: Release, step: int, noise: Rows) -> Rows:
    grid = release._scale / 8
    return {name: torch.round(row / grid) * grid for name, row in noise.items()}


# Keys, the source and correlated rows -----------------------------------------------------------------------------------------


@defect("one key for all runs", law="a key serves one run")
def _() -> AbstractContextManager[None]:
    return patched(RunKey, "make", classmethod(lambda cls, key=None, seed=None: cls(bytes(32))))


@wrong(Source, "draw", "the source ignores the step", law=OWN)
def _(draw: Any, self: Source, step: int, pieces: Any, scale: float, **options: bool) -> None:
    draw(self, 0, pieces, scale, **options)


@wrong(Source, "draw", "the source ignores which tensor it is", law=OWN)
def _(draw: Any, self: Source, step: int, pieces: Any, scale: float, **options: bool) -> None:
    draw(self, step, [piece._replace(which=0) for piece in pieces], scale, **options)


@wrong(Source, "draw", "the source's numbers are two per cent too small", law=AMPLITUDE)
def _(draw: Any, self: Source, step: int, pieces: Any, scale: float, **options: bool) -> None:
    draw(self, step, pieces, 0.98 * scale, **options)


@wrong(Release, "_fresh", "noise of tables missing", law=OWN, bed="table")
def _(fresh: Any, self: Release, step: int, names: Any) -> Rows:
    return {name: torch.zeros_like(row) for name, row in fresh(self, step, names).items()}


@wrong(Banded, "stream", "independent noise at the price of correlated noise", law=COVARIANCE, bed="correlated")
def _(stream: Any, self: Banded, source: Source, *, steps: int | None = None) -> IndependentStream:
    return IndependentStream(source, steps=steps)


again("correlated rows one step late", lambda step: max(0, step - 1), law=COVARIANCE, bed="correlated")

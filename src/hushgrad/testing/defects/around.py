"""Defects before and after the release: who is fetched, parts of batches, denoisers, averages, optimizers, tables, servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad.clipping import Adaptive, Capture
from hushgrad.clipping.rules.linear import Linear
from hushgrad.release import passes
from hushgrad.release.core import Release
from hushgrad.release.lazy import LazyTable, LazyTables
from hushgrad.release.placement.whole import Whole
from hushgrad.sampling import Draws, Poisson
from hushgrad.sampling.dealing import _Hands
from hushgrad.sampling.poisson import poisson_subset
from hushgrad.sampling.units import Units
from hushgrad.testing.defects.base import defect, patched
from hushgrad.train.after.averaged import Averaged
from hushgrad.train.private import Private

_RATE = "every record takes part independently with the accounted rate"
_NORM = "no record moves the clipped sum by more than the clip norm"
_USER = "a user is clipped as one"
_COVERED = "whatever is released has noise"


# Who is fetched ------------------------------------------------------------------------------------------------------------


@defect("a rate that grows by a tenth", law=_RATE, bed="rare")
def _() -> Iterator[None]:
    def deal(self: Poisson, n: int, draws: Draws) -> Any:
        return lambda step: poisson_subset(n, self.rate * (1 + 0.2 * step / self.steps), draws.at(step))

    with patched(Poisson, "dealer", deal):
        yield


@defect("one record has twice the rate", law=_RATE)
def _() -> Iterator[None]:
    def deal(self: Poisson, n: int, draws: Draws) -> Any:
        def one(step: int) -> np.ndarray:
            again = poisson_subset(n, self.rate, draws.at(step + 10**6))
            return np.union1d(poisson_subset(n, self.rate, draws.at(step)), again[again == 7])

        return one

    with patched(Poisson, "dealer", deal):
        yield


@defect("every record of a batch twice", law=_NORM)
def _() -> Iterator[None]:
    def deal(self: Poisson, n: int, draws: Draws) -> Any:
        return lambda step: np.repeat(poisson_subset(n, self.rate, draws.at(step)), 2)

    with patched(Poisson, "dealer", deal):
        yield


@defect("a user's examples are split into two users", law=_USER, bed="users")
def _() -> Iterator[None]:
    expand = Units.expand

    def wrong(self: Units, chosen: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        examples, unit = expand(self, chosen, **options)
        return examples, 2 * unit + (np.arange(len(unit)) % 2)

    with patched(Units, "expand", wrong):
        yield


@defect("examples of other users are fetched", law=_USER, bed="users")
def _() -> Iterator[None]:
    expand = Units.expand

    def wrong(self: Units, chosen: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        examples, unit = expand(self, chosen, **options)
        return np.arange(len(examples), dtype=np.int64), unit

    with patched(Units, "expand", wrong):
        yield


# Sums ----------------------------------------------------------------------------------------------------------------------


@defect("norms of adapters are left out", law="an example is clipped by the norm of its own whole gradient", bed="adapter")
def _() -> Iterator[None]:
    measure = Linear.sq_norms

    def wrong(self: Linear, record: Any) -> Mapping[str, Tensor]:
        narrow = 2 in (record.x.shape[-1], record.g.shape[-1])
        return {name: value * 0 if narrow else value for name, value in measure(self, record).items()}

    with patched(Linear, "sq_norms", wrong):
        yield


@defect("parts of a batch are clipped with twice the norm", law=_NORM, bed="in parts")
def _() -> Iterator[None]:
    fold = Capture.fold_with

    def wrong(self: Capture, clipper: Any) -> None:
        fold(self, None if clipper is None else type(clipper)(2 * clipper.max_grad_norm))

    with patched(Capture, "fold_with", wrong):
        yield


@defect("a secure sum is added twice", law=_NORM, bed="secure")
def _() -> Iterator[None]:
    rounded = Release._rounded

    def wrong(self: Release, step: int, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return rounded(self, step, {name: 2 * total for name, total in sums.items()})

    with patched(Release, "_rounded", wrong):
        yield


@defect("a filter's second probe has the wrong sign", law="the query is what the denoiser asked", bed="filtered")
def _() -> Iterator[None]:
    probe = passes._at

    def wrong(point: Any, *rest: Any) -> Any:
        return probe(point._replace(coefficient=-point.coefficient) if point.shift is None else point, *rest)

    with patched(passes, "_at", wrong):
        yield


@defect("a query is asked at the wrong point", law="the query is what the denoiser asked", bed="corrected")
def _() -> Iterator[None]:
    probe = passes._at
    with patched(passes, "_at", lambda point, *rest: probe(point._replace(shift=None), *rest)):
        yield


# After the release ---------------------------------------------------------------------------------------------------------

_bare: dict[int, dict[str, Tensor]] = {}


@contextmanager
def _remembered() -> Iterator[None]:
    """The bare sums of a step are kept until its end."""
    noised = Release._noised

    def wrong(self: Release, step: int, sums: dict[str, Tensor], begun: dict[str, Tensor]) -> dict[str, Tensor]:
        _bare[0] = {name: total.clone() for name, total in sums.items()}
        return noised(self, step, sums, begun)

    with patched(Release, "_noised", wrong):
        yield


@defect("a denoiser sees the bare gradient", law=_COVERED, bed="smoothed")
def _() -> Iterator[None]:
    denoised = Whole.denoised

    def wrong(self: Whole, denoiser: Any, grads: dict[str, Tensor], info: Any, state: dict[str, Any]) -> dict[str, Tensor]:
        return {name: grad + _bare[0][name] for name, grad in denoised(self, denoiser, grads, info, state).items()}

    with _remembered(), patched(Whole, "denoised", wrong):
        yield


@defect("a denoiser remembers the bare gradient", law=_COVERED, bed="smoothed")
def _() -> Iterator[None]:
    denoised = Whole.denoised

    def wrong(self: Whole, denoiser: Any, grads: dict[str, Tensor], info: Any, state: dict[str, Any]) -> dict[str, Tensor]:
        made = denoised(self, denoiser, grads, info, state)
        state.update({f"kept.{name}": bare for name, bare in _bare[0].items()})
        return made

    with _remembered(), patched(Whole, "denoised", wrong):
        yield


@defect("the average takes in a bare step", law=_COVERED, bed="averaged")
def _() -> Iterator[None]:
    update = Averaged.update

    def wrong(self: Averaged, step: int) -> None:
        update(self, step)
        for name, mean in self._means.items():
            mean.sub_(_bare[0][name], alpha=0.1)

    with _remembered(), patched(Averaged, "update", wrong):
        yield


@defect("the momentum takes in the bare gradient", law=_COVERED)
def _() -> Iterator[None]:
    after = Private._after_step

    def wrong(self: Private, optimizer: Any, args: Any, kwargs: Any) -> None:
        after(self, optimizer, args, kwargs)
        for name, p in self._params.items():
            optimizer.state[p]["momentum_buffer"].add_(_bare[0][name])

    with _remembered(), patched(Private, "_after_step", wrong):
        yield


@defect("an adaptive clip norm follows the bare count", law=_COVERED, bed="adaptive")
def _() -> Iterator[None]:
    def bare(self: Release, step: int, norms: Tensor) -> Any:
        clip = self.clip
        return clip.moved(clip.raw_count(norms)) if isinstance(clip, Adaptive) else None

    with patched(Release, "_moved_clip", bare):
        yield


@defect("an adaptive clip norm follows the bare count of large batches", law=_COVERED, bed="adaptive")
def _() -> Iterator[None]:
    moved = Release._moved_clip

    def bare(self: Release, step: int, norms: Tensor) -> Any:
        clip = self.clip
        if not isinstance(clip, Adaptive) or len(norms) < 8:
            return moved(self, step, norms)
        return clip.moved(clip.raw_count(norms))

    with patched(Release, "_moved_clip", bare):
        yield


# Tables whose noise is added later -----------------------------------------------------------------------------------------


@defect("a lazy table forgets a step's noise", law=_COVERED, bed="lazy")
def _() -> Iterator[None]:
    update = LazyTables.update

    def wrong(self: LazyTables, raw_sums: Mapping[str, Tensor], std: float, step: int) -> None:
        update(self, raw_sums, std * (step % 4 != 2), step)

    with patched(LazyTables, "update", wrong):
        yield


@defect("a lazy table owes the noise of one step only", law=_COVERED, bed="lazy")
def _() -> Iterator[None]:
    update = LazyTable.update

    def wrong(self: LazyTable, raw_sum: Tensor, std: float, step: int) -> None:
        self.owed.zero_()
        update(self, raw_sum, std, step)

    with patched(LazyTable, "update", wrong):
        yield


@defect("a lazy table's noise is of step 0", law=_COVERED, bed="lazy")
def _() -> Iterator[None]:
    settle = LazyTable.settle

    def wrong(self: LazyTable, ids: Tensor | None = None) -> None:
        self.step = 0
        settle(self, ids)

    with patched(LazyTable, "settle", wrong):
        yield


@defect("inputs and labels are one record apart", law=_RATE)
def _() -> Iterator[None]:
    fetch = _Hands._fetch

    def wrong(self: _Hands, step: int, indices: np.ndarray) -> Any:
        found = fetch(self, step, indices)
        return [torch.roll(found[0], 1, 0), *found[1:]] if len(indices) else found

    with patched(_Hands, "_fetch", wrong):
        yield

"""Defects before and after the release: records fetched, parts of batches, denoisers, averages, optimizers, tables, servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad.clipping import Adaptive, Capture
from hushgrad.clipping.rules.linear import Linear
from hushgrad.release import probe_passes
from hushgrad.release.core import Release
from hushgrad.release.lazy import LazyTable, LazyTables
from hushgrad.release.placement.whole import Whole
from hushgrad.sampling import Draws, Poisson
from hushgrad.sampling.batch_loader import Hands
from hushgrad.sampling.units import Units
from hushgrad.testing.defects.base import Plant, defect, replaced, wrong
from hushgrad.testing.defects.batches import RATE, dealt, drawn, rated
from hushgrad.testing.defects.clipping import NORM, WHOLE
from hushgrad.testing.defects.runs import COVERED
from hushgrad.train.after.averaged import Averaged
from hushgrad.train.private import Private

_USER = "a user is clipped as one"
_QUERY = "the query is what the denoiser asked"


# Who is fetched ------------------------------------------------------------------------------------------------------------


rated("a rate that grows by a tenth", lambda sampler, step: 1 + 0.2 * step / sampler.steps, bed="rare")


@dealt("one record has twice the rate")
def _(sampler: Poisson, n: int, draws: Draws, step: int) -> np.ndarray:
    again = drawn(sampler, n, draws, step + 10**6)
    return np.union1d(drawn(sampler, n, draws, step), again[again == 7])


@dealt("every record of a batch twice", law=NORM)
def _(sampler: Poisson, n: int, draws: Draws, step: int) -> np.ndarray:
    return np.repeat(drawn(sampler, n, draws, step), 2)


@wrong(Units, "expand", "a user's examples are split into two users", law=_USER, bed="users")
def _(expand: Any, self: Units, chosen: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    examples, unit = expand(self, chosen, **options)
    return examples, 2 * unit + (np.arange(len(unit)) % 2)


@wrong(Units, "expand", "examples of other users are fetched", law=_USER, bed="users")
def _(expand: Any, self: Units, chosen: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    examples, unit = expand(self, chosen, **options)
    return np.arange(len(examples), dtype=np.int64), unit


# Sums ----------------------------------------------------------------------------------------------------------------------


@wrong(Linear, "sq_norms", "norms of adapters are left out", law=WHOLE, bed="adapter")
def _(measure: Any, self: Linear, record: Any) -> Mapping[str, Tensor]:
    narrow = 2 in (record.x.shape[-1], record.g.shape[-1])
    return {name: value * 0 if narrow else value for name, value in measure(self, record).items()}


@wrong(Capture, "fold_with", "parts of a batch are clipped with twice the norm", law=NORM, bed="in parts")
def _(fold: Any, self: Capture, clipper: Any) -> None:
    fold(self, None if clipper is None else type(clipper)(2 * clipper.max_grad_norm))


@wrong(Release, "_rounded", "a secure sum is added twice", law=NORM, bed="secure")
def _(rounded: Any, self: Release, step: int, sums: dict[str, Tensor]) -> Any:
    return rounded(self, step, {name: 2 * total for name, total in sums.items()})


@wrong(probe_passes, "_at", "a filter's second probe has the wrong sign", law=_QUERY, bed="filtered")
def _(probe: Any, point: Any, *rest: Any) -> Any:
    return probe(point._replace(coefficient=-point.coefficient) if point.shift is None else point, *rest)


@wrong(probe_passes, "_at", "a query is asked at the wrong point", law=_QUERY, bed="corrected")
def _(probe: Any, point: Any, *rest: Any) -> Any:
    return probe(point._replace(shift=None), *rest)


# After the release ---------------------------------------------------------------------------------------------------------

_bare: dict[str, Tensor] = {}


def _noised(right: Any, self: Release, step: int, sums: dict[str, Tensor], begun: dict[str, Tensor]) -> Any:
    """Keep the sums without noise of a step until the next one."""
    _bare.update({name: total.clone() for name, total in sums.items()})
    return right(self, step, sums, begun)


def _remembering(owner: Any, method: str, name: str, *, bed: str = "layers") -> Callable[[Callable[..., Any]], Plant]:
    """Register a method that is wrong because it uses the sums without noise."""

    def register(mistaken: Callable[..., Any]) -> Plant:
        @defect(name, law=COVERED, bed=bed)
        @contextmanager
        def plant() -> Iterator[None]:
            _bare.clear()
            with replaced(Release, "_noised", _noised), replaced(owner, method, mistaken):
                yield

        return plant

    return register


@_remembering(Whole, "denoised", "a denoiser sees the bare gradient", bed="smoothed")
def _(right: Any, self: Whole, denoiser: Any, grads: dict[str, Tensor], info: Any, state: Any) -> dict[str, Tensor]:
    return {name: grad + _bare[name] for name, grad in right(self, denoiser, grads, info, state).items()}


@_remembering(Whole, "denoised", "a denoiser remembers the bare gradient", bed="smoothed")
def _(right: Any, self: Whole, denoiser: Any, grads: dict[str, Tensor], info: Any, state: Any) -> Any:
    made = right(self, denoiser, grads, info, state)
    state.update({f"kept.{name}": bare for name, bare in _bare.items()})
    return made


@_remembering(Averaged, "update", "the average takes in a bare step", bed="averaged")
def _(update: Any, self: Averaged, step: int) -> None:
    update(self, step)
    for name, mean in self._means.items():
        mean.sub_(_bare[name], alpha=0.1)


@_remembering(Private, "_after_step", "the momentum takes in the bare gradient")
def _(after: Any, self: Private, optimizer: Any, args: Any, kwargs: Any) -> None:
    after(self, optimizer, args, kwargs)
    for name, p in self._params.items():
        optimizer.state[p]["momentum_buffer"].add_(_bare[name])


@wrong(Release, "_moved_clip", "an adaptive clip norm follows the bare count", law=COVERED, bed="adaptive")
def _(moved: Any, self: Release, step: int, norms: Tensor) -> Any:
    clip = self.clip
    return clip.moved(clip.raw_count(norms)) if isinstance(clip, Adaptive) else None


@wrong(Release, "_moved_clip", "an adaptive clip norm follows the bare count of large batches", law=COVERED, bed="adaptive")
def _(moved: Any, self: Release, step: int, norms: Tensor) -> Any:
    clip = self.clip
    if not isinstance(clip, Adaptive) or len(norms) < 8:
        return moved(self, step, norms)
    return clip.moved(clip.raw_count(norms))


# Tables whose noise is added later -----------------------------------------------------------------------------------------


@wrong(LazyTables, "update", "a lazy table forgets a step's noise", law=COVERED, bed="lazy")
def _(update: Any, self: LazyTables, raw_sums: Mapping[str, Tensor], std: float, step: int) -> None:
    update(self, raw_sums, std * (step % 4 != 2), step)


@wrong(LazyTable, "update", "a lazy table owes the noise of one step only", law=COVERED, bed="lazy")
def _(update: Any, self: LazyTable, raw_sum: Tensor, std: float, step: int) -> None:
    self.owed.zero_()
    update(self, raw_sum, std, step)


@wrong(LazyTable, "_pay", "a lazy table's noise is of step 0", law=COVERED, bed="lazy")
def _(pay: Any, self: LazyTable, rows: Tensor) -> None:
    self.step = 0
    pay(self, rows)


@wrong(Hands, "_fetch", "inputs and labels are one record apart", law=RATE)
def _(fetch: Any, self: Hands, step: int, indices: np.ndarray) -> Any:
    found = fetch(self, step, indices)
    return [torch.roll(found[0], 1, 0), *found[1:]] if len(indices) else found

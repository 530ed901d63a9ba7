"""Defects around a step: examples that meet, and what reaches the parameters or the state beside the release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.release.core import Release
from hushgrad.testing.defects.base import defect, patched
from hushgrad.testing.defects.beds import Mixing
from hushgrad.train.private import Private
from hushgrad.train.released import Released

_APART = "no example influences what another one adds"
_COVERED = "whatever is released has noise"


def _between(change: Callable[[nn.Module, Tensor], Tensor]) -> AbstractContextManager[None]:
    return patched(Mixing, "between", staticmethod(change))


@defect("the batch's mean is subtracted", law=_APART, bed="vouched")
def _() -> Iterator[None]:
    with _between(lambda module, h: h - h.mean(0)):
        yield


@defect("a detached maximum over the batch", law=_APART, bed="vouched")
def _() -> Iterator[None]:
    with _between(lambda module, h: h / h.detach().abs().amax(0).clamp(min=0.1)):
        yield


@defect("a softmax over the batch", law=_APART, bed="vouched")
def _() -> Iterator[None]:
    with _between(lambda module, h: h * h.softmax(0)):
        yield


@defect("the example before is added", law=_APART, bed="vouched")
def _() -> Iterator[None]:
    with _between(lambda module, h: h + h.roll(1, 0)):
        yield


@defect("an expert takes the first four only", law=_APART, bed="vouched")
def _() -> Iterator[None]:
    def routed(module: nn.Module, h: Tensor) -> Tensor:
        chosen = (h[:, :1].detach() > 0).double()
        return h * (chosen * (chosen.cumsum(0) <= 4)).to(h.dtype) + 0.1 * h

    with _between(routed):
        yield


@defect("a buffer remembers the batch", law=_COVERED, bed="vouched")
def _() -> Iterator[None]:
    def remember(module: Any, h: Tensor) -> Tensor:
        module.kept.data = h.detach().mean(0) if len(h) else module.kept.data
        return h

    with ExitStack() as stack:
        stack.enter_context(_between(remember))
        stack.enter_context(patched(Released, "check", lambda self, *, values: None))
        yield


@defect("norms leak into the parameters", law=_COVERED)
def _() -> Iterator[None]:
    after = Private._after_step

    def wrong(self: Private, optimizer: Any, args: Any, kwargs: Any) -> None:
        after(self, optimizer, args, kwargs)
        if len(self.raw_norms):
            with torch.no_grad():
                next(iter(self._params.values())).view(-1)[0] += float(self.raw_norms.mean())

    with patched(Private, "_after_step", wrong):
        yield


@defect("the sum of one parameter is released as it is", law=_COVERED)
def _() -> Iterator[None]:
    noised = Release._noised

    def wrong(self: Release, step: int, sums: dict[str, Tensor], begun: dict[str, Tensor]) -> dict[str, Tensor]:
        last = next(reversed(sums))
        bare = sums[last].clone()
        return {**noised(self, step, sums, begun), last: bare}

    with patched(Release, "_noised", wrong):
        yield


@defect("the optimizer steps twice on a release's noiseless part", law=_COVERED)
def _() -> Iterator[None]:
    release = Private._release_gradient

    def wrong(self: Private, step: int) -> None:
        release(self, step)
        for p in self._params.values():
            if p.grad is not None:
                p.grad = p.grad.sign() * p.grad.abs().clamp(max=1e-3)

    with patched(Private, "_release_gradient", wrong):
        yield

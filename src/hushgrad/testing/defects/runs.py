"""Defects around a step: examples that influence each other, and leaks into parameters or state besides the release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.release.core import Release
from hushgrad.testing.defects.base import defect, patched, wrong
from hushgrad.testing.defects.beds import Mixing
from hushgrad.train.private import Private
from hushgrad.train.untrained_state import Released

_APART = "no example influences what another one adds"
COVERED = "whatever is released has noise"


def _between(change: Callable[[Any, Tensor], Tensor]) -> AbstractContextManager[None]:
    return patched(Mixing, "between", staticmethod(change))


def _mixed(name: str, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Register what a model does between its layers."""
    defect(name, law=_APART, bed="vouched")(lambda: _between(change))


_mixed("the batch's mean is subtracted", lambda module, h: h - h.mean(0))
_mixed("a detached maximum over the batch", lambda module, h: h / h.detach().abs().amax(0).clamp(min=0.1))
_mixed("a softmax over the batch", lambda module, h: h * h.softmax(0))
_mixed("the example before is added", lambda module, h: h + h.roll(1, 0))


def _routed(module: nn.Module, h: Tensor) -> Tensor:
    chosen = (h[:, :1].detach() > 0).double()
    return h * (chosen * (chosen.cumsum(0) <= 4)).to(h.dtype) + 0.1 * h


_mixed("an expert takes the first four only", _routed)


@defect("a buffer remembers the batch", law=COVERED, bed="vouched")
@contextmanager
def _() -> Iterator[None]:
    def remember(module: Any, h: Tensor) -> Tensor:
        module.kept.data = h.detach().mean(0) if len(h) else module.kept.data
        return h

    with _between(remember), patched(Released, "check", lambda self, *, values: None):
        yield


@wrong(Private, "_after_step", "norms leak into the parameters", law=COVERED)
def _(after: Any, self: Private, optimizer: Any, args: Any, kwargs: Any) -> None:
    after(self, optimizer, args, kwargs)
    if len(self.raw_norms):
        with torch.no_grad():
            next(iter(self._params.values())).view(-1)[0] += float(self.raw_norms.mean())


@wrong(Release, "_noised", "the sum of one parameter is released as it is", law=COVERED)
def _(noised: Any, self: Release, step: int, sums: dict[str, Tensor], begun: dict[str, Tensor]) -> dict[str, Tensor]:
    last = next(reversed(sums))
    bare = sums[last].clone()
    return {**noised(self, step, sums, begun), last: bare}


@wrong(Private, "_release_gradient", "the optimizer steps twice on a release's noiseless part", law=COVERED)
def _(release: Any, self: Private, step: int) -> None:
    release(self, step)
    for p in self._params.values():
        if p.grad is not None:
            p.grad = p.grad.sign() * p.grad.abs().clamp(max=1e-3)

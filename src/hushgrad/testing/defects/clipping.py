"""Defects of the clipped sum: a record moves it by more than the clip norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from hushgrad.clipping import Capture, Flat, PerLayer, reduce
from hushgrad.clipping.base import Rule
from hushgrad.clipping.rules.embedding import Embedding
from hushgrad.clipping.rules.linear import Linear
from hushgrad.clipping.rules.norm import LayerNorm
from hushgrad.testing.defects.base import defect, patched

_NORM = "no record moves the clipped sum by more than the clip norm"
_OWN = "an example is clipped by the norm of its own whole gradient"


def _weighed(change: Callable[[Flat, Tensor, Tensor], Tensor]) -> AbstractContextManager[None]:
    weights = Flat.weights
    return patched(Flat, "weights", lambda self, squares: change(self, squares, weights(self, squares.clone())))


@defect("every tenth example is not clipped", law=_NORM)
def _() -> Iterator[None]:
    def change(clip: Flat, squares: Tensor, weights: Tensor) -> Tensor:
        weights[::10] = 1.0
        return weights

    with _weighed(change):
        yield


@defect("clip norm a tenth too large", law=_NORM)
def _() -> Iterator[None]:
    with _weighed(lambda clip, squares, weights: (weights * 1.1).clamp(max=1.0)):
        yield


@defect("norms that are infinite are not clipped", law=_NORM)
def _() -> Iterator[None]:
    with _weighed(lambda clip, squares, weights: torch.where(squares.isinf(), 1.0, weights)):
        yield


@defect("norms are cut at a thousand clip norms", law=_NORM)
def _() -> Iterator[None]:
    with _weighed(lambda clip, squares, weights: weights.clamp(min=1e-3)):
        yield


@defect("a batch of one is not clipped", law=_NORM)
def _() -> Iterator[None]:
    with _weighed(lambda clip, squares, weights: torch.ones_like(weights) if len(weights) == 1 else weights):
        yield


@defect("the batch is clipped, not the examples", law=_NORM)
def _() -> Iterator[None]:
    def change(clip: Flat, squares: Tensor, weights: Tensor) -> Tensor:
        mean = squares.sum().sqrt() / max(1, len(squares))
        return torch.ones_like(weights) * (clip.max_grad_norm / mean).clamp(max=1.0)

    with _weighed(change):
        yield


@defect("an example gets its neighbour's weight", law=_OWN)
def _() -> Iterator[None]:
    with _weighed(lambda clip, squares, weights: weights.roll(1)):
        yield


@defect("squared norms for norms", law=_NORM)
def _() -> Iterator[None]:
    with _weighed(lambda clip, squares, weights: (clip.max_grad_norm / squares).clamp(max=1.0).clamp(min=0.5)):
        yield


@defect("sensitivity divided by the batch size", law="noise is the multiplier times the clip norm")
def _() -> Iterator[None]:
    with patched(Flat, "sensitivity", lambda self, relation: self.max_grad_norm / 12 * relation.contributions):
        yield


@defect("all layers but the first are not clipped", law=_NORM, bed="by layer")
def _() -> Iterator[None]:
    weights = PerLayer.weights

    def first_only(self: PerLayer, squares: Tensor) -> Tensor:
        made = weights(self, squares)
        made[:, 1:] = 1.0
        return made

    with patched(PerLayer, "weights", first_only):
        yield


def _without(rule: type[Rule], *names: str) -> AbstractContextManager[None]:
    """The norms of these parameters are left out."""
    measure = rule.sq_norms

    def wrong(self: Rule, record: Any) -> dict[str, Tensor]:
        return {name: value * 0 if name in names else value for name, value in measure(self, record).items()}

    return patched(rule, "sq_norms", wrong)


@defect("norms of biases are left out", law=_OWN)
def _() -> Iterator[None]:
    with _without(Linear, "bias"):
        yield


@defect("norms of linear layers are left out", law=_OWN)
def _() -> Iterator[None]:
    with _without(Linear, "weight"):
        yield


@defect("norms of normalisation layers are left out", law=_OWN)
def _() -> Iterator[None]:
    with _without(LayerNorm, "weight", "bias"):
        yield


@defect("norms of what has no gradient yet are left out", law=_OWN, bed="new adapter")
def _() -> Iterator[None]:
    measure = Linear.sq_norms

    def wrong(self: Linear, record: Any) -> dict[str, Tensor]:
        down = record.g.shape[-1] == 2  # in front of a factor that is zero
        return {name: value * 0 if down else value for name, value in measure(self, record).items()}

    with patched(Linear, "sq_norms", wrong):
        yield


@defect("norms of tables are left out", law=_OWN, bed="table")
def _() -> Iterator[None]:
    with _without(Embedding, "weight"):
        yield


@defect("a tied weight is counted once", law=_OWN, bed="tied")
def _() -> Iterator[None]:
    def once(group: Any, shared: dict[str, Any], **_: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {name: uses[0][0].call.measure()[uses[0][1]] * uses[0][0].factor ** 2 for name, uses in shared.items()}, {}

    with patched(reduce, "joint_norms", once):
        yield


@defect("parts that cancel are added one by one", law="the bound holds in the arithmetic that runs", bed="sequences")
def _() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patched(reduce, "heavy_units", lambda *_, **__: []))
        stack.enter_context(patched(reduce, "is_light", lambda *_, **__: True))
        yield


@defect("a user's examples are clipped one by one", law="a user is clipped as one", bed="users")
def _() -> Iterator[None]:
    with patched(Capture, "units", lambda self, ids: None):
        yield


@defect("the divisor counts the records", law="the divisor is public")
def _() -> Iterator[None]:
    collect = Capture.collect

    def wrong(self: Capture, clipper: Any, **options: Any) -> Any:
        count = max(1, self.check())
        return collect(self, clipper, **{**options, "scale": 1.0 / count})

    with patched(Capture, "collect", wrong):
        yield

"""Defects of the clipped sum: a record moves it by more than the clip norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hushgrad.clipping import Capture, Flat, PerLayer, collecting, reduce
from hushgrad.clipping.rules.embedding import Embedding
from hushgrad.clipping.rules.linear import Linear
from hushgrad.clipping.rules.norm import LayerNorm
from hushgrad.testing.defects.base import defect, patched, replaced, wrong

NORM = "no record moves the clipped sum by more than the clip norm"
WHOLE = "an example is clipped by the norm of its own whole gradient"
_Change = Callable[[Flat, Tensor, Tensor], Tensor]


def _weighed(name: str, change: _Change, *, law: str = NORM) -> None:
    """Register a function that makes the weights of examples from their squared norms and the right weights."""

    def weigh(right: Any, self: Flat, sq_norms: Tensor) -> Tensor:
        return change(self, sq_norms, right(self, sq_norms.clone()))

    defect(name, law=law)(lambda: replaced(Flat, "weights", weigh))


def _every_tenth_is_whole(clip: Flat, squares: Tensor, weights: Tensor) -> Tensor:
    weights[::10] = 1.0
    return weights


def _one_weight_for_all(clip: Flat, squares: Tensor, weights: Tensor) -> Tensor:
    mean = squares.sum().sqrt() / max(1, len(squares))
    return torch.ones_like(weights) * (clip.max_grad_norm / mean).clamp(max=1.0)


_weighed("every tenth example is not clipped", _every_tenth_is_whole)
_weighed("clip norm a tenth too large", lambda clip, squares, weights: (weights * 1.1).clamp(max=1.0))
_weighed("norms that are infinite are not clipped", lambda clip, squares, weights: torch.where(squares.isinf(), 1.0, weights))
_weighed("norms are cut at a thousand clip norms", lambda clip, squares, weights: weights.clamp(min=1e-3))
_weighed("a batch of one is not clipped", lambda clip, squares, w: torch.ones_like(w) if len(w) == 1 else w)
_weighed("the batch is clipped, not the examples", _one_weight_for_all)
_weighed("an example gets its neighbour's weight", lambda clip, squares, weights: weights.roll(1), law=WHOLE)
_weighed("squared norms for norms", lambda clip, squares, weights: (clip.max_grad_norm / squares).clamp(max=1.0).clamp(min=0.5))


@wrong(Flat, "sensitivity", "sensitivity divided by the batch size", law="noise is the multiplier times the clip norm")
def _(sensitivity: Any, self: Flat, relation: Any) -> float:
    return self.max_grad_norm / 12 * relation.contributions  # type: ignore[no-any-return]


@wrong(PerLayer, "weights", "all layers but the first are not clipped", law=NORM, bed="by layer")
def _(weights: Any, self: PerLayer, sq_norms: Tensor) -> Tensor:
    made: Tensor = weights(self, sq_norms)
    made[:, 1:] = 1.0
    return made


def _without(*names: str) -> Callable[..., dict[str, Tensor]]:
    """Norms without these parameters."""

    def measured(measure: Any, self: Any, record: Any) -> dict[str, Tensor]:
        return {name: value * 0 if name in names else value for name, value in measure(self, record).items()}

    return measured


wrong(Linear, "sq_norms", "norms of biases are left out", law=WHOLE)(_without("bias"))
wrong(Linear, "sq_norms", "norms of linear layers are left out", law=WHOLE)(_without("weight"))
wrong(LayerNorm, "sq_norms", "norms of normalisation layers are left out", law=WHOLE)(_without("weight", "bias"))


@wrong(Linear, "sq_norms", "norms of what has no gradient yet are left out", law=WHOLE, bed="new adapter")
def _(measure: Any, self: Linear, record: Any) -> dict[str, Tensor]:
    down = record.g.shape[-1] == 2  # in front of a factor that is zero
    return {name: value * 0 if down else value for name, value in measure(self, record).items()}


wrong(Embedding, "sq_norms", "norms of tables are left out", law=WHOLE, bed="table")(_without("weight"))


@wrong(reduce, "joint_norms", "a tied weight is counted once", law=WHOLE, bed="tied")
def _(joint: Any, group: Any, shared: dict[str, Any], **_: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return {name: uses[0][0].call.measure()[uses[0][1]] * uses[0][0].factor ** 2 for name, uses in shared.items()}, {}


@defect("parts that cancel are added one by one", law="the bound holds in the arithmetic that runs", bed="sequences")
@contextmanager
def _() -> Iterator[None]:
    with patched(reduce, "heavy_units", lambda *_, **__: []), patched(collecting, "is_light", lambda *_, **__: True):
        yield


@wrong(Capture, "units", "a user's examples are clipped one by one", law="a user is clipped as one", bed="users")
def _(units: Any, self: Capture, ids: Any) -> None:
    return None


@wrong(Capture, "collect", "the divisor counts the records", law="the divisor is public")
def _(collect: Any, self: Capture, clipper: Any, **options: Any) -> Any:
    return collect(self, clipper, **{**options, "scale": 1.0 / max(1, self.check())})

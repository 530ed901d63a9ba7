"""Tests whether a loss that is only known for whole batches is a mean over examples of terms that each depend on one of them alone.

A mean over all tokens, over the labels that are not ignored, or by weights divides by what the other examples hold. If all examples of a
batch hold equally much, it happens to be a mean over the examples: so it is tested again when they first differ, or a class, or a label
that does not count, is first among them; and from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.clipping.proof.inputs import Reading, leaves, mapped
from hushgrad.errors import CaptureError, HushgradError, NotIsolated
from hushgrad.train.batch_variety import Variety
from hushgrad.train.loss_arguments import gradients, ordinary
from hushgrad.train.loss_tracking import Losses
from hushgrad.train.trial_passes import Constant, aside

MIXED = "The loss of a batch is not the mean of its examples' own losses: one example changes what another one counts."

_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative: far above rounding
_ROUNDED = 2e-2  # of half precision
_HALF = (torch.float16, torch.bfloat16)
_SHOWN = 32  # examples of a batch that it is tried on: class weights show where classes differ
_AGAIN = 50  # it is tried again in one of so many later passes, at random,
_LATER = 4  # on so many examples

Loss = Callable[[Any], Tensor]  # of a batch, or of some rows of it


class Rows(NamedTuple):
    """How many examples a pass has, and how many of them, from the first, count."""

    examples: int
    counted: int
    reading: Reading | None = None  # of a model's inputs, as they were proved to be read

    def only(self, batch: Any, which: list[int]) -> Any:
        """These examples of every tensor that holds examples; other tensors are shared."""
        if self.reading is not None:
            return self.reading.only(batch, torch.tensor(which), self.examples)
        return mapped(batch, lambda t: t[which] if self._has(t) else t)

    def own(self, batch: Any, i: int) -> list[Tensor]:
        """What one example has."""
        return [t[i : i + 1] for t in leaves(batch) if self._has(t)]

    def held(self, t: Any) -> Tensor | None:
        """How much each example holds of what pads rows (labels of -100, zeros of a mask); for scalars, the numbers."""
        if not self._has(t) or (t.dim() > 1 and (t.is_floating_point() or not t.numel())):
            return None
        some = t.detach()[: self.counted]
        return some if t.dim() == 1 else (some == some.min()).flatten(1).sum(1)

    def _has(self, t: Any) -> bool:
        return isinstance(t, Tensor) and t.dim() > 0 and len(t) == self.examples


class Means:
    """Tests a function of batches: the first time, when examples first differ in a way that was not seen, and from time to time."""

    def __init__(self, losses: Losses, remedy: str, *, either: bool = False) -> None:
        self._losses, self.remedy, self._either = losses, remedy, either  # a sum over the examples is as good as their mean
        self._lot, self._seen, self._tried = Random(0), Variety(), False

    def look(self, fn: Loss, model: nn.Module, batch: Any, rows: Rows) -> None:
        """Refuse a loss of ``batch`` that is not a mean over its examples, if it is time to test it.

        Raises:
            NotIsolated: if steps were taken with such a loss, they are covered by no theorem.
        """
        self._losses.padded.check_batch(fn, model, batch, rows.examples)
        if self._losses.together or rows.counted < 2:  # copies of one example show nothing
            return
        new = self._seen.shown(batch, rows.held)
        if self._tried and not new and self._lot.randrange(_AGAIN):
            return
        capture = self._losses.capture
        with capture.pause(), self._losses.handed.seen():
            found = self._is_mean(fn, model, batch, rows, _SHOWN if new or not self._tried else _LATER, new)
        if not found:
            message = f"{MIXED} {(self._either and self._losses.remedy) or self.remedy}"
            if self._tried:  # nobody knows since when
                capture.not_isolated, capture.late = message, True
            raise NotIsolated(message)
        self._tried = True
        self._seen.add(batch, rows.held)

    def _is_mean(self, fn: Loss, model: nn.Module, batch: Any, rows: Rows, shown: int, new: set[int]) -> bool:
        some = sorted(new | set(self._lot.sample(range(rows.counted), min(rows.counted, shown))))
        trained = [p for p in model.parameters() if p.requires_grad]
        half = self._losses.capture.rounded or torch.is_autocast_enabled(trained[0].device.type)
        half = half or any(p.dtype in _HALF for p in model.parameters())

        def on(which: list[int], wanted: Sequence[Tensor] = ()) -> Tensor:
            return _on(fn, rows.only(batch, which), wanted)

        with aside(model), Constant():
            single = {i: on([i]) for i in some}
            some = [i for i in some if bool(ordinary(rows.own(batch, i), single[i].mean().reshape(1)).all())]
            if len(some) < 2:
                return True
            ways = (some, some[1:], some[:-1], [some[0], *some[:-1]])  # all, without one, one in another's place
            few = _few(self._lot, batch, rows, some)  # of which gradients, too, are compared
            alone = torch.stack([on([i], trained) for i in few])
            return all(self._agree(on(way), torch.stack([single[i] for i in way]), half=half) for way in ways) and self._agree(
                on(few, trained), alone, half=half
            )

    def _agree(self, together: Tensor, alone: Tensor, *, half: bool) -> bool:
        sums = self._either or self._losses.capture.loss_reduction == "sum"
        means = self._either or not sums
        if means and same(together, alone.mean(0), alone, half=half):
            return True
        return sums and same(together, alone.sum(0), alone, half=half)


def _taken(fn: Loss, batch: Any) -> Tensor:
    try:
        return fn(batch)
    except (HushgradError, MemoryError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CaptureError(
            f"The loss cannot be taken of single examples, on which it is tried ({type(error).__name__}: {error}). Let it take any number "
            "of them, as a batch may have one."
        ) from error


def _on(fn: Loss, batch: Any, wanted: Sequence[Tensor]) -> Tensor:
    """The loss; or its gradient, projected on one direction for each parameter."""
    with torch.enable_grad():  # a function may take gradients itself
        loss = _taken(fn, batch)
        if not wanted or not loss.requires_grad:
            return loss.detach()
        found = gradients(loss.sum(), wanted)
    return torch.stack([torch.arange(1, g.numel() + 1, device=g.device).to(g).sin_().dot(g.flatten()) for g in found])


def _few(lot: Random, batch: Any, rows: Rows, some: list[int]) -> list[int]:
    """Some at random, and those that hold most and least."""
    chosen = set(lot.sample(some, min(len(some), _LATER)))
    for t in leaves(batch):
        held = rows.held(t)
        if held is not None and len(chosen) < 2 * _LATER:
            much = held.tolist()
            chosen |= {min(some, key=much.__getitem__), max(some, key=much.__getitem__)}
    return sorted(chosen)


def same(a: Tensor, b: Tensor, terms: Tensor | None = None, *, half: bool = False) -> bool:
    """Equal up to rounding of numbers as large as these, or as the ``terms`` that b is made of; or both of them no numbers."""
    a, b = a.detach(), b.detach()
    allowed = (_ROUNDED if half else _SAME.get(b.dtype, _ROUNDED)) * (b if terms is None else terms.detach()).abs().max()
    return bool((a - b).abs().max() <= allowed) or not (bool(a.isfinite().all()) or bool(b.isfinite().all()))

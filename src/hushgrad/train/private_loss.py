"""The loss of a private step: a mean over the examples, each example's loss evaluated from that example alone.

Clipping bounds what an example adds to the sum of gradients, but only if the loss is such a sum. Class weights, ``ignore_index``, mixup,
contrastive losses and a maximum over the batch divide by, or choose from, all examples' data: then one example scales or redirects the
gradients of all others, and per-example clipping cannot see it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.clipping.device_sum import filled
from hushgrad.errors import ArgumentError, NotIsolated
from hushgrad.train.batch_means import MIXED, Means, Rows, same
from hushgrad.train.loss_arguments import Arguments, gradients, ordinary, rows_of
from hushgrad.train.loss_tracking import Losses
from hushgrad.train.reachable_state import ReachableState, binds_data, made_by
from hushgrad.train.trial_passes import Constant

_TENSORS = frozenset({Tensor})
_RARELY = 128  # batches, in one of which an example's loss is compared with the one that it has alone
_OWN_VMAP = (
    "An example's loss for all examples at once (by torch.func.vmap) is not the one that it has alone: a vmap() of an autograd.Function in "
    "the loss looks at all of them. Leave it out and say generate_vmap_rule = True."
)


class PrivateLoss:
    """A loss function of a private run. Made by :meth:`hushgrad.train.Private.loss`."""

    def __init__(self, fn: Callable[..., Tensor], losses: Losses, *, per_example: bool) -> None:
        given: Any = fn
        if not callable(given) or (isinstance(given, type) and issubclass(given, nn.Module)):
            remedy = "Pass nn.CrossEntropyLoss() or torch.nn.functional.cross_entropy, for instance."
            _check.fail("loss_fn", fn, "to be a function of outputs and targets", remedy)
        self._fn, self._losses = fn, losses
        self._compared = per_example  # the user says that the mean over single examples is what is meant
        self._by_loop = self._begun = False
        self._lot = Random(0)  # of its own: a run can be repeated
        self._means = Means(losses, _RATHER)  # of a function of the model and a batch
        self._kept = ReachableState(fn)
        earlier = losses.known.setdefault(made_by(fn), self._kept)
        if losses.handed.is_open and (binds_data(fn) or not earlier.is_like(self._kept)):  # made for this batch, perhaps of it
            losses.vouched = True

    def __call__(self, *args: Any) -> Tensor:
        """The loss of the pass, ready for ``backward()``."""
        examples = self._losses.examples
        if examples is None:
            raise ArgumentError("Expected a batch of private.loader(): a loss of other data has no place in a private step.")
        with self._losses.leaving():
            self._look(calls=1)  # what it reads beside them may be of the batch
            of_batch = any(isinstance(arg, nn.Module) for arg in args)
            made = self._of_batch(args, examples) if of_batch else self._covered(self._of_outputs(args, examples))
            self._look(calls=None)
        return made

    def _covered(self, loss: Tensor) -> Tensor:
        return self._losses.covered(loss, by=made_by(self._fn))

    def _look(self, *, calls: int | None) -> None:
        """Whether state outside of the function's arguments has changed; whoever changed it, the user vouches for it."""
        if not self._losses.vouched:
            before, self._kept = self._kept, ReachableState(self._fn)
            self._losses.vouched = not before.is_still(self._kept, calls=calls)

    # Of outputs and targets: the function is called with one example at a time, so it cannot see another one ---------------------

    def _of_outputs(self, args: tuple[Any, ...], examples: int) -> Tensor:
        given = rows_of(args, examples, "Keep constants (class weights) inside the function, or give it the model and the batch.")
        self._losses.handed.to_loss(given)
        if not _TENSORS.issuperset(map(type, args)) and self._losses.handed.is_new(made_by(self._fn), args):
            self._losses.handed.prepared = True
        if not examples:
            return torch.stack([t.sum() * 0.0 for t in given if t.is_floating_point()]).sum()
        rows, counted = Arguments(self._fn, args), examples - self._losses.padding
        self._losses.padded.check_outputs(self._fn, args, examples)
        if not self._compared and counted > 1:  # copies of one example show nothing
            self._compare(rows)
        each = self._each(rows)
        if self._losses.fixed:  # divided by the public size, as a loss of the user's own is
            free = filled(examples, counted, each.device)
            return self._reduced(each.masked_fill(free, 0.0))
        summed = self._losses.capture.loss_reduction == "sum"
        return each[:counted].sum() if summed else _Mean.apply(each, counted)  # type: ignore[no-any-return, no-untyped-call]

    def _each(self, rows: Arguments) -> Tensor:
        if not self._by_loop:
            try:
                made = self._watched(rows.at_once, calls=1)
            except (RuntimeError, ValueError, TypeError):  # what it does cannot be done for all examples at once (.item(), say)
                self._by_loop = True
            else:
                if not self._begun or self._lot.random() * _RARELY < 1:
                    self._compare_one(rows, made.detach())
                self._begun = True
                return made
        return self._watched(rows.one_by_one, calls=rows.count)

    def _compare_one(self, rows: Arguments, made: Tensor) -> None:
        """Whether one of the examples, drawn at random, has the loss that it has alone; nothing is shown of losses that draw."""
        k = self._lot.randrange(rows.count)
        with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            alone = rows.one(k)
            differs = bool(alone.isfinite()) and not same(made[k], alone)
            if differs and torch.equal(rows.at_once()[k], rows.at_once()[k]):
                raise NotIsolated(_OWN_VMAP)

    def _watched(self, evaluate: Callable[[], Tensor], *, calls: int) -> Tensor:
        """The losses; if the function keeps state, one example may enter another's loss, and the user vouches for it."""
        self._look(calls=None)  # it may have been tried
        made = evaluate()
        self._look(calls=calls)
        return made

    def _reduced(self, losses: Tensor) -> Tensor:
        return losses.sum(0) if self._losses.capture.loss_reduction == "sum" else losses.mean(0)

    def _compare(self, rows: Arguments) -> None:
        """On the first batch: compare the mean over single examples, and its gradient, with what the function gives for all."""
        own = rows.apart()
        with Constant():
            each = own.one_by_one()
            if not bool((usual := ordinary(own.args, each)).all()):
                own = own.only(usual)
                if own.count < 2:
                    return
                each = own.one_by_one()
            whole, alone = self._compared_by(own.together(), each)
            if not (same(whole, alone) and _same_gradient(whole, alone, [t for t in own.tensors if t.requires_grad])):
                raise NotIsolated(f"{MIXED} {self._offer(own.apart())}")
        self._compared = True

    def _compared_by(self, whole: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
        """The two as means; or as sums, if the function of a run of sums gives one."""
        if whole.dim():
            return whole.mean(), each.mean()
        summed = self._losses.capture.loss_reduction == "sum" and not same(whole, each.mean())
        return whole, each.sum() if summed else each.mean()

    def _offer(self, rows: Arguments) -> str:
        """The per-example form of this loss, if there is one."""
        form = _unreduced(self._fn)
        if form is not None:
            own = rows.of(form)
            try:
                whole, alone = self._compared_by(own.together(), own.one_by_one())
            except TypeError:  # it has no such argument
                return _MEANT
            if same(whole, alone):
                return 'Its per-example form is reduction="none" (private.loss takes the mean itself). ' + _MEANT
        return _MEANT

    # A function of the model and a batch: it is tried on a few examples, alone and together ----------------------------------------

    def _of_batch(self, args: tuple[Any, ...], examples: int) -> Tensor:
        if self._losses.together:
            return self._fn(*args)  # and the user vouches for it
        rows_of(args, examples, "Give private.loss a function of outputs and targets.")
        model = next(arg for arg in args if isinstance(arg, nn.Module))
        self._means.look(lambda some: self._fn(*some), model, args, Rows(examples, examples - self._losses.padding))
        with self._losses.handed.seen():
            return self._covered(self._fn(*args))


class _Mean(torch.autograd.Function):
    """The mean of the losses that count, the first ones; gradients are divided by the number of all rows.

    The same holds for any loss that the loop computes from this one, and for a loss of its own: the capture multiplies by that number.
    """

    @staticmethod
    def forward(ctx: Any, each: Tensor, counted: int) -> Tensor:
        ctx.shape, ctx.counted = each.shape, counted
        return each[:counted].mean() if counted else each.new_zeros(())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        made = g.new_zeros(ctx.shape)
        made[: ctx.counted] = g / len(made)
        return made, None


_MEANT = "If the mean of the function over single examples is what you mean, say private.loss(fn, per_example=True)."
_RATHER = (
    "Class weights, ignore_index, mixup and contrastive losses do this: give private.loss a function of outputs and targets, which is "
    "evaluated for each example alone."
)


def _unreduced(fn: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    if isinstance(fn, nn.Module):
        if not isinstance(getattr(fn, "reduction", None), str):
            return None
        form = copy.copy(fn)
        form.reduction = "none"  # type: ignore[assignment]
        return form
    return partial(fn, reduction="none")


def _same_gradient(whole: Tensor, alone: Tensor, wanted: list[Tensor]) -> bool:
    if not wanted:
        return True
    pairs = (gradients(loss, wanted) for loss in (whole, alone))
    return all(same(a, b) for a, b in zip(*pairs, strict=True))

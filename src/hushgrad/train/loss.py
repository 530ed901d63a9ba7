"""The loss of a private step is a mean over the examples: each one's own, evaluated from that example alone.

Clipping bounds what an example adds to the sum of gradients, but only if the loss is such a sum. Class weights, ``ignore_index``, mixup,
contrastive losses and a maximum over the batch divide by, or choose from, everybody's data: then one example scales or redirects the
gradients of all others, and no clipping of single examples sees it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hushgrad import _check
from hushgrad.clipping.there import filled
from hushgrad.errors import ArgumentError, NotIsolated
from hushgrad.train.kept import Kept
from hushgrad.train.losses import Losses

__all__ = ["PrivateLoss", "aside", "has_rows"]

_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative: far above rounding
_ROUNDED = 2e-2  # of half precision
_SHOWN = 32  # examples of the first batch that a loss of whole batches is tried on: class weights show where classes differ
_AGAIN = 50  # such a loss is tried again in one of so many later passes, at random,
_LATER = 4  # on so many examples


class PrivateLoss:
    """A loss function of a private run. Made by :meth:`hushgrad.train.Private.loss`."""

    def __init__(self, fn: Callable[..., Tensor], losses: Losses, *, per_example: bool) -> None:
        given: Any = fn
        if not callable(given) or (isinstance(given, type) and issubclass(given, nn.Module)):
            remedy = "Pass nn.CrossEntropyLoss() or torch.nn.functional.cross_entropy, for instance."
            _check.fail("loss_fn", fn, "to be a function of outputs and targets", remedy)
        self._fn, self._losses = fn, losses
        self._compared = per_example  # the user says that the mean over single examples is what is meant
        self._by_loop = False

    def __call__(self, *args: Any) -> Tensor:
        """The loss of the pass, ready for ``backward()``."""
        examples = self._losses.examples
        if examples is None:
            raise ArgumentError("Expected a batch of private.loader(): a loss of other data has no place in a private step.")
        if any(isinstance(arg, nn.Module) for arg in args):
            return self._of_batch(args, examples)
        return self._losses.covered(self._of_outputs(args, examples))

    # A function of outputs and targets: it is called with one example at a time, so it cannot see another one ---------------------

    def _of_outputs(self, args: tuple[Any, ...], examples: int) -> Tensor:
        leaves, spec = tree_flatten(args)
        self._losses.handed.to_loss(leaves)
        _require_rows(leaves, examples, "Keep constants (class weights) inside the function, or give it the model and the batch.")
        if not examples:
            return torch.stack([t.sum() * 0.0 for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]).sum()
        rows, counted = _Rows(self._fn, leaves, spec), examples - self._losses.padding
        if not self._compared and counted > 1:  # copies of one example show nothing
            self._compare(rows)
        each = self._each(rows)
        if self._losses.fixed:  # divided by the public size, as a loss of the user's own is
            free = filled(examples, counted, each.device)
            return self._reduced(each.masked_fill(free, 0.0))
        summed = self._losses.capture.loss_reduction == "sum"
        return each[:counted].sum() if summed else _Mean.apply(each, counted)  # type: ignore[no-any-return, no-untyped-call]

    def _each(self, rows: _Rows) -> Tensor:
        if not self._by_loop:
            try:
                return self._watched(rows.at_once, calls=1)
            except (RuntimeError, ValueError, TypeError):  # what it does cannot be done for all examples at once (.item(), say)
                self._by_loop = True
        return self._watched(rows.one_by_one, calls=rows.count)

    def _watched(self, evaluate: Callable[[], Tensor], *, calls: int) -> Tensor:
        """The losses; where the function keeps something, one example may be in another's loss, and the user vouches for it."""
        if self._losses.vouched:
            return evaluate()
        before = Kept(self._fn)
        made = evaluate()
        self._losses.vouched = self._losses.vouched or not before.is_still(Kept(self._fn), calls=calls)
        return made

    def _reduced(self, losses: Tensor) -> Tensor:
        return losses.sum() if self._losses.capture.loss_reduction == "sum" else losses.mean()

    def _compare(self, rows: _Rows) -> None:
        """The first batch: is the mean over single examples what the function gives for all of them, and its gradient, too?"""
        own = rows.apart()
        whole, alone = self._compared_by(own.together(), own.one_by_one())
        if not (_same(whole, alone) and _same_gradient(whole, alone, own.leaves)):
            raise NotIsolated(f"{_MIXED} {self._offer(rows.apart())}")
        self._compared = True

    def _compared_by(self, whole: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
        """The two as means; or as sums, where the function of a run of sums gives one."""
        if whole.dim():
            return whole.mean(), each.mean()
        summed = self._losses.capture.loss_reduction == "sum" and not _same(whole, each.mean())
        return whole, each.sum() if summed else each.mean()

    def _offer(self, rows: _Rows) -> str:
        """The per-example form of this loss, where there is one."""
        form = _unreduced(self._fn)
        if form is not None:
            own = rows.of(form)
            try:
                whole, alone = self._compared_by(own.together(), own.one_by_one())
            except TypeError:  # it has no such argument
                return _MEANT
            if _same(whole, alone):
                return 'Its per-example form is reduction="none" (private.loss takes the mean itself). ' + _MEANT
        return _MEANT

    # A function of the model and a batch: it is tried on a few examples, alone and together ----------------------------------------

    def _of_batch(self, args: tuple[Any, ...], examples: int) -> Tensor:
        if self._losses.together:
            return self._fn(*args)  # and the user vouches for it
        if examples - self._losses.padding > 1 and (not self._compared or random.randrange(_AGAIN) == 0):
            with self._losses.capture.pause():
                self._try(args, examples, _LATER if self._compared else _SHOWN)
            self._compared = True
        with self._losses.handed.seen():
            return self._losses.covered(self._fn(*args))

    def _try(self, args: tuple[Any, ...], examples: int, shown: int) -> None:
        model, counted = next(arg for arg in args if isinstance(arg, nn.Module)), examples - self._losses.padding
        some = sorted(random.sample(range(counted), min(counted, shown)))
        with aside(model):
            single = {i: self._on(args, examples, [i]) for i in some}
            for chosen in (some, some[1:], some[:-1], [some[0], *some[:-1]]):  # all, without one, one in another's place
                together = self._on(args, examples, chosen)
                alone = torch.stack([single[i] for i in chosen])
                if not _same(together, self._reduced(alone)):
                    raise NotIsolated(f"{_MIXED} {_RATHER}")

    def _on(self, args: tuple[Any, ...], examples: int, rows: list[int]) -> Tensor:
        return self._fn(*(arg if isinstance(arg, nn.Module) else _only(arg, examples, rows) for arg in args)).detach()


class _Mean(torch.autograd.Function):
    """The mean of the losses that count, the first ones; their gradients are divided by the number of all.

    So are those of any loss that the loop makes of this one, and of a loss of its own: whoever reads them multiplies by that number.
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


_MIXED = "The loss of a batch is not the mean of its examples' own losses: one example changes what another one counts."
_MEANT = "If the mean of the function over single examples is what you mean, say private.loss(fn, per_example=True)."
_RATHER = (
    "Class weights, ignore_index, mixup and contrastive losses do this: give private.loss a function of outputs and targets, which is "
    "evaluated for each example alone."
)


class _Rows:
    """A function's arguments, of which every tensor has one row for each example."""

    def __init__(self, fn: Callable[..., Tensor], leaves: list[Any], spec: Any) -> None:
        self.fn, self.leaves, self._spec = fn, leaves, spec
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def of(self, fn: Callable[..., Tensor]) -> _Rows:
        return _Rows(fn, self.leaves, self._spec)

    def apart(self) -> _Rows:
        """Copies of the tensors: gradients of a comparison do not reach the model."""
        leaves = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        ]
        return _Rows(self.fn, leaves, self._spec)

    def together(self) -> Tensor:
        return _mean_of_each(self.fn(*tree_unflatten(self.leaves, self._spec)))

    def at_once(self) -> Tensor:
        return torch.func.vmap(self._one, randomness="different")(*(self.leaves[i] for i in self._places))  # type: ignore[no-any-return]

    def one_by_one(self) -> Tensor:
        return torch.stack([self._one(*(self.leaves[i][k] for i in self._places)) for k in range(self.count)])

    @property
    def count(self) -> int:
        """Of examples."""
        return len(self.leaves[self._places[0]])

    def _one(self, *rows: Tensor) -> Tensor:
        leaves = list(self.leaves)
        for place, row in zip(self._places, rows, strict=True):
            leaves[place] = row[None]
        return self.fn(*tree_unflatten(leaves, self._spec)).mean()


def has_rows(data: Any, examples: int) -> bool:
    """Whether every tensor in ``data`` has one row for each example."""
    return all(leaf.dim() > 0 and len(leaf) == examples for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor))


def _require_rows(leaves: list[Any], examples: int, remedy: str) -> None:
    strange = next((leaf for leaf in leaves if not has_rows(leaf, examples)), None)
    if strange is not None:
        raise ArgumentError(
            f"Expected every tensor that the loss is given to have {examples} rows, one for each example, got one of shape "
            f"{tuple(strange.shape)}. {remedy}"
        )


def _mean_of_each(losses: Tensor) -> Tensor:
    """(n,) from (n, ...): the mean over each example's own; a scalar stays one."""
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def _unreduced(fn: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    if isinstance(fn, nn.Module):
        if not isinstance(getattr(fn, "reduction", None), str):
            return None
        form = copy.copy(fn)
        form.reduction = "none"  # type: ignore[assignment]
        return form
    return partial(fn, reduction="none")


def _same(a: Tensor, b: Tensor) -> bool:
    allowed = _SAME.get(b.dtype, _ROUNDED)
    a, b = a.detach(), b.detach()
    return bool((a - b).abs().max() <= allowed * b.abs().max()) or (bool(a.isnan().any()) and bool(b.isnan().any()))


def _same_gradient(whole: Tensor, alone: Tensor, leaves: list[Any]) -> bool:
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not wanted:
        return True
    pairs = (torch.autograd.grad(loss, wanted, materialize_grads=True) for loss in (whole, alone))
    return all(_same(a, b) for a, b in zip(*pairs, strict=True))


def _only(data: Any, examples: int, rows: list[int]) -> Any:
    leaves, spec = tree_flatten(data)
    _require_rows(leaves, examples, "Give private.loss a function of outputs and targets.")
    return tree_unflatten([leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def packing(model: nn.Module) -> list[nn.Module]:
    """Layers with frozen weights that are no floating-point numbers: bitsandbytes packs them anew for a pass outside of training."""
    return [m for m in model.modules() if any(not p.is_floating_point() for p in m.parameters(recurse=False))]


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """A pass that leaves no trace: no gradients, no dropout, the random state and the modules' modes as they were."""
    packed = set(packing(model))
    training = [module for module in model.modules() if module.training and module not in packed]
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True

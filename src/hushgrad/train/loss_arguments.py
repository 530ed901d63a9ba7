"""The arguments of a loss: tensors with one row for each example, in any container, and subsets of these examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping._torch import is_autocast
from hushgrad.clipping.proof.inputs import inside, leaves, mapped
from hushgrad.errors import ArgumentError, CaptureError


class Arguments:
    """A function's arguments; every tensor in them has one row for each example.

    Autocast does not act inside of vmap. So under it the function is called without it, in single precision, whichever way.
    """

    def __init__(self, fn: Callable[..., Tensor], args: Any) -> None:
        self._cast = is_autocast()
        self.fn, self.args = fn, mapped(args, _widened) if self._cast else args
        self.tensors = leaves(self.args)

    def of(self, fn: Callable[..., Tensor]) -> Arguments:
        """The same arguments for another function."""
        return Arguments(fn, self.args)

    def apart(self) -> Arguments:
        """With copies of the tensors, so that gradients of a comparison do not reach the model."""
        return Arguments(self.fn, mapped(self.args, lambda t: t.detach().clone().requires_grad_(t.requires_grad)))

    def only(self, which: Tensor) -> Arguments:
        """The same for some examples."""
        return Arguments(self.fn, mapped(self.args, lambda t: t.detach()[which].requires_grad_(t.requires_grad)))

    def together(self) -> Tensor:
        """The function's result for all examples: one number, or one for each. It gets copies, in which it may write."""
        return _mean_of_each(self._called(mapped(self.args, torch.clone)))

    def at_once(self) -> Tensor:
        """Its result for each example alone, by vmap."""
        return torch.func.vmap(self._one, randomness="different")(*self.tensors)  # type: ignore[no-any-return]

    def one_by_one(self) -> Tensor:
        """The same in a loop, each of copies of its rows: a view knows the whole batch."""
        return torch.stack([self.one(k) for k in range(self.count)])

    def one(self, k: int) -> Tensor:
        """Its result for one example."""
        return self._one(*(t[k].clone() for t in self.tensors))

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(self.tensors[0])

    def _one(self, *rows: Tensor) -> Tensor:
        rest = iter(rows)
        return self._called(mapped(self.args, lambda _: next(rest)[None])).mean()

    def _called(self, args: Any) -> Tensor:
        if not self._cast:
            return self.fn(*args)
        with ExitStack() as off:
            for device in {t.device.type for t in self.tensors}:
                off.enter_context(torch.autocast(device, enabled=False))
            return self.fn(*args)


def has_rows(data: Any, examples: int) -> bool:
    """Whether every tensor in ``data`` has one row for each example."""
    return all(isinstance(t, Tensor) and t.dim() > 0 and len(t) == examples for t in leaves(data))


def rows_of(data: Any, examples: int, remedy: str) -> list[Tensor]:
    """All tensors in ``data``, each with a row for each example; an object that may hide tensors is refused."""
    found = leaves(data)
    strange = next((t for t in found if not has_rows(t, examples)), None)
    if strange is not None:
        shape = f"of shape {tuple(strange.shape)}" if isinstance(strange, Tensor) else f"in a {type(strange).__name__}"
        raise ArgumentError(
            f"Expected every tensor that the loss is given to have {examples} rows, one for each example, got one {shape}. {remedy}"
        )
    closed = _closed(data)
    if closed is not None:
        raise ArgumentError(
            f"Expected the loss to be given tensors, or tuples, lists, dicts or dataclasses of them, got a {type(closed).__name__}, of "
            "which single examples cannot be taken. Give it the tensors themselves."
        )
    return found


def gradients(loss: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a loss that is tried.

    Raises:
        CaptureError: it has written over what they are computed from.
    """
    try:
        return torch.autograd.grad(loss, wanted, materialize_grads=True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise CaptureError(
            "The loss writes into a tensor after it has computed with it (an operation whose name ends in _, or t[...] = ...), so it has "
            "no gradient any more. Let it make a new tensor: t = t.clamp(0, 1) in place of t.clamp_(0, 1), or begin with t = t.clone()."
        ) from error


def _widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _closed(value: Any) -> Any:
    """An object that holds tensors but is none of the known containers; None if there is none."""
    if isinstance(value, (Tensor, nn.Module)):
        return None
    if leaves(getattr(value, "__dict__", None)) and not leaves(value):
        return value
    return next((found for one in inside(value) if (found := _closed(one)) is not None), None)


def _mean_of_each(losses: Tensor) -> Tensor:
    """(n,) from (n, ...): the mean over each example's own numbers; a scalar stays one."""
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def ordinary(data: Any, losses: Tensor) -> Tensor:
    """Which examples have only finite numbers in their rows. For the others there is no mean to compare."""
    made = ~losses.detach().isinf()  # NaN from finite rows may be a mean over nothing
    for t in leaves(data):
        finite = t.detach().isfinite()
        made = made & (finite.flatten(1).all(1) if t.dim() > 1 else finite)
    return made

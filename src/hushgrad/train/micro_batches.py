"""Micro-batches that are cut first and run afterwards: ``parts = list(batch.split(size))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from hushgrad.clipping.proof.inputs import tensors_in
from hushgrad.errors import CaptureError
from hushgrad.sampling.batch import Batch

_Place = tuple[int, torch.Size]


class Parts:
    """Recognises, when the model is called, which micro-batch it is called with.

    A loop over ``batch.split(size)`` runs each part before the next one is cut, and needs none of this. Parts that wait in a list are
    recognised by their memory: the tensors that the model gets are those of one part. No part is run twice.
    """

    def __init__(self, model: nn.Module, announce: Callable[[Batch], None]) -> None:
        self._model, self._announce = model, announce
        self._handle: Any = None
        self.clear()

    def clear(self) -> None:
        """Called when a whole batch is handed out: it has no parts yet."""
        self.any = False
        self.listed = False  # whether a part waited while the next one was cut
        self._cut = 0
        self._waiting: dict[int, Batch] = {}  # parts that were not run yet; others may be freed
        self._at: dict[_Place, tuple[ReferenceType[Tensor], int]] = {}  # the part that owns the tensor, while it is alive
        self._passed = True  # whether the part that was cut last was run

    def issued(self, part: Batch) -> None:
        """Called when the loader hands out a part of a batch; from the first one of a run on, the model's passes are watched."""
        if part.part == 0:
            self.clear()
        if self._handle is None:  # before the capture's own hook, which needs to know the part
            hook = _Hook(self._model, self._enter)
            self._handle = self._model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        self.listed = self.listed or not self._passed
        if not self.listed:  # parts that were run are mostly freed
            self._at = {place: known for place, known in self._at.items() if known[0]() is not None}
        self._waiting[self._cut] = part
        self._at |= {_place(leaf): (ref(leaf), self._cut) for leaf in tensors_in(part) if leaf.numel()}
        self.any, self._passed, self._cut = True, False, self._cut + 1

    def remove(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._passed and not self.listed:
            return
        self._passed = True
        found = (self._at.get(_place(leaf)) for leaf in tensors_in((args, kwargs)) if leaf.numel())
        own = {number for one in found if one is not None and one[0]() is not None for number in one[1:]}
        if not self.listed and own <= self._waiting.keys():
            self._waiting.clear()
            return
        if not own:
            return  # an evaluation on other data; or a changed part, which will be missing
        if len(own) > 1 or not own <= self._waiting.keys():
            raise CaptureError(
                "A micro-batch was passed twice in one step, or two in one pass. Pass each part of batch.split(size) exactly once."
            )
        self._announce(self._waiting.pop(own.pop()))

    def check(self) -> None:
        """Raise if a part that waited in a list was never run.

        Raises:
            CaptureError: nothing has been released.
        """
        waiting = [number for number, part in self._waiting.items() if part.examples]
        if self.listed and waiting:
            raise CaptureError(
                f"Micro-batch {waiting[0]} of this batch was not passed to the model, or not as it was cut. Loop over "
                "batch.split(size) itself, and pass each part before the next one."
            )


class _Hook:
    """Tells when the model itself is called. In a copy of the model this hook does nothing."""

    def __init__(self, model: nn.Module | None = None, enter: Callable[[Any, Any], None] | None = None) -> None:
        self._model, self._enter = model, enter

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._enter is not None and module is self._model and torch.is_grad_enabled():
            self._enter(args, kwargs)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _place(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.shape

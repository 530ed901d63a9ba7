"""What a loop does to a batch between the loader, the model and the loss: nothing that is not seen, or the user vouches for it.

The proof of a model begins at its inputs, and a loss is taken of single rows of what it is given. Mixup, centring by the batch, or a
mean over the outputs in between let one example into the rows of another, and neither of the two sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture
from hushgrad.clipping._torch import memory_of
from hushgrad.clipping.runs import leaves_of
from hushgrad.sampling.batch import Batch

__all__ = ["PREPARED", "Handed"]

PREPARED = (
    "What the loop or its collate function does to a batch is vouched for by the user: that it treats every example by itself was not "
    "tested. It is where it is done by the data set, or inside the model"
)


class Handed:
    """Whether the model is given what the loader handed out, and a loss what the loader and the model did.

    A tensor is known by its memory, which nobody has written to since; or it has the same values on another device or in another
    precision, which is compared in steps 1, 2, 4, 8 and so on.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.prepared = False  # some step was taken on other tensors
        # Tensors by their id, with the number of times that they were written to; alive, so that nobody else gets their memory.
        self._batch: dict[int, tuple[Tensor, int]] = {}  # of this step's
        self._outputs: dict[int, tuple[Tensor, int]] = {}  # of the last pass
        self._steps = 0  # batches so far
        self._seen = False  # what runs now is tried on single examples

    def attach(self, model: nn.Module) -> Any:
        """Watch the model's passes; the handle to remove the hook with."""
        return model.register_forward_hook(_Hook(model, self._passed), with_kwargs=True)

    def issued(self, batch: Batch, *, whole: bool) -> None:
        """The loader hands out a batch (``whole``) or one of its micro-batches."""
        if whole:
            self._steps += 1
            self._batch, self._outputs = {}, {}
        # Its class is none that torch knows as a container.
        items: Any = [batch] if isinstance(batch, Tensor) else dict(batch) if isinstance(batch, dict) else list(batch)  # type: ignore[call-overload]
        for leaf in leaves_of(items):
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                self._batch[id(leaf)] = leaf, leaf._version

    def forget(self) -> None:
        """The step is taken."""
        self._batch, self._outputs = {}, {}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """What happens inside is tried on single examples: nobody has to vouch for it."""
        before, self._seen = self._seen, True
        try:
            yield
        finally:
            self._seen = before

    def to_loss(self, leaves: list[Any]) -> None:
        """A loss of the run is given these."""
        if not self._seen and not self._all_known(leaves):
            self.prepared = True

    def _passed(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._batch or self._seen:
            return
        # Most models have one output and plain inputs, which need no walk.
        made = [output] if type(output) is Tensor else leaves_of(output)
        plain = not kwargs and {*map(type, args)} <= {Tensor}
        if not self._all_known(args if plain else leaves_of((args, kwargs))):
            if self._capture.aside:
                return
            for leaf in made:
                if isinstance(leaf, Tensor) and leaf.requires_grad:  # an evaluation of other data is no part of the step
                    leaf.register_hook(self._reached)
        self._outputs = {}
        for leaf in made:
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                self._outputs[id(leaf)] = leaf, leaf._version

    def _reached(self, _: Tensor) -> None:
        self.prepared = True

    def _all_known(self, leaves: Iterable[Any]) -> bool:
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.numel() or leaf.is_inference():
                continue
            tensor, version = self._batch.get(id(leaf)) or self._outputs.get(id(leaf)) or (None, 0)
            if not (self._is_known(leaf) if tensor is None else leaf._version == version):
                return False
        return True

    def _is_known(self, leaf: Tensor) -> bool:
        """Whether it is a view of a known tensor, which nobody has written to; or a copy."""
        memory = memory_of(leaf)
        for tensor, version in (*self._batch.values(), *self._outputs.values()):
            if tensor.numel() and memory_of(tensor) == memory:
                return bool(leaf._version == version)
        return self._is_copy(leaf)

    def _is_copy(self, leaf: Tensor) -> bool:
        """Whether it has the values of a known tensor; asked now and then."""
        known = (*self._batch.values(), *self._outputs.values())
        alike = [t for t, version in known if t.shape == leaf.shape and t._version == version]
        due = self._steps & (self._steps - 1) == 0
        return bool(alike) and (not due or any(torch.equal(t.detach().to(leaf), leaf.detach()) for t in alike))


class _Hook:
    """Says what the model itself was called with. A copy of the model has the hook as well, where it says nothing."""

    def __init__(self, model: nn.Module | None = None, passed: Callable[[Any, Any, Any], None] | None = None) -> None:
        self._model, self._passed = model, passed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._passed is not None and module is self._model and torch.is_grad_enabled():
            self._passed(args, kwargs, output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()

"""What is known of a run's losses: which passes came through one of them, and what the loop did between loader, model and loss.

The proof of a model begins at its inputs, and a loss is taken of single rows of what it is given. Mixup, centring by the batch, or a
mean over the outputs in between let one example into the rows of another, and neither of the two sees it: it is seen here, or the
user vouches for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hushgrad.clipping import Capture
from hushgrad.clipping._torch import memory_of, transform
from hushgrad.clipping.proof.inputs import tensors_in
from hushgrad.errors import CaptureError
from hushgrad.sampling.batch import Batch

__all__ = ["PREPARED", "ROUNDED", "VOUCHED", "Hook", "Losses"]

PREPARED = (
    "What the loop, the data set or its collate function does to a batch is vouched for by the user: that it treats every example by "
    "itself was not shown. It is inside the model, and where a data set draws from torch's, numpy's or Python's own random numbers"
)

VOUCHED = "The loss is vouched for by the user: that it is a mean over the examples was not shown"

ROUNDED = (
    "Means over the batch were differentiated in half precision: whether one example is there moves the rounding of all others, which no "
    "bound covers. Use private.loss(fn), or sums"
)

_LARGE = 1 << 18  # numbers of an output that is not kept alive for this: a vocabulary's logits


class Losses:
    """All losses of a run: how many examples a pass has, and whether every step's passes went through one of them."""

    def __init__(self, capture: Capture, *, together: bool = False, must: bool = False) -> None:
        self.capture, self.must = capture, must  # whether every pass must come through one of them
        self.together = together  # all processes must make the same passes, so none can try a loss by itself
        self.examples: int | None = None  # of the pass that was issued last; None: not by the run's loader
        self.padding = 0  # of them, at the end, that do not count
        self.fixed = False  # all passes have one shape
        self.vouched = False
        self.tried = False  # whoever loops tries what a pass is the loss of
        self.known: dict[Any, Any] = {}  # what the first function of a line of the program held
        self.rounded = False  # some step's gradients were those of a mean, in half precision
        self.handed = Handed(capture)
        self._covered = 0
        self._begun = False  # a backward pass that runs begins at a loss of the run

    def issued(self, batch: Batch, *, whole: bool, listed: bool = False) -> None:
        """The loader hands out a batch (``whole``) or one of its micro-batches, of which several wait in a list (``listed``)."""
        self.examples, self.padding, self.fixed = batch.examples, batch.padding, batch._fixed
        if whole:
            self._covered = 0
        self.handed.issued(batch, whole=whole, listed=listed)

    def covered(self, loss: Tensor, *, alone: bool = False) -> Tensor:
        """``loss`` of the pass that was issued last, known to be a mean over its examples; counted when ``loss.backward()`` is called.

        Where it is a term of something else nothing is known of the other terms, unless the caller says that it is ``alone``.
        """
        counted = (self.examples or 0) - self.padding

        def count(_: Tensor) -> None:
            self._covered += counted if alone or self._begun else 0

        if loss.requires_grad:
            loss.register_hook(count)
            if not alone:
                self._begins(loss, self.examples or 1)
        return loss

    def _begins(self, loss: Tensor, examples: int) -> None:
        """Have ``loss.backward()`` say that it begins there; with a mean, begin with the gradient of the sum.

        Divided by their number, the ``examples`` then get theirs without rounding.
        """
        by = examples if self.capture.loss_reduction == "mean" else 1

        def backward(
            gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
        ) -> None:
            if not retain_graph:
                del loss.backward  # a circle, which would keep the graph until the garbage collector comes
            first = torch.ones_like(loss) if gradient is None else gradient
            self._begun = True
            try:
                with self.capture.summing():
                    torch.autograd.backward(loss, first * by, retain_graph, create_graph, inputs=inputs)
            finally:
                self._begun = False

        loss.backward = backward  # type: ignore[method-assign]

    def settle(self, examples: int | None) -> None:
        """A step over ``examples`` was taken; None: on a batch from elsewhere."""
        if examples is None or not self._complete(examples):
            self.vouched = True
            divided = self.capture.loss_reduction == "mean" and not self.fixed  # by what is not public
            self.rounded = self.rounded or (divided and self.capture.rounded)
        self._covered = 0
        self.handed.forget()

    def _complete(self, examples: int) -> bool:
        if examples:  # a closure may be asked several times
            return self._covered > 0 and self._covered % examples == 0
        return self._covered == 0

    def require(self, examples: int) -> None:
        """Refuse a step of a certified run whose loss may be a mean: it divides everybody's gradient by how many there are.

        Raises:
            CaptureError: nothing has been released.
        """
        if self.must and not self._complete(examples):
            raise CaptureError(
                "A certified run needs the sum of its examples' losses, and nothing else. Use loss = private.loss(fn), which takes it, and "
                "call loss(...).backward() itself, not that of a multiple or of a sum with other terms; or give the sum yourself and say "
                'so: make_private(..., loss_reduction="sum").'
            )

    def summed(self, mean: Tensor, examples: int) -> Tensor:
        """A mean over ``examples`` as the run's loss: in a certified run their sum."""
        return mean * examples if self.capture.loss_reduction == "sum" else mean

    @property
    def notes(self) -> tuple[str, ...]:
        """What a guarantee has to say of the losses."""
        said = ((VOUCHED, self.vouched), (PREPARED, self.handed.prepared), (ROUNDED, self.rounded))
        return tuple(note for note, holds in said if holds)


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
        self._parts: dict[int, tuple[Tensor, int]] = {}  # of its micro-batches that are not passed yet, and of the last one
        self._outputs: dict[int, tuple[Tensor, int]] = {}  # of the last pass
        self._large: WeakIdKeyDictionary | None = (
            None  # its large outputs, until the program has let go of them and of their views
        )
        self._steps = 0  # batches so far
        self._seen = False  # what runs now is tried on single examples

    def attach(self, model: nn.Module) -> Any:
        """Watch the model's passes; the handle to remove the hook with."""
        return model.register_forward_hook(Hook(model, self._passed), with_kwargs=True)

    def issued(self, batch: Batch, *, whole: bool, listed: bool) -> None:
        """The loader hands out a batch (``whole``) or one of its micro-batches, of which several wait in a list (``listed``)."""
        if whole:
            self._steps += 1
            self._batch, self._outputs, self._large = {}, {}, None
        if not listed:
            self._parts = {}
        known = self._batch if whole else self._parts
        items: Any = batch
        plain = isinstance(items, list) and {*map(type, items)} <= {Tensor}  # as most are
        for leaf in items if plain else tensors_in(items):
            if not leaf.is_inference():
                known[id(leaf)] = leaf, leaf._version

    @property
    def is_open(self) -> bool:
        """Whether a batch is out whose step is still to come."""
        return bool(self._batch)

    @property
    def is_seen(self) -> bool:
        """Whether what runs now is tried on single examples."""
        return self._seen

    def forget(self) -> None:
        """The step is taken."""
        self._batch, self._parts, self._outputs, self._large = {}, {}, {}, None

    @contextmanager
    def seen(self) -> Iterator[None]:
        """What happens inside is tried on single examples: nobody has to vouch for it."""
        before, self._seen = self._seen, True
        try:
            yield
        finally:
            self._seen = before

    def to_loss(self, leaves: list[Tensor]) -> None:
        """A loss of the run is given these."""
        if not self._seen and not self._all_known(leaves):
            self.prepared = True

    def _passed(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (self._batch or self._parts) or self._seen:
            return
        # Most models have one output and plain inputs, which need no walk.
        made = [output] if type(output) is Tensor else tensors_in(output)
        plain = not kwargs and {*map(type, args)} <= {Tensor}
        if not self._all_known(args if plain else tensors_in((args, kwargs))):
            if self._capture.aside:
                return
            for leaf in made:
                if leaf.requires_grad:  # an evaluation of other data is no part of the step
                    leaf.register_hook(self._reached)
        self._outputs, self._large = {}, None
        for leaf in made:
            if not leaf.is_inference() and not (leaf.numel() > _LARGE and leaf.requires_grad and self._weakly(leaf)):
                self._outputs[id(leaf)] = leaf, leaf._version

    def _weakly(self, leaf: Tensor) -> bool:
        """A large output is known from here on without being kept alive, as it weighs as much as all the rest.

        Not in half precision, where a loss is usually given a copy of it, which only the values tell.
        """
        if leaf.element_size() <= 2:
            leaf.register_hook(self._back)
            return False
        self._large = WeakIdKeyDictionary() if self._large is None else self._large
        self._large[leaf] = leaf._version
        return True

    def _back(self, _: Tensor) -> None:
        """A large output has had its gradient: while the next pass runs, nobody holds it for this."""
        self._outputs = {}

    def _reached(self, _: Tensor) -> None:
        self.prepared = True

    def _all_known(self, leaves: Iterable[Tensor]) -> bool:
        for leaf in leaves:
            if not leaf.numel() or leaf.is_inference():
                continue
            at = id(leaf)
            tensor, version = self._batch.get(at) or self._parts.get(at) or self._outputs.get(at) or (None, 0)
            if not (self._is_known(leaf) if tensor is None else leaf._version == version):
                return False
        return True

    def _is_known(self, leaf: Tensor) -> bool:
        """Whether it is a view of a known tensor, which nobody has written to; or a copy."""
        memory = memory_of(leaf)
        for tensor, version in self._known():
            if tensor.numel() and memory_of(tensor) == memory:
                return bool(leaf._version == version)
        return self._is_copy(leaf)

    def _known(self) -> Iterator[tuple[Tensor, int]]:
        large = () if self._large is None else self._large.items()
        return chain(self._batch.values(), self._parts.values(), self._outputs.values(), large)

    def _is_copy(self, leaf: Tensor) -> bool:
        """Whether it has the values of a known tensor; asked now and then. A proof's copies are not: its outputs, held, hold its graph."""
        if self._capture.proving:
            return False
        alike = [t for t, version in self._known() if t.shape == leaf.shape and t._version == version]
        due = self._steps & (self._steps - 1) == 0
        return bool(alike) and (not due or any(torch.equal(t.detach().to(leaf), leaf.detach()) for t in alike))


class Hook:
    """Says what the model itself was called with. A copy of the model has the hook as well, where it says nothing."""

    def __init__(self, model: nn.Module | None = None, passed: Callable[[Any, Any, Any], None] | None = None) -> None:
        self._model, self._passed = model, passed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._passed is not None and module is self._model and torch.is_grad_enabled() and transform() is None:
            self._passed(args, kwargs, output)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()

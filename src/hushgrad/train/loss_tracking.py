"""Tracks a run's losses: which passes went through one, and what the loop did between loader, model and loss.

The proof of a model begins at its inputs, and a loss sees single rows of what it is given. Mixup, centring by the batch, or a mean over
the outputs in between lets one example into the rows of another, and neither of the two can see it. It is detected here; otherwise the
user vouches for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping import Capture
from hushgrad.clipping._torch import NodeHooks, transform
from hushgrad.clipping.fingerprint import fingerprint
from hushgrad.clipping.proof.inputs import tensors_in
from hushgrad.errors import CaptureError
from hushgrad.sampling.batch import Batch
from hushgrad.train.loop_writes import LoopWrites
from hushgrad.train.padded_examples import PaddedExamples
from hushgrad.train.passed_data import FEW, LARGE, RARELY, PassedData, is_still

PREPARED = (
    "What the loop, the data set or its collate function does to a batch is vouched for by the user: that it treats every example by "
    "itself was not shown. It is inside the model, and where a data set draws from torch's, numpy's or Python's own random numbers. "
    "So are numbers, words and arrays that it gives to the model or a loss and that change from pass to pass, and whatever it writes "
    "where a pass reads it: attributes, hooks, globals, arrays, weights"
)

VOUCHED = "The loss is vouched for by the user: that it is a mean over the examples was not shown"

ROUNDED = (
    "Means over the batch were differentiated in half precision: whether one example is there moves the rounding of all others, which no "
    "bound covers. Use private.loss(fn), or sums"
)

_TENSORS = {Tensor}


class Losses:
    """All losses of a run: how many examples a pass has, and whether every step's passes went through one of them."""

    def __init__(self, capture: Capture, *, steps: int, together: bool = False, must: bool = False, checked: bool = True) -> None:
        self.capture, self.must = capture, must  # whether every pass must come through one of them
        self.together = together  # all processes must make the same passes, so none can try a loss by itself
        self.examples: int | None = None  # of the pass that was issued last; None: not by the run's loader
        self.padding = 0  # of them, at the end, that do not count
        self.fixed = False  # all passes have one shape
        self.vouched = False
        self.tried = False  # whoever loops tries what a pass is the loss of
        self.remedy: str | None = None  # of whoever loops, for a loss of the model's own
        self.known: dict[Any, Any] = {}  # what the first function of a line of the program held
        self.rounded = False  # some step's gradients were those of a mean, in half precision
        self.handed = Handed(capture)
        self._writes = capture.looks = LoopWrites(capture.model, steps, self.handed.prepare)
        self._attributes = capture.attributes  # of the model
        self.padded = PaddedExamples(capture, asked=checked and not together)
        self.leaving: Callable[[], AbstractContextManager[None]] = nullcontext  # what a loss is computed inside of
        self.due_notes: tuple[str, ...] = ()  # what the step that is being taken adds
        self.to_check = False  # the model's own loss, or padding, is checked before this step
        self._covered = 0
        self._by: Any = None  # what has made the loss of the pass before
        self._begun = False  # a backward pass that runs begins at a loss of the run

    def issued(self, batch: Batch, *, whole: bool, listed: bool = False) -> None:
        """Called when the loader hands out a batch (``whole``) or one of its micro-batches; ``listed``: several wait in a list."""
        self.examples, self.padding, self.fixed = batch.examples, batch.padding, batch._fixed
        writes = self._writes
        writes.passes += 1
        if whole:
            writes.due = False
            if not writes.looked < batch.step < writes.next:
                writes.issued(batch.step, trained=not self.capture.tables)
            self._covered = 0
            if batch._smallest is not None or self.padded.watching:
                self.padded.issued(batch)
            self.to_check = self.handed.padded = self.padded.watching
        self.handed.issued(batch, whole=whole, listed=listed)

    def covered(self, loss: Tensor, *, alone: bool = False, by: Any = None) -> Tensor:
        """``loss`` of the pass that was issued last, known to be a mean over its examples; counted when ``loss.backward()`` is called.

        If it becomes a term of something else, nothing is known about the other terms, unless the caller says that it is ``alone``.
        Which of several functions a pass takes the loss ``by`` may follow from its data: the user vouches for that.
        """
        counted = (self.examples or 0) - self.padding

        def count(_: Tensor) -> None:
            self._covered += counted if alone or self._begun else 0
            self.vouched = self.vouched or self._by not in (None, by)
            self._by = by

        if loss.requires_grad:
            loss.register_hook(count)
            if not alone:
                self._begins(loss, self.examples or 1)
        return loss

    def _begins(self, loss: Tensor, examples: int) -> None:
        """Make ``loss.backward()`` record that it starts there; for a mean, start with the gradient of the sum.

        Divided by their number, the ``examples`` then get theirs without rounding.
        """
        by = examples if self.capture.loss_reduction == "mean" else 1

        hooks = len(loss._backward_hooks or ())  # so far

        def backward(
            gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
        ) -> None:
            if not retain_graph:
                del loss.backward  # a circle, which would keep the graph until the garbage collector comes
            first = torch.ones_like(loss) if gradient is None else gradient
            given = gradient is not None and not bool((gradient == 1).all())
            hooked = len(loss._backward_hooks or ()) > hooks or self.handed.is_hooked()
            self.handed.prepared = self.handed.prepared or self.handed.is_rewritten()
            if self.capture.looks is not None:
                self.capture.looks.backward()
            self._begun = not (given or hooked)  # else the loop has put something in between, and nothing is known of that
            try:
                with self.capture.summing():
                    torch.autograd.backward(loss, first * by, retain_graph, create_graph, inputs=inputs)
            finally:
                self._begun = False

        loss.backward = backward  # type: ignore[method-assign]

    def weigh(self, examples: int | None) -> None:
        """A step over ``examples`` is about to be taken; None: on a batch from elsewhere."""
        # A closure may be asked several times.
        complete = self._covered == 0 if not examples else self._covered > 0 and self._covered % examples == 0
        if self._writes.kept:
            self._writes.before_step()
        self.due_notes = ()
        if examples is None or not complete:
            divided = self.capture.loss_reduction == "mean" and not self.fixed  # by what is not public
            self.due_notes = (VOUCHED, ROUNDED) if divided and self.capture.rounded else (VOUCHED,)
        if self._attributes.were_set:
            self.due_notes += (PREPARED,)

    def settle(self) -> None:
        """The step was taken."""
        if self.due_notes and not (self.vouched and self.due_notes == (VOUCHED,)):  # something new
            for note in self.due_notes:
                self.learn(note)
        self.due_notes, self._covered = (), 0
        self.handed.forget()

    def learn(self, note: str) -> bool:
        """Have the guarantee say ``note``, if it is one about losses."""
        self.vouched, self.rounded = self.vouched or note == VOUCHED, self.rounded or note == ROUNDED
        self.handed.prepared = self.handed.prepared or note == PREPARED
        return note in (VOUCHED, ROUNDED, PREPARED)

    def require(self, examples: int) -> None:
        """Refuse a step of a certified run whose loss may be a mean: it divides all gradients by the number of examples.

        Raises:
            CaptureError: nothing has been released.
        """
        self.weigh(examples)
        if self.must and VOUCHED in self.due_notes:
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
        """What a guarantee must say about the losses."""
        said = ((VOUCHED, self.vouched), (PREPARED, self.handed.prepared), (ROUNDED, self.rounded))
        return tuple(note for note, holds in said if holds)


class Handed(PassedData):
    """Checks that the model is given what the loader handed out, and a loss what the loader and the model did."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture)
        self.also: Callable[[tuple[Any, ...], dict[str, Any], Any], None] | None = None  # called after passes with other outputs
        self.padded = False  # whether it is called after every pass of this step
        self._items: Any = None  # the step's batch, as the loop has it
        self._model: nn.Module | None = None

    def attach(self, model: nn.Module) -> Any:
        """Be a hook of the model's passes; returns the handle to remove it with."""
        self._model = model
        return model.register_forward_hook(self, with_kwargs=True)

    def issued(self, batch: Batch, *, whole: bool, listed: bool) -> None:
        """Called when the loader hands out a batch (``whole``) or one of its micro-batches; ``listed``: several wait in a list."""
        if not whole and not self._seen and not self._all_known(tensors_in(self._items)):  # the loop has changed it since
            self.prepared = True
        if whole:
            self._items = batch
            looks, self._due = self._capture.looks, not self._begun or self._lot.random() * RARELY < 1
            self._exact = self._due or (looks is not None and looks.due)
            if not self._begun:
                self._capture.look_at_attributes()
            self._begun = True
            self._batch, self._outputs, self._large = {}, {}, None
        self._examples, self._whole = batch.examples, batch.examples if whole else self._whole
        if not listed:
            self._parts = {}
        known = self._batch if whole else self._parts
        items: Any = batch
        # As most are; a packed sequence is a tuple, too.
        plain = isinstance(items, (list, tuple)) and {*map(type, items)} <= _TENSORS and not isinstance(items, PackedSequence)
        if plain:
            self._own, self._of_all = set(), []
        else:
            self._beside_tensors(items, batch.examples)
        for leaf in items if plain else tensors_in(items):
            if not leaf.is_inference():
                few = leaf.numel() <= FEW and leaf.is_cpu and type(leaf) is Tensor and leaf.layout is torch.strided
                held = leaf.detach().clone() if few else fingerprint(leaf) if self._exact and leaf.is_cpu else None
                known[id(leaf)] = leaf, leaf._version, held

    def prepare(self) -> None:
        """Called when the loop was found to have made something of the data that reaches a pass."""
        self.prepared = True

    def forget(self) -> None:
        """Called after the step."""
        self._items, self._batch, self._parts, self._outputs, self._large, self._hooks = None, {}, {}, {}, None, []

    def to_loss(self, leaves: list[Tensor]) -> None:
        """Called with what a loss of the run is given."""
        if not self._seen and not self._all_known(leaves):
            self.prepared = True
        for leaf in leaves:
            if leaf.requires_grad and id(leaf) not in self._outputs:  # a view or copy of one, which the loop has made
                self._hooks.append((ref(leaf), 0))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record what the model itself was called with."""
        if module is not self._model or not torch.is_grad_enabled() or transform() is not None:
            return
        if self.also is not None and (self.padded or type(output) is not Tensor or not output.dim()):
            self.also(args, kwargs, output)
        if not (self._batch or self._parts) or self._seen:
            return
        # Most models have one output and plain inputs, which need no walk.
        made = [output] if type(output) is Tensor else tensors_in(output)
        plain = not kwargs and {*map(type, args)} <= _TENSORS
        changed = not plain and not self._capture.aside and self.is_new("the model", (args, kwargs))
        if changed or not self._all_known(args if plain else tensors_in((args, kwargs))):
            if self._capture.aside:
                return
            for leaf in made:
                if leaf.requires_grad:  # an evaluation of other data is no part of the step
                    leaf.register_hook(self._reached)
        self._outputs, self._large, self._hooks, self._on_nodes = {}, None, [], NodeHooks.count
        for leaf in made:
            if leaf.requires_grad:
                self._hooks.append((ref(leaf), len(leaf._backward_hooks or ())))
            if not leaf.is_inference() and not (leaf.numel() > LARGE and leaf.requires_grad and self._weakly(leaf)):
                few = leaf.numel() <= FEW and leaf.is_cpu and type(leaf) is Tensor and leaf.layout is torch.strided
                held = leaf.detach().clone() if few else fingerprint(leaf) if self._exact and leaf.is_cpu else None
                self._outputs[id(leaf)] = leaf, leaf._version, held

    def __reduce__(self) -> tuple[type[InCopy], tuple[()]]:
        return InCopy, ()

    def _reached(self, _: Tensor) -> None:
        self.prepared = True

    def _all_known(self, leaves: Iterable[Tensor]) -> bool:
        for leaf in leaves:
            if not leaf.numel() or leaf.is_inference():
                continue
            at = id(leaf)
            tensor, version, held = self._batch.get(at) or self._parts.get(at) or self._outputs.get(at) or (None, 0, None)
            same = (
                tensor is not None
                and leaf._version == version
                and (held is None or (type(held) is Tensor and torch.equal(held, leaf)))
            )
            if not same and not (self._is_known(leaf) if tensor is None else is_still(tensor, version, held)):
                return False
        return True


class InCopy:
    """What becomes of a run's hook in a copy of its model: it does nothing."""

    def __call__(self, *_: object) -> None:
        """Nothing."""

"""The tape: which calls belong to which physical batch, and everything that must not be guessed about it.

A batch begins with the first pass through the model after a backward. Gradients that arrive in one or several backward passes over
it belong to the same examples; a forward after a backward holds other examples (a micro-batch). What cannot be told
apart for certain is refused with :class:`~hushgrad.errors.CaptureError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from torch import Tensor

from hushgrad.clipping._torch import backward_task, is_autocast
from hushgrad.clipping.proof.structure import NATIVE
from hushgrad.clipping.proof.words import differentiated
from hushgrad.clipping.scaled import SCALED
from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.proof.structure import Structure
    from hushgrad.clipping.site import Call

__all__ = ["Batch", "Tape"]

T = TypeVar("T")


class Batch:
    """The calls over one physical batch of examples."""

    __slots__ = (
        "announced",
        "bare",
        "calls",
        "coefficient",
        "examples",
        "largest",
        "padding",
        "probe",
        "routed",
        "structure",
        "summed",
        "tasks",
        "units",
        "watched",
    )

    def __init__(self, examples: int | None, units: Tensor | None, probe: int | None, coefficient: float) -> None:
        self.examples = -1 if examples is None else examples
        self.announced = examples is not None
        self.units, self.probe, self.coefficient = units, probe, coefficient
        self.padding = 0  # examples at the end that do not count
        self.calls: list[Call] = []
        self.bare: dict[str, Call] = {}  # parameters that are read at the frontier
        self.watched: list[Callable[[], None]] = []  # what lets go of what the hooks there know
        self.largest = 0.0  # norm of what was read at a frontier
        self.routed: frozenset[str] = frozenset()  # parameters of experts, which may get no rows
        self.structure: Structure | None = None  # of its last pass
        self.tasks: set[int] = set()  # the backward passes that reached it
        self.summed: set[bool] = set()  # whether what came back was of a sum, whatever the reduction of the run's losses is

    def factor(self, *, mean: bool) -> float:
        """What gradients are multiplied by, as those of a ``mean`` were divided by the number of examples."""
        if len(self.summed) > 1:
            raise CaptureError(
                "One pass has two backward passes, one from private.loss and one beside it. Put all terms into the function that "
                "private.loss is given, and run one backward."
            )
        return self.coefficient * (self.examples if mean and True not in self.summed else 1)

    def unwatch(self) -> None:
        """Let the hooks at the frontier forget nodes of the graph that holds them: from then on they refuse.

        Such a circle goes through torch's own memory, where the garbage collector sees one node of it at a time, so that a step's
        activations would stay for as many collections as it has such nodes.
        """
        for forget in self.watched:
            forget()
        self.bare, self.watched = {}, []


class Tape:
    """The live record of everything between two collects."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.silent = 0
        self.deaf = False  # gradients that come back are a proof's own
        self.rounded = False  # gradients or inputs came in half precision
        self.summing = False  # gradients that come back are of a sum
        self.vouched = False  # somebody answers for calls that no proof has seen
        self.most: int | None = None  # examples of a step, where a public number is needed
        self.calls: list[Call] | None = None  # of the pass through the model that is running
        self.dim: int | Callable[[], int | None] | None = 0  # of the examples in the inputs, where nobody counts them
        self.before_batch: Callable[[], None] | None = None
        self.batches: list[Batch] = []
        self.clear()

    def __reduce__(self) -> tuple[Callable[[], Tape], tuple[()]]:
        """A copy of a captured model (for averages, in a file) has copies of the hooks, but is an ordinary model: nobody would collect.

        Nothing of the batch goes with it: what a pass has read are records.
        """
        return _silent, ()

    def clear(self, *, announced: bool = True) -> None:
        """Forget all passes and, unless ``announced`` is False, what was said of the next one."""
        for batch in self.batches:
            batch.calls = []  # a call knows its batch: a circle that would keep both, and the norms, until the garbage collector comes
            if batch.watched:
                batch.unwatch()
        self.batches = []
        self.current: Batch | None = None
        self._fresh = True  # the next forward begins a batch
        if not announced:
            return
        self.failure: str | None = None
        self.aside: str | None = None  # why a pass is none over the batch: an evaluation
        self.leaks: set[str] = set()  # parameters whose gradient went past the capture
        self._next: tuple[int | None, Tensor | None, int] = (None, None, 0)
        self._probe: int | None = None
        self._probes, self._coefficient = 0, 1.0

    def quiet(self, work: Callable[[], T]) -> T:
        """Let a rule work: nothing that it runs again is captured, and nothing is cast to a lower precision."""
        self.silent += 1
        try:
            if is_autocast():
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    return work()
            return work()
        except CaptureError as error:
            self.failure = str(error)  # an error inside backward may be swallowed
            raise
        finally:
            self.silent -= 1

    # Forward ---------------------------------------------------------------------------------------------------------

    def announce(self, examples: int | None = None, units: Tensor | None = None, padding: int | None = None) -> None:
        """What is known of the next physical batch; the next forward begins it."""
        before = self._next
        self._next = (
            before[0] if examples is None else examples,
            before[1] if units is None else units,
            before[2] if padding is None else padding,
        )
        self._fresh = True

    def expected(self) -> tuple[int | None, bool]:
        """How many examples the next pass holds, if that was announced; and whether it is one more over a batch that is open."""
        batch = self.current
        if batch is None or self._fresh or (batch.tasks and backward_task() not in batch.tasks):
            examples, units, _ = self._next
            return examples if examples is not None or units is None else len(units), False
        return batch.examples if batch.announced else None, True

    def enter(self, examples: int) -> Batch:
        """The batch that a pass over this many examples belongs to: the open one, whose backward is still to come, or the next."""
        batch, task = self.current, backward_task()
        if batch is not None and not self._fresh:
            # One that no backward has used, of another number of examples, was an evaluation with gradients enabled.
            is_open = task in batch.tasks if batch.tasks else batch.announced or examples == batch.examples
            if is_open:
                return batch
        if self.before_batch is not None and self.batches:
            self.before_batch()
        count, units, padding = self._next
        self._next = (None, None, 0)
        if count is None and units is not None:
            count = len(units)
        batch = Batch(count, units, self._probe, self._coefficient)
        batch.padding = padding
        if batch.examples < 0:
            batch.examples = examples
        if task != -1:  # activation checkpointing runs the forward inside the backward
            batch.tasks.add(task)
        self.current, self._fresh = batch, False
        for before in self.batches:
            if before.watched and not before.calls:  # no gradient came back: one that still does is refused
                before.unwatch()
        self.batches = [*(b for b in self.batches if b.calls), batch] if self.batches else [batch]
        return batch

    def batch(self) -> Batch:
        """The open batch, for a call that a pass makes."""
        return self.current or Batch(None, None, None, 1.0)

    def outside(self, call: Call, *, again: bool) -> None:
        """A call that no pass through the model has made; ``again``: inside backward, where a checkpoint runs it once more."""
        structure = call.batch.structure
        if again and structure is not None:
            places = {place for (site, _), place in structure.places.items() if site is call.site}
            if len(places) == 1 and all(place.layout.regular for place in places):  # as in every call that was proved
                call.place = places.pop()
            return
        expected, _ = self.expected()
        if again or not self.vouched or expected is None:
            return  # unproved: refused if a gradient comes back to it
        call.batch = self.enter(expected)
        call.place = NATIVE

    @contextmanager
    def probing(self, coefficient: float) -> Iterator[None]:
        """Batches begun inside are one more probe over the same examples as the other probes."""
        self._probe, self._coefficient = self._probes, coefficient
        self._probes += 1
        self._fresh = True
        try:
            yield
        finally:
            self._probe, self._coefficient, self._fresh = None, 1.0, True

    # Backward --------------------------------------------------------------------------------------------------------

    def refuse_arrival(self, call: Call) -> NoReturn:
        """A gradient reached a call that it may not reach."""
        path = call.site.path or "the model"
        if torch.is_grad_enabled():
            self.fail(f"{path} was differentiated with create_graph=True; second derivatives cannot be split by example.")
        if call.batch is self.current:
            self.fail(SCALED)
        later = self.current.examples if self.current else 0
        self.fail(
            f"A gradient came back to {path} ({call.batch.examples} rows) from an earlier batch, after a later forward ({later} rows). "
            "Run backward for each batch before the next forward, or add the losses and run one backward. Within one forward, keep "
            "the examples in the first dimension of every layer, and announce their number with capture.examples(count)."
        )

    def unproved(self, call: Call) -> NoReturn:
        """A gradient came back to a call of which it is not known whose rows it has."""
        path = call.site.path or "The model"
        if not call.shapes and self.aside is not None:
            self.fail(f"A gradient came back from a pass that is none over the examples of the batch. {self.aside}")
        if not call.shapes:
            self.fail(
                f"{path} was called outside of model(x), or inside a reentrant checkpoint, so that it cannot be told whose its rows are. "
                "Call the model itself, not its forward or its parts; use checkpoint(..., use_reentrant=False), which is "
                'gradient_checkpointing_kwargs={"use_reentrant": False} in transformers. A model whose layers run backwards to save memory '
                "(reversible ones, as in Reformer) has no such setting: take one with ordinary layers."
            )
        if self.calls is not None:  # the forward is not over
            self.fail(differentiated(path))
        self.fail(
            f"A gradient came back to {path}, to which none came when the model was proved, so that it cannot be told whose it is. Use "
            "the model's outputs alone in the loss, and detach what the model only keeps."
        )

    def refuse_transformed(self, path: str) -> NoReturn:
        """A module was called by a function that torch.func transforms."""
        self.fail(
            f"{path or 'The model'} was called inside of torch.func (vmap, grad, jvp), where no gradient of its output can be "
            "waited for. Call it on the whole batch, or have the module that does so run by example: "
            "hushgrad.clipping.rule(ThatModule)(hushgrad.clipping.rules.VmapTree)."
        )

    def refuse_nested(self, who: str) -> NoReturn:
        """A nested tensor has no rows of one size, and so no places for examples."""
        self.fail(
            f"{who} a nested tensor, in which it cannot be told whose row it is. Pad it (x.to_padded_tensor(0.0), with a mask of what is "
            "padding), or make a packed sequence of it (torch.nn.utils.rnn.pack_sequence)."
        )

    @contextmanager
    def sandbox(self) -> Iterator[None]:
        """Passes inside are a proof's own; afterwards everything is as it was."""
        kept = dict(vars(self))
        self.batches, self.before_batch, self.silent = [], None, 0
        self.clear()
        try:
            yield
        finally:
            self.clear()
            vars(self).update(kept)

    def fail(self, message: str) -> NoReturn:
        """Refuse, now and at the next collect: an error inside backward may be swallowed."""
        self.failure = message
        raise CaptureError(message)


def _silent() -> Tape:
    tape = Tape()
    tape.silent = 1
    return tape

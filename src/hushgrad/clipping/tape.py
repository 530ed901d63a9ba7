"""The tape: which calls belong to which physical batch, and everything that must not be guessed about it.

A batch begins with the first captured forward after a backward. Gradients that arrive in one or several backward passes over
that forward belong to the same examples; a forward after a backward holds other examples (a micro-batch). What cannot be told
apart for certain is refused with :class:`~hushgrad.errors.CaptureError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from torch import Tensor

from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call

__all__ = ["Batch", "Tape"]

T = TypeVar("T")


class Batch:
    """The calls over one physical batch of examples."""

    __slots__ = ("announced", "calls", "coefficient", "examples", "probe", "tasks", "units")

    def __init__(self, examples: int | None, units: Tensor | None, probe: int | None, coefficient: float) -> None:
        self.examples = -1 if examples is None else examples
        self.announced = examples is not None
        self.units, self.probe, self.coefficient = units, probe, coefficient
        self.calls: list[Call] = []
        self.tasks: set[int] = set()  # the backward passes that reached it


class Tape:
    """The live record of everything between two collects."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.silent = 0
        self.before_batch: Callable[[], None] | None = None
        self.batches: list[Batch] = []
        self.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> Tape:
        """A copy of a captured model (for averages, say) has copies of the hooks, but is an ordinary model: nobody would collect."""
        copied = Tape()
        copied.silent = 1
        return copied

    def clear(self) -> None:
        """Forget all passes and announcements."""
        self.clear_batches()
        self.failure: str | None = None
        self.leaks: set[str] = set()  # parameters whose gradient went past the capture
        self._next: tuple[int | None, Tensor | None] = (None, None)
        self._probe: int | None = None
        self._probes, self._coefficient = 0, 1.0

    def clear_batches(self) -> None:
        """Forget the passes so far; what is announced for the next one stays."""
        for batch in self.batches:
            batch.calls = []  # a call knows its batch: a circle that would keep both, and the norms, until the garbage collector comes
        self.batches = []
        self.current: Batch | None = None
        self._fresh = True  # the next forward begins a batch

    def quiet(self, work: Callable[[], T]) -> T:
        """Let a rule work: nothing that it runs again is captured, and nothing is cast to a lower precision."""
        self.silent += 1
        try:
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    return work()
            return work()
        except CaptureError as error:
            self.failure = str(error)  # an error inside backward may be swallowed
            raise
        finally:
            self.silent -= 1

    # Forward ---------------------------------------------------------------------------------------------------------

    def announce(self, examples: int | None = None, units: Tensor | None = None) -> None:
        """What is known of the next physical batch; the next forward begins it."""
        self._next = (self._next[0] if examples is None else examples, self._next[1] if units is None else units)
        self._fresh = True

    def batch_of(self, count: int | None, shared: Callable[[], bool]) -> Batch:
        """The batch that a forward call of ``count`` examples (or of rows that all examples share) belongs to."""
        batch = self.current
        task = backward_task()
        if batch is None or self._fresh or (batch.tasks and task not in batch.tasks):
            batch = self._begin(task)
        if batch.examples < 0:
            if count is None:
                self.fail(
                    "The number of examples cannot be told from the first layer's input. Call capture.examples(count) first."
                )
            batch.examples = count
        elif count != batch.examples and not batch.announced and not batch.tasks and not shared():
            # The open batch was never used by a backward (an evaluation with gradients enabled): this is the next one.
            batch = self._begin(task)
            batch.examples = count  # type: ignore[assignment]
        return batch

    def _begin(self, task: int) -> Batch:
        if self.before_batch is not None and self.batches:
            self.before_batch()
        examples, units = self._next
        self._next = (None, None)
        if examples is None and units is not None:
            examples = len(units)
        batch = Batch(examples, units, self._probe, self._coefficient)
        if task != -1:  # activation checkpointing runs the forward inside the backward
            batch.tasks.add(task)
        self.current, self._fresh = batch, False
        self.batches = [*(b for b in self.batches if b.calls), batch] if self.batches else [batch]
        return batch

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

    def arrived(self, call: Call) -> int:
        """A gradient reached a call: check that it may, and return the number of the backward pass."""
        path = call.site.path or "the model"
        if torch.is_grad_enabled():
            self.fail(f"{path} was differentiated with create_graph=True; second derivatives cannot be split by example.")
        if call.batch is not self.current:
            later = self.current.examples if self.current else 0
            self.fail(
                f"A gradient came back to {path} ({call.batch.examples} rows) from an earlier batch, after a later forward ({later} rows). "
                "Run backward for each batch before the next forward, or add the losses and run one backward. Within one forward, keep "
                "the examples in the first dimension of every layer, and announce their number with capture.examples(count)."
            )
        task = backward_task()
        call.batch.tasks.add(task)
        return task

    def wrong_count(self, path: str, count: int) -> NoReturn:
        """A layer's first dimension is neither the number of examples nor one shared row."""
        expected = self.current.examples if self.current else None
        self.fail(
            f"{path or 'The model'} got {count} rows where the batch has {expected} examples. Keep the examples in the first "
            "dimension of every layer (batch_first=True; (B, T, d) rather than (B*T, d)), and announce their number with "
            "capture.examples(count) if the first layer does not show it."
        )

    def fail(self, message: str) -> NoReturn:
        """Refuse, now and at the next collect: an error inside backward may be swallowed."""
        self.failure = message
        raise CaptureError(message)


# The number of the backward pass that is running in this thread, -1 outside of one.
backward_task: Callable[[], int] = torch._C._current_graph_task_id

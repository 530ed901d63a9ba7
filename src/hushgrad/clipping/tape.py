"""The tape: rarer events between two collects, and everything about a batch that must not be guessed.

What cannot be determined for certain is refused with :class:`~hushgrad.errors.CaptureError`; the common part is
:class:`~hushgrad.clipping.collecting.Batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from hushgrad.clipping._torch import backward_task
from hushgrad.clipping.collecting import Batch, Batches
from hushgrad.clipping.grad_scaler import SCALED
from hushgrad.clipping.layout import DEAD
from hushgrad.clipping.proof.messages import INTERRUPTED, differentiated
from hushgrad.clipping.proof.structure import NATIVE, Place
from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call


class Tape(Batches):
    """The live record of everything between two collects."""

    refused: Callable[[CaptureError], None] | None = None  # told of what is refused inside of a backward pass
    entered_again = False  # the model was called before an earlier call of it had ended

    def __reduce__(self) -> tuple[Callable[[], Tape], tuple[()]]:
        """A copy of a captured model (for averaging, in a file) has copies of the hooks but is an ordinary model: nothing would collect.

        Nothing of the batch is copied, since a pass has read private records.
        """
        return _silent, ()

    # Forward ---------------------------------------------------------------------------------------------------------

    def outside(self, call: Call, *, again: bool) -> None:
        """A call that no pass through the model made; ``again``: inside backward, where a checkpoint recomputes it."""
        structure = call.batch.structure
        if again and structure is not None:
            places = {place for (site, _), place in structure.places.items() if site is call.site}
            place = places.pop() if len(places) == 1 else None  # as in every call that was proved
            if place is not None and (place.layout.regular or place.faint):
                call.place = place if place.layout.regular else Place(DEAD)  # which a gradient of 0 may reach
            return
        expected, _ = self.expected()
        if again or not self.vouched or expected is None:
            return  # unproved: refused if a gradient comes back to it
        call.batch = self.enter(expected)
        call.place = NATIVE

    def batch(self) -> Batch:
        """The open batch, for a call that a pass makes."""
        return self.current or Batch(None, None, None, 1.0)

    @contextmanager
    def probing(self, coefficient: float) -> Iterator[None]:
        """Batches begun inside are one more probe over the same examples as the other probes."""
        self._probe, self._coefficient = self._probes, coefficient
        self._probes += 1
        self.fresh = True
        try:
            yield
        finally:
            self._probe, self._coefficient, self.fresh = None, 1.0, True

    # Backward --------------------------------------------------------------------------------------------------------

    def refuse_arrival(self, call: Call) -> NoReturn:
        """Refuse a gradient that reached a call which it must not reach."""
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
        """Refuse a gradient at a call whose rows have no known owner."""
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
            self.fail(INTERRUPTED if self.entered_again else differentiated(path))
        self.fail(
            f"A gradient came back to {path}, to which none came when the model was proved, so that it cannot be told whose it is. Use "
            "the model's outputs alone in the loss, and detach what the model only keeps."
        )

    def refuse_transformed(self, path: str) -> NoReturn:
        """Refuse a module called by a function that torch.func transforms."""
        self.fail(
            f"{path or 'The model'} was called inside of torch.func (vmap, grad, jvp), where no gradient of its output can be "
            "waited for. Call it on the whole batch; where it is evaluated only, inside of torch.no_grad(), or take a copy "
            "(copy.deepcopy); or have the module that does so run by example: hushgrad.clipping.rule(ThatModule)"
            "(hushgrad.clipping.rules.VmapTree)."
        )

    def refuse_nested(self, who: str) -> NoReturn:
        """Refuse a nested tensor: its rows have no single size, so examples have no layout."""
        self.fail(
            f"{who} a nested tensor, in which it cannot be told whose row it is. Pad it (x.to_padded_tensor(0.0), with a mask of what is "
            "padding), or make a packed sequence of it (torch.nn.utils.rnn.pack_sequence)."
        )

    @contextmanager
    def sandbox(self) -> Iterator[None]:
        """Passes inside belong to a proof; afterwards everything is restored."""
        kept = dict(vars(self))
        self.batches, self.before_batch, self.silent, self.refused = [], None, 0, None
        self.clear()
        try:
            yield
        finally:
            self.clear()
            vars(self).update(kept)

    def fail(self, message: str) -> NoReturn:
        """Refuse, now and again at the next collect: an error inside backward may be swallowed."""
        self.failure, error = message, CaptureError(message)
        if self.refused is not None and backward_task() >= 0:
            self.refused(error)
        raise error


def _silent() -> Tape:
    tape = Tape()
    tape.silent = 1
    return tape

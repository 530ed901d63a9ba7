"""What one process of several has found, for the guarantees of all: it travels with the messages that every step sends anyway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hushgrad.train.agreement import DRAWN
from hushgrad.train.books import Books
from hushgrad.train.contract import GROWN, MOVED, UNSEEN
from hushgrad.train.guard import OTHER
from hushgrad.train.invariant_sizes import PLACES, SIZES
from hushgrad.train.loss_tracking import PREPARED, ROUNDED, VOUCHED, Losses

LOST = "Another process of this run was lost: what it may have found since the last step is not known here"

_ELSEWHERE = "Another process of this run has more to say: see the notes of its own guarantee"
_BROKEN = "another process found this run to be covered by no theorem; its own guarantee says why"
_NOTES = (VOUCHED, PREPARED, ROUNDED, OTHER, UNSEEN, GROWN, MOVED, DRAWN, PLACES, SIZES)


class Findings:
    """Bits that all processes send with a step: whether the run is broken, the batch foreign, and which notes the guarantee needs.

    Args:
        books: learn of what breaks the run.
        losses: learn of losses that are vouched for.
        notes: what this process's guarantee says so far.
        add: has it say one sentence more.
        issued: whether the batch of this step is the loader's.
    """

    def __init__(
        self,
        books: Books,
        losses: Losses,
        *,
        notes: Callable[[], Collection[str]],
        add: Callable[[str], None],
        issued: Callable[[], bool],
    ) -> None:
        self._books, self._losses, self._notes, self._add, self._issued = books, losses, notes, add, issued
        self.foreign = False  # some process took the last step on a batch from elsewhere

    def said(self) -> list[bool]:
        """What this process knows; as many bits in every one."""
        notes = {*self._notes(), *self._losses.due_notes}
        more = bool(notes.difference(_NOTES))
        return [bool(self._books.broken), not self._issued(), more, *(note in notes for note in _NOTES)]

    def heard(self, bits: Sequence[bool]) -> None:
        """What some process knows."""
        broken, self.foreign, more, *noted = bits
        if broken and not self._books.broken:
            self._books.broken = _BROKEN
        known = self._notes()
        found = [note for note, holds in zip(_NOTES, noted, strict=True) if holds and note not in known]
        for note in found:
            if not self._losses.learn(note):
                self._add(note)
        if more and not set(known).difference(_NOTES):
            self._add(_ELSEWHERE)

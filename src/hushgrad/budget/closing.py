"""Runs that ended: charged for what they did, or for what the folder of a killed one proves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.budget import folder as folders
from hushgrad.budget.admission import Admission, sealed
from hushgrad.budget.books import Books
from hushgrad.budget.chain import id_of
from hushgrad.budget.pricing import exceeds
from hushgrad.budget.values import Reservation, looks_like, name_of
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import Compose, Event, Unanalysed

_FORKED = Unanalysed("a copy of the run went on beside it: both released under the same noise")


class Closing(Admission):
    """A run from its last step on."""

    def commit(
        self,
        reservation: Reservation | str,
        event: Event,
        *,
        overrun: bool = False,
        note: str = "",
        model: str = "",
        owner: str | None = None,
    ) -> Reservation:
        """Say what a run really did; it is charged for that from now on.

        A run that did more than it is charged for is recorded at once, as an overrun, and then refused, so that nobody can
        miss it; ``overrun=True`` says that you know. A finished run's charge never goes down, and the same words twice are
        one commit. ``owner`` is what the run said when it began: where a copy of it has begun since, both may have released
        values under the same noise, and no theorem covers that.

        Args:
            reservation: the run's place in the ledger, or its id.
            event: what it did.
            overrun: you know that more happened than was reserved.
            note: a remark for the row.
            model: SHA-256 of the model file, in hex: what :meth:`booked` finds the run by.
            owner: the token that the run began with, if it did with one.

        Raises:
            BudgetExceeded: if more happened than was charged (it *is* recorded).
            ArgumentError: if the run was committed, settled or cancelled before, and less is claimed now.
        """
        _check.instance(Event, event=event)
        done = self._charge("commit", id_of(reservation), lambda known: (_unforked(known, event, owner), note), model=model)
        if done.overrun and not overrun:
            raise BudgetExceeded(
                f"Run {done.run!r} did more than it had reserved. That is recorded as an overrun of {done.dataset!r}: "
                f"{self.status(done.dataset)}"
            )
        return done

    def settle(self, reservation: Reservation | str, run_folder: str | Path) -> Reservation:
        """Close the reservation of a run that was killed, by what its folder proves; see ``hushgrad.budget.folder``.

        The run is charged for the steps up to the checkpoint that it would have saved next, and cannot go on afterwards: its
        key is erased. Where the folder proves nothing, the whole reservation stays charged.

        Raises:
            ArgumentError: if the folder is another run's, or the run is still going on (on this machine).
        """
        identifier, folder = id_of(reservation), Path(run_folder)
        if not folder.is_dir():
            _check.fail("run_folder", str(folder), "to be a folder")
        self._require_own(folder, identifier)
        with folders.holding(folder) as alone:
            if not alone:
                _check.fail("run_folder", str(folder), "to be of a run that has ended; it is running", "Stop it first.")
            if self.reservation(identifier).state == "held":
                return self.cancel(identifier)

            def decide(known: Reservation) -> tuple[Event, str]:
                found = folders.finding(folder, known.reserved, identity=known.identity)
                if known.owner and not folders.owners_of(folder):
                    lost = "reservation.json is lost, so this may be an old copy: the whole reservation is charged"
                    found = folders.Finding(known.reserved, lost)
                folders.retire(folder, found.why)  # first: a crash in between leaves too high a charge, never too low a one
                return found.event, found.why

            return self._charge("settle", identifier, decide)

    def approve(self, reservation: Reservation | str, *, by: str) -> Reservation:
        """Approve a run; a policy may ask for several people's approval before its model is released.

        The ledger records who says so; it cannot know who really does. Whoever can write it can write a name.

        Args:
            reservation: the run's place in the ledger, or its id.
            by: who approves.
        """
        who, identifier = name_of("by", by), id_of(reservation)

        def decide(books: Books) -> dict[str, Any] | None:
            known = books.reservation(identifier)
            if known.state == "cancelled":
                _check.fail("reservation", known.id, "to be of a run; it was cancelled")
            again = looks_like(who) in map(looks_like, known.approved)
            return None if again else {"kind": "approve", "reservation": known.id, "note": who}

        return self._write(decide).reservation(identifier)

    def booked(self, model: str) -> Reservation | None:
        """The run that was committed with this model file, by its SHA-256; None where no run was."""
        found = [r for r in self.reservations() if r.model == model and r.state in ("committed", "settled")]
        return found[-1] if found else None

    def _require_own(self, folder: Path, identifier: str) -> None:
        """The folder names the reservation; or, where that file is lost, its run has the reservation's identity."""
        named = folders.reservation_of(folder)
        if named != identifier and (named or folders.identity_of(folder) != (self.reservation(identifier).identity or None)):
            _check.fail("run_folder", str(folder), f"to be of the run that reserved {identifier}")
        owners, known = folders.owners_of(folder), self.reservation(identifier).owner
        if owners and known and known not in map(sealed, owners):
            raise ArgumentError(
                f"Expected {str(folder)!r} to be where the run went on last; it is an older copy. Settle the folder that went on; until "
                "then the whole reservation stays charged."
            )

    def of_folder(self, run_folder: str | Path) -> str:
        """The id of the reservation of the run in a folder, or empty; where ``reservation.json`` is lost, by the run's identity."""
        folder = Path(run_folder)
        identity = folders.identity_of(folder)
        found = (r.id for r in self.reservations() if identity and r.identity == identity)
        return folders.reservation_of(folder) or next(found, "")

    def _charge(
        self, kind: str, identifier: str, decide: Callable[[Reservation], tuple[Event, str]], *, model: str = ""
    ) -> Reservation:
        """Replace what a run is charged for, never by less once it is closed."""
        known = self.reservation(identifier)
        event, note = decide(known)

        def row(books: Books) -> dict[str, Any] | None:
            known = books.reservation(identifier)
            others = books.charges(known.dataset, without=identifier)
            more = exceeds(books.dataset(known.dataset), event, known.charged, others)
            if not known.is_open and not more:
                if event == known.charged and model in ("", known.model):
                    return None
                _check.fail("reservation", identifier, f"to be open; it is {known.state}, and its charge never goes down")
            return {"kind": kind, "reservation": identifier, "event": event, "overrun": more, "note": note, "model": model}

        return self._write(row).reservation(identifier)


def _unforked(known: Reservation, event: Event, owner: str | None) -> Event:
    return event if owner is None or known.owner == sealed(owner) else Compose((event, _FORKED))

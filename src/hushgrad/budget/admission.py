"""Reservations: room for a run before it begins, or a refusal that says what would still fit."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_least, at_most
from hushgrad.budget.books import Books
from hushgrad.budget.chain import Chain, id_of
from hushgrad.budget.pricing import advice, fits, price
from hushgrad.budget.values import Dataset, Reservation, name_of
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import Event, Relation


class Admission(Chain):
    """The part of a ledger that takes a run from its reservation to its first step."""

    def reserve(
        self,
        dataset: str,
        event: Event,
        *,
        run: str = "",
        hold: bool = False,
        unit: str | None = None,
        relation: Relation | str | None = None,
    ) -> Reservation:
        """Reserve room for a run before it begins. It is charged in full from now on.

        With ``hold=True`` the run may begin only after :meth:`begin`; until then it can be cancelled. ``unit`` and
        ``relation`` of the run, where given, must be the data set's: an epsilon per example is none per user.

        Args:
            dataset: whose budget pays.
            event: what the run will release, at most.
            run: what to call it.
            hold: begin only after :meth:`begin`, so that it can be cancelled.
            unit: what the run protects; must be the data set's.
            relation: under which neighbours; must be the data set's.

        Raises:
            BudgetExceeded: if everything charged and this would exceed the budget; nothing is recorded then.
        """
        _check.instance(Event, event=event)
        identifier = secrets.token_hex(8)
        content = {"kind": "hold" if hold else "reserve", "dataset": dataset, "reservation": identifier, "event": event}
        content["run"] = name_of("run", run) if run else f"run {identifier}"

        def decide(books: Books) -> dict[str, Any]:
            _require_comparable(books.dataset(dataset), unit, relation)
            if not fits(books.dataset(dataset), (*books.charges(dataset), event)):
                raise _Refused(books)
            return content

        try:
            return self._write(decide).reservation(identifier)
        except _Refused as refused:
            raise BudgetExceeded(_refusal(refused.books, dataset, event)) from None

    def begin(
        self, reservation: Reservation | str, *, owner: str = "", before: Collection[str] = (), identity: str = ""
    ) -> Reservation:
        """The run of a held reservation begins now: from here on it cannot be cancelled.

        A run that can be resumed passes ``owner``, a fresh token for each start, and ``before``, the tokens that its folder holds
        from earlier starts. Of two copies of one folder the first to continue is the run; the other's tokens are then outdated, and it
        is refused before it releases anything.

        Args:
            reservation: the run's place in the ledger, or its id.
            owner: the token of this start.
            before: tokens of earlier starts.
            identity: the run's name, by which its reservation is found again.

        Raises:
            ArgumentError: where the reservation is closed, or another copy of the run has gone on.
        """

        def decide(books: Books) -> dict[str, Any] | None:
            known = books.reservation(id_of(reservation))
            if known.state not in ("held", "begun"):
                _check.fail("reservation", known.id, f"to be open; it is {known.state}", "Reserve again.")
            if known.owner and known.owner not in map(sealed, before):
                raise ArgumentError(
                    f"Expected run {known.run!r} to have gone on in this folder only; a copy of it has gone on elsewhere, and both would "
                    "release values under the same noise. Nothing was released. Go on with the other one, or start a new run."
                )
            if identity and known.identity not in ("", identity):
                raise ArgumentError(
                    f"Expected run {known.run!r} to go on under its own key; another one has begun in its place, and it would be charged "
                    "for one of the two. Nothing was released. Reserve again for a new run."
                )
            if known.state == "held" or owner:
                return {"kind": "begin", "reservation": known.id, "owner": sealed(owner) if owner else "", "identity": identity}
            return None

        return self._write(decide).reservation(id_of(reservation))

    def known_owner(self, reservation: Reservation | str, owners: Collection[str]) -> str:
        """Which of these tokens belongs to the run's last start; empty if none does."""
        known = self.reservation(id_of(reservation)).owner
        return next((owner for owner in owners if sealed(owner) == known), "")

    def cancel(self, reservation: Reservation | str) -> Reservation:
        """Give back the room of a held reservation whose run has not begun.

        Raises:
            ArgumentError: if it has begun, or might have (it was not held).
        """

        def decide(books: Books) -> dict[str, Any]:
            known = books.reservation(id_of(reservation))
            if known.state != "held":
                remedy = "Commit what it did, or settle it by its folder."
                _check.fail("reservation", known.id, f"not to have begun; it is {known.state}", remedy)
            return {"kind": "cancel", "reservation": known.id}

        return self._write(decide).reservation(id_of(reservation))


def _require_comparable(known: Dataset, unit: str | None, relation: Relation | str | None) -> None:
    if unit is not None and unit != known.unit:
        _check.fail("unit", unit, f"to be the data set's, {known.unit!r}", "A guarantee per example is none per user.")
    if relation is not None and Relation.of(relation) is not known.relation:
        _check.fail("relation", Relation.of(relation).value, f"to be the data set's, {known.relation.value!r}")


class _Refused(Exception):
    """The budget does not admit the run; carries the books of that decision, so that the reason can be computed outside the lock."""

    def __init__(self, books: Books) -> None:
        self.books = books


def _refusal(books: Books, dataset: str, event: Event) -> str:
    known, charges = books.dataset(dataset), books.charges(dataset)
    spent, wanted = price(known, charges), price(known, (*charges, event))
    open_runs = sum(r.is_open for r in books.of(dataset))
    budget = f"{at_most(known.epsilon, 6)} at delta {at_most(known.delta, 6)}"
    alone = f"{dataset!r} has no room for it within epsilon"  # what is spent has used up the filter: both together have no price
    both = f"with it {dataset!r} would have spent epsilon {at_most(wanted)} of"
    return (
        f"Run refused: {alone if math.isinf(wanted) else both} {budget}. "
        f"Spent and reserved so far: {at_most(spent)} ({open_runs} runs open), left: {at_least(max(0.0, known.epsilon - spent))}."
        f"{advice(known, charges, event)}"
    )


def sealed(owner: str) -> str:
    """A digest of an owner's token for the ledger: enough to recognise it, and useless to readers of the ledger."""
    return hashlib.blake2b(owner.encode(), digest_size=16, person=b"hushgrad/owner").hexdigest()

"""The budget ledger: who may spend how much on which data set, and who did."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_least, at_most
from hushgrad.budget import folder as folders
from hushgrad.budget.books import Books
from hushgrad.budget.policy import Policy, read_policy
from hushgrad.budget.pricing import advice, exceeds, fits, price
from hushgrad.budget.rows import BrokenChain, Row, Stored, checked
from hushgrad.budget.store import Writer, open_store
from hushgrad.budget.values import Dataset, Reservation, Status, _Account, looks_like, name_of
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import Compose, Event, Relation, Unanalysed

__all__ = ["Ledger", "Verification"]

_NO_ROW = 1 << 62
_FORKED = Unanalysed("a copy of the run went on beside it: both released under the same noise")
_EMPTY = "Row 1 is missing: the ledger is empty."


@dataclass(frozen=True, kw_only=True)
class Verification(_Account):
    """What ``verify`` found: ``ok``, how many rows are good, the head to note down elsewhere, and the first problem if any."""

    ok: bool
    rows: int
    head: str
    problem: str = ""

    def __str__(self) -> str:
        if self.ok:
            return f"The chain of {self.rows} rows is whole. Head: {self.head}"
        return f"NOT VERIFIED after {self.rows} good rows. {self.problem}"


class Ledger:
    """A persistent ledger of privacy budgets: reserve before a run, commit after it.

    ``place`` is a path (SQLite, by the standard library) or a ``postgresql://`` URL (``hushgrad[ledger-postgresql]``). The ledger must
    exist: :meth:`create` makes one, so that a misspelt path is not a fresh budget.

    **Formal guarantee.** As long as every release about a data set goes through one ledger, and no run does more than it
    reserved, the total of all charges never exceeds the data set's budget, whatever number of processes reserve at once and
    whenever any of them is killed. A run is charged in full from its reservation on, and less only once it is known to have
    done less.

    The decision to admit is made inside the store's one write lock, on the rows that are there then. It is priced before,
    outside the lock, so that inside it the accountant's answer is usually known already.

        >>> import tempfile
        >>> from hushgrad.events import Gaussian
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = Ledger.create(f"{folder}/budget.db")
        ...     dataset = ledger.add("patients", epsilon=2.0, delta=1e-6)
        ...     with ledger.run("patients", Gaussian(5.0), run="histogram"):
        ...         pass  # whatever has that event
        ...     print(ledger.status("patients"))
        patients: epsilon 0.8342 of 2 at delta 1e-06; 1 runs, 0 open.

    Reference: Rogers, Roth, Ullman and Vadhan 2016, "Privacy odometers and filters"; and see :class:`Dataset`.
    """

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        self._store = open_store(place)
        self._store.rows(after=_NO_ROW)  # a place without a ledger is refused now; a broken chain whenever it is used

    @classmethod
    def create(cls, place: str | Path) -> Ledger:
        """Make an empty ledger, or open the one that is there."""
        store = open_store(place)
        store.create(_stored(_row(Books(), kind="ledger", note=secrets.token_hex(16))))
        store.close()
        return cls(place)

    # Data sets ----------------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        epsilon: float,
        delta: float,
        unit: str = "example",
        relation: Relation | str = Relation.ADD_REMOVE,
        composition: str = "adaptive",
        plan: Event | None = None,
        policy: Policy | None = None,
        records: int | None = None,
    ) -> Dataset:
        """Add a data set with its budget. A budget never changes afterwards.

        With a ``plan``, the event of everything that is meant to happen, all runs that use up parts of it, in whatever order and
        chosen after looking, are admitted at no price: together they are dominated by the plan.

        Args:
            name: unlike every other name in the ledger, to the eye too.
            epsilon: of everything that is ever released about it.
            delta: the same.
            unit: what is protected: "example", "user" or another word.
            relation: who is a neighbour.
            composition: how runs add up; see :class:`Dataset`.
            plan: the event of all that is meant to happen, for composition "adaptive".
            policy: what is allowed; by default the policy that HUSHGRAD_POLICY names, if any.
            records: the public number of records, for the policy's rule about delta.

        Raises:
            ArgumentError: if there is a data set of this name, or the plan does not fit into the budget.
            PolicyRefused: if the policy does not allow such a budget.
        """
        rules = read_policy() if policy is None else policy
        if rules is not None:
            rules.require(epsilon=epsilon, delta=delta, relation=relation, unit=unit, records=records)
        dataset = Dataset(
            name=name, epsilon=epsilon, delta=delta, unit=unit, relation=Relation.of(relation), composition=composition, plan=plan
        )

        def decide(books: Books) -> dict[str, Any]:
            if name in books.datasets:
                _check.fail("dataset", name, "to be new; it is in the ledger", "A budget that was promised is not changed.")
            twins = [known for known in books.datasets if looks_like(known) == looks_like(name)]
            if twins:
                remedy = "One data set has one budget: use that name, or one that nobody can confuse with it."
                _check.fail("dataset", name, f"to look unlike {twins[0]!r}, which is in the ledger", remedy)
            return {"kind": "dataset", "dataset": name, "budget": dataset}

        self._write(decide)
        return dataset

    def datasets(self) -> tuple[Dataset, ...]:
        """All data sets, in the order in which they were added."""
        return tuple(self._books().datasets.values())

    def dataset(self, name: str) -> Dataset:
        """The data set of that name, or an ArgumentError that names those that there are."""
        return self._books().dataset(name)

    def status(self, dataset: str) -> Status:
        """How much of a data set's budget is spent, open reservations included."""
        books = self._books()
        known = books.dataset(dataset)
        return Status(
            dataset=known,
            epsilon=price(known, books.charges(dataset)),
            committed_epsilon=price(known, books.charges(dataset, open_too=False)),
            reservations=books.of(dataset),
        )

    # Runs ---------------------------------------------------------------------------------------------------------------

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
        """Ask for room for a run, before it begins. It is charged in full from now on.

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

        A run that can be continued says ``owner``, a fresh token for each of its lives, and ``before``, those that its folder holds
        of earlier lives. Of two copies of one folder the first to go on is the run; the other's tokens are old ones by then, and it
        is refused before it releases anything.

        Args:
            reservation: the run's place in the ledger, or its id.
            owner: the token of this life.
            before: tokens of earlier lives.
            identity: the run's name, by which its reservation is found again.

        Raises:
            ArgumentError: where the reservation is closed, or another copy of the run has gone on.
        """

        def decide(books: Books) -> dict[str, Any] | None:
            known = books.reservation(_id(reservation))
            if known.state not in ("held", "begun"):
                _check.fail("reservation", known.id, f"to be open; it is {known.state}", "Reserve again.")
            if known.owner and known.owner not in map(_sealed, before):
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
                return {"kind": "begin", "reservation": known.id, "owner": _sealed(owner) if owner else "", "identity": identity}
            return None

        return self._write(decide).reservation(_id(reservation))

    def known_owner(self, reservation: Reservation | str, owners: Collection[str]) -> str:
        """Which of these tokens is that of the run's last life; empty if none of them is."""
        known = self.reservation(_id(reservation)).owner
        return next((owner for owner in owners if _sealed(owner) == known), "")

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
        done = self._charge("commit", _id(reservation), lambda known: (_unforked(known, event, owner), note), model=model)
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
        identifier, folder = _id(reservation), Path(run_folder)
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
        who, identifier = name_of("by", by), _id(reservation)

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
        if owners and known and known not in map(_sealed, owners):
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

    def cancel(self, reservation: Reservation | str) -> Reservation:
        """Give back the room of a held reservation whose run has not begun.

        Raises:
            ArgumentError: if it has begun, or might have (it was not held).
        """

        def decide(books: Books) -> dict[str, Any]:
            known = books.reservation(_id(reservation))
            if known.state != "held":
                remedy = "Commit what it did, or settle it by its folder."
                _check.fail("reservation", known.id, f"not to have begun; it is {known.state}", remedy)
            return {"kind": "cancel", "reservation": known.id}

        return self._write(decide).reservation(_id(reservation))

    @contextmanager
    def run(self, dataset: str, event: Event, *, run: str = "") -> Iterator[Reservation]:
        """Reserve, run the block, commit. A block that raises leaves its reservation charged in full, and open.

        Inside the block ``ledger.commit(reservation, event)`` says that less happened than reserved.

        Args:
            dataset: whose budget pays.
            event: what the block will release, at most.
            run: what to call it.
        """
        reservation = self.reserve(dataset, event, run=run)
        yield reservation
        if self.reservation(reservation.id).is_open:
            self.commit(reservation, event)

    def reservation(self, identifier: str) -> Reservation:
        """The reservation with this id, as it stands now."""
        return self._books().reservation(_id(identifier))

    def reservations(self, dataset: str | None = None) -> tuple[Reservation, ...]:
        """All reservations ever made, or those on one data set, in order."""
        books = self._books()
        return tuple(books.reservations.values()) if dataset is None else books.of(books.dataset(dataset).name)

    # The chain ----------------------------------------------------------------------------------------------------------

    def entries(self) -> tuple[Row, ...]:
        """All rows, in order; checked.

        Raises:
            BrokenChain: where one of them was changed.
        """
        rows = tuple(checked(self._store.rows()))
        if not rows:
            raise BrokenChain(_EMPTY)
        return rows

    @property
    def head(self) -> str:
        """The hash of the last row. Note it elsewhere: it proves later that nothing before it was changed or cut off."""
        return self._books().head

    def verify(self, *, head: str | None = None) -> Verification:
        """Check every row, the chain and, with ``head``, that the chain goes through a hash that was noted before.

        Without ``head`` a chain that was cut off at its end, or wholly rewritten, is not found out.
        """
        books, heads = Books(), set()
        try:
            for row in checked(self._store.rows()):
                heads.add(books.read([row]).head)
        except BrokenChain as error:
            return Verification(ok=False, rows=books.rows, head=books.head, problem=str(error))
        if not books.rows:
            return Verification(ok=False, rows=0, head=books.head, problem=_EMPTY)
        if head is not None and head not in heads:
            problem = f"No row has the hash {head}: rows were cut off at the end, or the whole chain was rewritten."
            return Verification(ok=False, rows=books.rows, head=books.head, problem=problem)
        return Verification(ok=True, rows=books.rows, head=books.head)

    def close(self) -> None:
        """Give back connections."""
        self._store.close()

    def __repr__(self) -> str:
        return f"Ledger({self._store!r})"

    # Inside -------------------------------------------------------------------------------------------------------------

    def _books(self) -> Books:
        return Books().read(self.entries())

    def _write(self, decide: Callable[[Books], dict[str, Any] | None]) -> Books:
        """Append the row that ``decide`` makes of the books, or nothing for None; the books afterwards.

        ``decide`` is first asked outside the lock: it prices (the answer is remembered) or refuses without disturbing others.
        What counts is its second answer, inside the lock, on the rows that are there then.
        """
        books = self._books()
        if decide(books) is None:
            return books
        with self._store.writing() as writer:
            _catch_up(books, writer)
            content = decide(books)
            row = None if content is None else _row(books, **content)
            if row is not None:
                writer.append(_stored(row))
        return books if row is None else books.read([row])  # read after the commit: it is there now

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


def _require_comparable(known: Dataset, unit: str | None, relation: Relation | str | None) -> None:
    if unit is not None and unit != known.unit:
        _check.fail("unit", unit, f"to be the data set's, {known.unit!r}", "A guarantee per example is none per user.")
    if relation is not None and Relation.of(relation) is not known.relation:
        _check.fail("relation", Relation.of(relation).value, f"to be the data set's, {known.relation.value!r}")


class _Refused(Exception):
    """The budget does not admit the run; the books on which that was decided, so that the reason can be found outside the lock."""

    def __init__(self, books: Books) -> None:
        self.books = books


def _refusal(books: Books, dataset: str, event: Event) -> str:
    known, charges = books.dataset(dataset), books.charges(dataset)
    spent, wanted = price(known, charges), price(known, (*charges, event))
    open_runs = sum(r.is_open for r in books.of(dataset))
    return (
        f"Run refused: with it {dataset!r} would have spent epsilon {at_most(wanted)} of "
        f"{at_most(known.epsilon, 6)} at delta {at_most(known.delta, 6)}. "
        f"Spent and reserved so far: {at_most(spent)} ({open_runs} runs open), left: {at_least(max(0.0, known.epsilon - spent))}."
        f"{advice(known, charges, event)}"
    )


def _sealed(owner: str) -> str:
    """What the ledger holds of an owner's token: enough to know it again, and useless to who reads the ledger."""
    return hashlib.blake2b(owner.encode(), digest_size=16, person=b"hushgrad/owner").hexdigest()


def _unforked(known: Reservation, event: Event, owner: str | None) -> Event:
    return event if owner is None or known.owner == _sealed(owner) else Compose((event, _FORKED))


def _id(reservation: Reservation | str) -> str:
    return reservation.id if isinstance(reservation, Reservation) else str(_check.instance(str, reservation=reservation))


def _catch_up(books: Books, writer: Writer) -> None:
    """Take in what other writers appended meanwhile; the rows before were checked just now, outside the lock."""
    books.read(checked(writer.rows(books.rows), number=books.rows, previous=books.head))


def _row(books: Books, **content: Any) -> Row:
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Row(number=books.rows + 1, previous=books.head, time=time, **content)


def _stored(row: Row) -> Stored:
    return Stored(row.number, row.text, row.hash)

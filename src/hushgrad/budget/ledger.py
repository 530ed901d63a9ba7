"""The budget ledger: who may spend how much on which data set, and who did."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.budget import folder as folders
from hushgrad.budget.admission import Admission, sealed
from hushgrad.budget.books import Books
from hushgrad.budget.chain import id_of, next_row, stored
from hushgrad.budget.policy import Policy, read_policy
from hushgrad.budget.pricing import exceeds
from hushgrad.budget.store import open_store
from hushgrad.budget.values import Dataset, Reservation, looks_like, name_of
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import Compose, Event, Relation, Unanalysed

_FORKED = Unanalysed("a copy of the run went on beside it: both released under the same noise")


class Closing(Admission):
    """The part of a ledger that closes runs."""

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
        """Record what a run really did; it is charged for that from now on.

        A run that did more than it is charged for is recorded at once, as an overrun, and then refused, so that it cannot be
        missed; ``overrun=True`` acknowledges it. A finished run's charge never goes down, and repeating a commit changes
        nothing. ``owner`` is the token that the run began with: if a copy of it has begun since, both may have released
        values under the same noise, and no theorem covers that.

        Args:
            reservation: the run's place in the ledger, or its id.
            event: what it did.
            overrun: acknowledge that more happened than was reserved.
            note: a remark for the row.
            model: SHA-256 of the model file, in hex; :meth:`booked` finds the run by it.
            owner: the token that the run began with, if it did with one.

        Raises:
            BudgetExceeded: if more happened than was charged (it *is* recorded).
            ArgumentError: if the run was committed, settled or cancelled before, and less is claimed now.
        """
        _check.instance(Event, event=event)

        def decide(known: Reservation) -> tuple[Event, str]:
            forked = owner is not None and known.owner != sealed(owner)
            return Compose((event, _FORKED)) if forked else event, note

        done = self._charge("commit", id_of(reservation), decide, model=model)
        if done.overrun and not overrun:
            raise BudgetExceeded(
                f"Run {done.run!r} did more than it had reserved. That is recorded as an overrun of {done.dataset!r}: "
                f"{self.status(done.dataset)}"
            )
        return done

    def settle(self, reservation: Reservation | str, run_folder: str | Path) -> Reservation:
        """Close the reservation of a run that was killed, by what its folder proves; see ``hushgrad.budget.folder``.

        The run is charged for the steps up to the checkpoint that it would have saved next, and cannot continue afterwards: its
        key is erased. Where the folder proves nothing, the whole reservation stays charged.

        Raises:
            ArgumentError: if the folder belongs to another run, or the run is still alive (on this machine).
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

        The ledger records the given name; it cannot verify it. Anyone who can write the ledger can write a name.

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
        """The run that was committed with this model file, by its SHA-256; None if there is none."""
        found = [r for r in self.reservations() if r.model == model and r.state in ("committed", "settled")]
        return found[-1] if found else None

    def _require_own(self, folder: Path, identifier: str) -> None:
        """Require that the folder names the reservation or, if that file is lost, that its run has the reservation's identity."""
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
        """The id of the reservation of the run in a folder, or empty; found by the run's identity if ``reservation.json`` is lost."""
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


class Ledger(Closing):
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

    @classmethod
    def create(cls, place: str | Path) -> Ledger:
        """Make an empty ledger, or open the one that is there."""
        store = open_store(place)
        store.create(stored(next_row(Books(), kind="ledger", note=secrets.token_hex(16))))
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

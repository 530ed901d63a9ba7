"""The budget ledger: who may spend how much on which data set, and who did."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.budget.books import Books
from hushgrad.budget.chain import next_row, stored
from hushgrad.budget.closing import Closing
from hushgrad.budget.policy import Policy, read_policy
from hushgrad.budget.store import open_store
from hushgrad.budget.values import Dataset, Reservation, looks_like
from hushgrad.events import Event, Relation


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

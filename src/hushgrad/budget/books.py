"""The state of a ledger: its data sets, and what each run is charged for. Replayed from the rows, never stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hushgrad import _check
from hushgrad.budget.pricing import exceeds, is_part
from hushgrad.budget.rows import START, BrokenChain, Row
from hushgrad.budget.values import Dataset, Reservation
from hushgrad.events import Compose, Event

NOTHING = Compose(())
_NEXT = {"begin": ("held", "begun"), "cancel": ("held", "cancelled")}


@dataclass
class Books:
    """The state after the first ``rows`` rows. A row that cannot follow from the ones before it is refused as damage."""

    rows: int = 0
    head: str = START
    datasets: dict[str, Dataset] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)

    def read(self, rows: Iterable[Row]) -> Books:
        """Process the next rows."""
        for row in rows:
            self._take(row)
            self.rows, self.head = row.number, row.hash
        return self

    def dataset(self, name: str) -> Dataset:
        """The data set of this name.

        Raises:
            ArgumentError: for a name that was never added.
        """
        if name not in self.datasets:
            known = ", ".join(self.datasets) or "none yet"
            _check.fail("dataset", name, f"to be in the ledger ({known})", "Add it with its budget: hushgrad ledger add.")
        return self.datasets[name]

    def reservation(self, identifier: str) -> Reservation:
        """The reservation with this id.

        Raises:
            ArgumentError: where there is none.
        """
        if identifier not in self.reservations:
            _check.fail("reservation", identifier, "to be in the ledger", "hushgrad ledger list shows them.")
        return self.reservations[identifier]

    def of(self, dataset: str) -> tuple[Reservation, ...]:
        """All reservations on a data set, in order."""
        return tuple(r for r in self.reservations.values() if r.dataset == dataset)

    def charges(self, dataset: str, *, open_too: bool = True, without: str = "") -> tuple[Event, ...]:
        """What a data set is charged for: everything that happened and, usually, everything that is reserved.

        ``without`` leaves one reservation out.
        """
        counted = (r for r in self.of(dataset) if (open_too or not r.is_open) and r.id != without)
        return tuple(r.charged for r in counted if r.charged != NOTHING)

    # One row ------------------------------------------------------------------------------------------------------------

    def _take(self, row: Row) -> None:
        if (row.kind == "ledger") != (row.number == 1):
            raise BrokenChain(f"Row {row.number} is of kind {row.kind!r}, which cannot stand there.")
        if row.kind == "dataset":
            self._add(row)
        elif row.kind in ("reserve", "hold"):
            self._reserve(row)
        elif row.kind != "ledger":
            self._move(row)

    def _add(self, row: Row) -> None:
        if row.budget is None or row.budget.name in self.datasets:
            raise BrokenChain(f"Row {row.number} adds no data set, or one that exists.")
        self.datasets[row.budget.name] = row.budget

    def _reserve(self, row: Row) -> None:
        if row.dataset not in self.datasets or row.event is None or row.reservation in self.reservations:
            raise BrokenChain(f"Row {row.number} reserves nothing, for an unknown data set, or under an id in use.")
        self._declare(row.dataset, row.event)
        self.reservations[row.reservation] = Reservation(
            id=row.reservation,
            dataset=row.dataset,
            run=row.run,
            reserved=row.event,
            charged=row.event,
            state="held" if row.kind == "hold" else "begun",
            since=row.time,
        )

    def _declare(self, name: str, event: Event) -> None:
        """The first run fixes how an adaptive budget is spent, because it was planned before anything was seen.

        While no run has begun, a cancelled reservation gives this place to the next one.
        """
        if all(r.state == "cancelled" for r in self.of(name)):
            self.datasets[name] = replace(self.datasets[name], first=event)

    def _move(self, row: Row) -> None:
        known = self.reservations.get(row.reservation)
        if known is None:
            raise BrokenChain(f"Row {row.number} is about a reservation that does not exist.")
        if row.kind == "approve":
            self.reservations[known.id] = replace(known, approved=(*known.approved, row.note))
            return
        if row.kind in _NEXT:
            before, after = _NEXT[row.kind]
            again = row.kind == "begin" and bool(row.owner) and known.state == after  # another life of the same run
            if known.state != before and not again:
                raise BrokenChain(f"Row {row.number} is of kind {row.kind!r}, but the run is {known.state}.")
            charged = NOTHING if row.kind == "cancel" else known.charged
            owner, identity = row.owner or known.owner, row.identity or known.identity
            self.reservations[known.id] = replace(known, state=after, charged=charged, owner=owner, identity=identity)
            if row.kind == "cancel" and all(r.state == "cancelled" for r in self.of(known.dataset)):
                self.datasets[known.dataset] = replace(self.datasets[known.dataset], first=None)
            return
        if row.event is None:
            raise BrokenChain(f"Row {row.number} does not say what the run is charged for.")
        charged = row.event if known.is_open else self._raised(known, row, row.event)
        state = "committed" if row.kind == "commit" else "settled"
        overrun, model = known.overrun or row.overrun, row.model or known.model
        self.reservations[known.id] = replace(known, state=state, charged=charged, overrun=overrun, model=model)

    def _raised(self, known: Reservation, row: Row, event: Event) -> Event:
        """The charge of a closed run after a further row about it: never less than before, whoever appended the row.

        A row that claims a part of what was charged is damage. If neither event is part of the other, the costlier one counts: which one
        it is may differ between versions of the accountant in the last digit, and that must not break a ledger.

        Raises:
            BrokenChain: for a row that lowers the charge by its very words.
        """
        if not row.overrun or is_part(event, known.charged):
            raise BrokenChain(f"Row {row.number} lowers the charge of a run that is {known.state}, and no charge goes down.")
        if is_part(known.charged, event):
            return event
        others = self.charges(known.dataset, without=known.id)
        return event if exceeds(self.datasets[known.dataset], event, known.charged, others) else known.charged

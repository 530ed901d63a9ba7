"""The chain of rows behind a ledger: read and checked, appended under the store's only lock, and verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.budget.books import Books
from hushgrad.budget.pricing import price
from hushgrad.budget.rows import BrokenChain, Row, Stored, checked
from hushgrad.budget.store import Writer, open_store
from hushgrad.budget.values import Reservation, Status, _Account

_NO_ROW = 1 << 62
_EMPTY = "Row 1 is missing: the ledger is empty."


@dataclass(frozen=True, kw_only=True)
class Verification(_Account):
    """The result of ``verify``: ``ok``, the number of good rows, the head to record elsewhere, and the first problem if any.

    >>> import tempfile
    >>> from hushgrad.budget import Ledger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = Ledger.create(f"{folder}/budget.db").verify()
    >>> found.ok, found.rows
    (True, 1)
    """

    ok: bool
    rows: int
    head: str
    problem: str = ""

    def __str__(self) -> str:
        if self.ok:
            return f"The chain of {self.rows} rows is whole. Head: {self.head}"
        return f"NOT VERIFIED after {self.rows} good rows. {self.problem}"


class Chain:
    """The rows of one ledger and what they say. ``place`` is a path or a database's URL."""

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        self._store = open_store(place)
        self._store.rows(after=_NO_ROW)  # a place without a ledger is refused now; a broken chain whenever it is used

    def reservation(self, identifier: str) -> Reservation:
        """The reservation with this id, as it stands now."""
        return self._books().reservation(id_of(identifier))

    def reservations(self, dataset: str | None = None) -> tuple[Reservation, ...]:
        """All reservations ever made, or those on one data set, in order."""
        books = self._books()
        return tuple(books.reservations.values()) if dataset is None else books.of(books.dataset(dataset).name)

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
        """The hash of the last row. Record it elsewhere: it proves later that nothing before it was changed or cut off."""
        return self._books().head

    def verify(self, *, head: str | None = None) -> Verification:
        """Check every row, the chain and, with ``head``, that the chain goes through a hash that was noted before.

        Without ``head`` a chain that was cut off at its end, or wholly rewritten, is not detected.
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
        """Close connections."""
        self._store.close()

    def __repr__(self) -> str:
        return f"Ledger({self._store!r})"

    def _books(self) -> Books:
        return Books().read(self.entries())

    def _write(self, decide: Callable[[Books], dict[str, Any] | None]) -> Books:
        """Append the row that ``decide`` makes from the books, or nothing for None; returns the books afterwards.

        ``decide`` is first called outside the lock, where it prices (the answer is cached) or refuses without blocking others.
        Only its second answer counts, inside the lock, on the rows that exist then.
        """
        books = self._books()
        if decide(books) is None:
            return books
        with self._store.writing() as writer:
            catch_up(books, writer)
            content = decide(books)
            row = None if content is None else next_row(books, **content)
            if row is not None:
                writer.append(stored(row))
        return books if row is None else books.read([row])  # read after the commit: it is there now


def id_of(reservation: Reservation | str) -> str:
    """The id of a reservation, given itself or its id."""
    return reservation.id if isinstance(reservation, Reservation) else str(_check.instance(str, reservation=reservation))


def catch_up(books: Books, writer: Writer) -> None:
    """Process the rows that other writers appended meanwhile; earlier rows were checked just before, outside the lock."""
    books.read(checked(writer.rows(books.rows), number=books.rows, previous=books.head))


def next_row(books: Books, **content: Any) -> Row:
    """The row after those that the books have read."""
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Row(number=books.rows + 1, previous=books.head, time=time, **content)


def stored(row: Row) -> Stored:
    """A row as a store keeps it."""
    return Stored(row.number, row.text, row.hash)

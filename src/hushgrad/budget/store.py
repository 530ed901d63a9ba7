"""Where the rows are: an append-only table in SQLite (standard library) or PostgreSQL (through SQLAlchemy).

A store knows nothing of budgets. It promises three things: rows that were appended in a ``writing()`` block are there, all or
none, once the block has ended, whatever happens to the process or the machine afterwards; one writer at a time is inside a
``writing()`` block, over all processes; and readers see whole blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from hushgrad import _check
from hushgrad.budget.rows import Stored

TABLE = "hushgrad_ledger"
WAIT = 60.0  # seconds for another writer: each holds the lock for milliseconds


class Writer(NamedTuple):
    """The table inside a writing block: its rows after a number, and one row more."""

    rows: Callable[[int], list[Stored]]
    append: Callable[[Stored], None]


class Store(ABC):
    """The table of one ledger; see the module's text for what is promised."""

    @abstractmethod
    def create(self, first: Stored) -> bool:
        """Make the table with its first row, at once; False if it was there."""

    @abstractmethod
    def rows(self, after: int = 0) -> list[Stored]:
        """The rows after number ``after``, in order."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Writer]:
        """Wait until no other writer is inside, keep the others out, commit at the end."""

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections."""


def open_store(place: str | Path) -> Store:
    """The store at a path, a ``sqlite:///`` URL or a ``postgresql://`` URL."""
    text = str(place)
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif "://" in text:
        return _shared(text)
    if not text or text == ":memory:":
        _check.fail("ledger", text, "to be a file", "A ledger that is forgotten protects nothing.")
    from hushgrad.budget.sqlite import SqliteStore

    return SqliteStore(Path(text))


def _shared(url: str) -> Store:
    from hushgrad.budget.postgresql import PostgresqlStore

    scheme = url.partition("://")[0]
    if scheme.partition("+")[0] not in ("postgresql", "postgres"):
        _check.fail("ledger", f"{scheme}://...", "to be a path, sqlite:///PATH or postgresql://...")  # a URL may hold a password
    return PostgresqlStore(url)

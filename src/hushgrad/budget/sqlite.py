"""Rows in an SQLite file, by the standard library.

``BEGIN IMMEDIATE`` takes SQLite's one write lock before anything is read, so that what a writer decides is decided on the rows
that are there when it appends. The journal is a write-ahead log with ``synchronous=FULL``: a commit is on the disk before it
returns, and a killed writer leaves either its whole block or nothing. Connections live for one operation: they are cheap,
and a ledger may be used from several threads and after a fork.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from hushgrad import _check
from hushgrad.budget.rows import Stored
from hushgrad.budget.store import TABLE, WAIT, Store, Writer
from hushgrad.errors import ArgumentError

# The triggers stop accidents, not intruders, who are what the hash chain is for.
_SCHEMA = f"""
CREATE TABLE {TABLE} (number INTEGER PRIMARY KEY, text TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TRIGGER {TABLE}_keep BEFORE DELETE ON {TABLE} BEGIN SELECT RAISE(ABORT, 'a ledger only grows'); END;
CREATE TRIGGER {TABLE}_same BEFORE UPDATE ON {TABLE} BEGIN SELECT RAISE(ABORT, 'a ledger only grows'); END;
"""


class SqliteStore(Store):
    """The table in one file. The file must be on a local disk: SQLite's locks do not hold on network file systems."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, first: Stored) -> bool:
        if not self._path.parent.is_dir():
            _check.fail("ledger", str(self._path), "to be in a folder that exists")
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone():
                return False
            for statement in _SCHEMA.strip().splitlines():
                connection.execute(statement)
            _append(connection, first)
            connection.execute("COMMIT")
        return True

    def rows(self, after: int = 0) -> list[Stored]:
        self._require_file()
        with self._connected() as connection:
            return _rows(connection, after)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Take the write lock, then commit; an exception inside leaves the table as it was."""
        self._require_file()
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Writer(partial(_rows, connection), partial(_append, connection))
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def close(self) -> None:
        """Nothing is kept open."""

    def _require_file(self) -> None:
        # connect() would make an empty file: a misspelt path must not become a fresh budget.
        if not self._path.is_file():
            _check.fail("ledger", str(self._path), "to be a ledger", "Make one with hushgrad ledger init.")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)) as connection:
                connection.execute("PRAGMA synchronous=FULL")
                yield connection
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the second: a damaged schema, which SQLite's own message quotes
            remedy = (
                "" if os.access(self._path.parent, os.W_OK) else " Its folder is read-only: copy it to one that can be written."
            )
            raise ArgumentError(
                f"Expected ledger={str(self._path)!r} to be a readable and writable ledger: {error}.{remedy}"
            ) from None

    def __repr__(self) -> str:
        return f"SqliteStore({str(self._path)!r})"


def _append(connection: sqlite3.Connection, row: Stored) -> None:
    connection.execute(f"INSERT INTO {TABLE} VALUES (?, ?, ?)", (row.number, row.text, row.hash))


def _rows(connection: sqlite3.Connection, after: int) -> list[Stored]:
    found = connection.execute(f"SELECT number, text, hash FROM {TABLE} WHERE number > ? ORDER BY number", (after,)).fetchall()
    if not all(isinstance(number, int) for number, _, _ in found):
        raise sqlite3.DatabaseError("a row has no number")
    return [Stored(number, str(text), str(hashed)) for number, text, hashed in found]

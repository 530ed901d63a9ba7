"""Rows in PostgreSQL, for teams that share a ledger; through SQLAlchemy (``pip install hushgrad[ledger-postgresql]``).

A writer locks the table in EXCLUSIVE mode as the first statement of a serialisable transaction: readers go on, a second
writer waits, and the snapshot of who got the lock is taken after it, so it contains all rows that were committed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hushgrad.budget.rows import Stored
from hushgrad.budget.store import TABLE, WAIT, Store, Writer
from hushgrad.errors import ArgumentError

if TYPE_CHECKING:
    import sqlalchemy

_SCHEMA = (
    f"CREATE TABLE {TABLE} (number BIGINT PRIMARY KEY, text TEXT NOT NULL, hash TEXT NOT NULL)",
    f"CREATE OR REPLACE FUNCTION {TABLE}_only_grows() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'a ledger only grows'; END $$",
    f"CREATE TRIGGER {TABLE}_same BEFORE UPDATE OR DELETE OR TRUNCATE ON {TABLE} EXECUTE FUNCTION {TABLE}_only_grows()",
)


class PostgresqlStore(Store):
    """The table in one PostgreSQL data base."""

    def __init__(self, url: str) -> None:
        try:
            import sqlalchemy
            from sqlalchemy.pool import NullPool
        except ImportError:
            raise ArgumentError(
                "Expected sqlalchemy for a ledger in PostgreSQL. Install it with pip install 'hushgrad[ledger-postgresql]'."
            ) from None
        self._sql: Any = sqlalchemy
        try:
            options = {"lock_timeout": f"{int(WAIT * 1000)}"}
            self._engine = sqlalchemy.create_engine(
                url,
                isolation_level="SERIALIZABLE",
                poolclass=NullPool,  # one connection per operation: safe in threads and after a fork
                connect_args={"options": " ".join(f"-c {name}={value}" for name, value in options.items())},
            )
        except ImportError as error:  # of the driver that the URL names
            raise ArgumentError(
                f"Expected a driver for PostgreSQL ({error}). Install it with pip install 'hushgrad[ledger-postgresql]'."
            ) from None
        except sqlalchemy.exc.ArgumentError as error:
            # Not the URL itself: it may hold a password.
            raise ArgumentError(f"Expected ledger to be a URL such as postgresql+psycopg://user@host/name: {error}.") from None

    def create(self, first: Stored) -> bool:
        with self._connected() as connection, connection.begin():
            if self._sql.inspect(connection).has_table(TABLE):
                return False
            for statement in _SCHEMA:
                connection.execute(self._sql.text(statement))
            self._append(connection, first)
        return True

    def rows(self, after: int = 0) -> list[Stored]:
        with self._connected() as connection, connection.begin():
            return self._rows(connection, after)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Lock the table, then commit; an exception inside leaves it as it was."""
        with self._connected() as connection, connection.begin():
            connection.execute(self._sql.text(f"LOCK TABLE {TABLE} IN EXCLUSIVE MODE"))
            yield Writer(partial(self._rows, connection), partial(self._append, connection))

    def close(self) -> None:
        self._engine.dispose()

    def _rows(self, connection: sqlalchemy.Connection, after: int) -> list[Stored]:
        query = self._sql.text(f"SELECT number, text, hash FROM {TABLE} WHERE number > :after ORDER BY number")
        return [Stored(int(row[0]), str(row[1]), str(row[2])) for row in connection.execute(query, {"after": after})]

    def _append(self, connection: sqlalchemy.Connection, row: Stored) -> None:
        query = self._sql.text(f"INSERT INTO {TABLE} VALUES (:number, :text, :hash)")
        connection.execute(query, {"number": row.number, "text": row.text, "hash": row.hash})

    @contextmanager
    def _connected(self) -> Iterator[sqlalchemy.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except self._sql.exc.ProgrammingError as error:
            if TABLE in str(error.orig) and "does not exist" in str(error.orig):
                raise ArgumentError("Expected ledger to be made first. Make one with hushgrad ledger init.") from None
            raise ArgumentError(f"Expected a usable ledger in PostgreSQL: {_first_line(error)}.") from None
        except self._sql.exc.SQLAlchemyError as error:
            raise ArgumentError(f"Expected a reachable and writable PostgreSQL server: {_first_line(error)}.") from None

    def __repr__(self) -> str:
        return f"PostgresqlStore({self._engine.url.render_as_string(hide_password=True)!r})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

"""A writer on a ledger that others write to at the same moment; several_processes.py starts it."""

from __future__ import annotations

import itertools
from pathlib import Path

import several_processes
from patience import wait_until

from hushgrad.budget import Ledger, chain
from hushgrad.errors import BudgetExceeded
from hushgrad.events import PureDP


def started(place: str, folder: Path, writers: int, **options: object) -> list[several_processes.Child]:
    """The writers, which wait for each other and then are off at once."""
    found = []
    for number in range(writers):
        own = folder / str(number)
        own.mkdir()
        asked = {"place": place, "folder": str(folder), "number": number, "writers": writers, **options}
        found += several_processes.start(Path(__file__), own, 1, asked, imports=("ledger_program",), group=False)
    wait_until(lambda: len(list(folder.glob("ready.*"))) == writers, lambda: not any(writer.poll() for writer in found))
    return found


def admitted(folder: Path, writers: list[several_processes.Child]) -> list[int]:
    """How many reservations each of them got, at their end."""
    for writer in writers:
        errors = writer.communicate()[1]
        assert writer.returncode == 0, errors
    return [int((folder / str(number) / "out.0").read_text()) for number in range(len(writers))]


def _careless(folder: Path, number: int, writers: int):
    """A way to write that decides before it takes the lock, as a careless programmer would, here always while all others do so, too."""

    def write(self: Ledger, decide):
        books = self._books()
        content = decide(books)
        _meet(folder, "decided", number, writers)
        with self._store.writing() as writer:
            chain.catch_up(books, writer)
            row = chain.next_row(books, **content)
            writer.append(chain.stored(row))
        return books.read([row])

    return write


def _meet(folder: Path, what: str, number: int, writers: int) -> None:
    """Wait until all writers are there."""
    (folder / f"{what}.{number}").touch()
    wait_until(lambda: len(list(folder.glob(f"{what}.*"))) == writers)


def main(options: dict) -> int:
    """Reserve as often as there are turns, or until it is killed; the number of reservations that were admitted."""
    ledger, folder = Ledger(options["place"]), Path(options["folder"])
    if options.get("careless"):
        Ledger._write = _careless(folder, options["number"], options["writers"])  # type: ignore[method-assign]
    _meet(folder, "ready", options["number"], options["writers"])
    found = 0
    for turn in itertools.count() if options["number"] in options.get("endless", ()) else range(options["turns"]):
        try:
            run = ledger.reserve("shared", PureDP(0.25), run=f"writer {options['number']} turn {turn}")
        except BudgetExceeded:
            continue
        found += 1
        if turn % 3 == 0 and options.get("commits", True):
            ledger.commit(run, PureDP(0.125))
    return found

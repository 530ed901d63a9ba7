"""A writer on a ledger that others write to at the same moment; several_processes.py starts it."""

from __future__ import annotations

import time
from pathlib import Path

import several_processes

from hushgrad.budget import Ledger, chain
from hushgrad.errors import BudgetExceeded
from hushgrad.events import PureDP


def started(place: str, folder: Path, writers: int, **options: object) -> list[several_processes.Child]:
    """The writers, all of them ready, then all off at once."""
    found = []
    for number in range(writers):
        own = folder / str(number)
        own.mkdir()
        asked = {"place": place, "folder": str(folder), "number": number, **options}
        found += several_processes.start(Path(__file__), own, 1, asked, imports=("ledger_program",), group=False)
    while len(list(folder.glob("ready.*"))) < writers:
        assert not any(writer.poll() for writer in found), [writer.communicate(1)[1] for writer in found if writer.poll()]
        time.sleep(0.001)
    (folder / "go").touch()
    return found


def admitted(folder: Path, writers: list[several_processes.Child]) -> list[int]:
    """How many reservations each of them got, at their end."""
    for writer in writers:
        errors = writer.communicate(timeout=600)[1]
        assert writer.returncode == 0, errors
    return [int((folder / str(number) / "out.0").read_text()) for number in range(len(writers))]


def _careless(self: Ledger, decide):
    """The decision is made before the lock is taken, as a careless programmer would."""
    books = self._books()
    content = decide(books)
    time.sleep(0.05)
    with self._store.writing() as writer:
        chain.catch_up(books, writer)
        row = chain.next_row(books, **content)
        writer.append(chain.stored(row))
    return books.read([row])


def main(options: dict) -> int:
    """Reserve as often as there are turns; the number of reservations that were admitted."""
    if options.get("careless"):
        Ledger._write = _careless  # type: ignore[method-assign]
    ledger, folder = Ledger(options["place"]), Path(options["folder"])
    (folder / f"ready.{options['number']}").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    found = 0
    for turn in range(options["turns"]):
        try:
            run = ledger.reserve("shared", PureDP(0.25), run=f"writer {options['number']} turn {turn}")
        except BudgetExceeded:
            continue
        found += 1
        if turn % 3 == 0 and options.get("commits", True):
            ledger.commit(run, PureDP(0.125))
    return found

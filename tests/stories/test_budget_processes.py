"""Real processes on one ledger: eight writers, some of them killed, never overspend and always leave a whole chain."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from hushgrad.accounting import epsilon
from hushgrad.budget import Ledger
from hushgrad.events import Compose, PureDP

WRITER = """
import sys
from hushgrad.budget import Ledger
from hushgrad.errors import BudgetExceeded
from hushgrad.events import PureDP

ledger = Ledger(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
admitted = 0
for turn in range(int(sys.argv[2])):
    try:
        run = ledger.reserve("shared", PureDP(0.25), run=f"writer {sys.argv[3]} turn {turn}")
    except BudgetExceeded:
        continue
    admitted += 1
    if turn % 3 == 0:
        ledger.commit(run, PureDP(0.125))
print(admitted)
"""

# The same as WRITER, but the decision is made before the lock is taken, as a careless programmer would.
CARELESS = WRITER.replace(
    "ledger = Ledger(sys.argv[1])",
    """
import time
from hushgrad.budget import chain as room
def careless(self, decide):
    books = self._books()
    content = decide(books)
    time.sleep(0.05)
    with self._store.writing() as writer:
        room.catch_up(books, writer)
        row = room.next_row(books, **content)
        writer.append(room.stored(row))
    return books.read([row])
Ledger._write = careless
ledger = Ledger(sys.argv[1])
""",
)


def started(program: str, place: Path, writers: int, turns: int) -> list[subprocess.Popen[str]]:
    """The writers, all ready, then all off at once."""
    words = [sys.executable, "-c", program, str(place), str(turns)]
    found = [subprocess.Popen([*words, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in range(writers)]
    for process in found:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in found:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return found


def ledger_with(tmp_path: Path, budget: float) -> Ledger:
    ledger = Ledger.create(tmp_path / "shared.db")
    ledger.add("shared", epsilon=budget, delta=1e-6, composition="pld")
    return ledger


def spent(ledger: Ledger) -> float:
    return epsilon(Compose(r.charged for r in ledger.reservations("shared")), delta=1e-6)


def test_eight_writers_of_which_three_are_killed(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, 3.0)
    writers = started(WRITER, tmp_path / "shared.db", 8, 12)
    chance = random.Random(5)
    for victim in chance.sample(writers, 3):
        time.sleep(chance.uniform(0.02, 0.2))
        os.kill(victim.pid, signal.SIGKILL)
    codes = [writer.wait(timeout=600) for writer in writers]
    for writer in writers:
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdin.close()
        writer.stdout.close()
    assert codes.count(-signal.SIGKILL) >= 1 and set(codes) <= {0, -signal.SIGKILL}
    assert ledger.verify().ok
    assert 2.5 < spent(ledger) <= 3.0  # the budget was fought for, and held
    assert ledger.status("shared").epsilon == spent(ledger)
    with closing(sqlite3.connect(ledger.place)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_processes_that_reserve_at_once(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, 0.3)  # room for one
    writers = started(WRITER, tmp_path / "shared.db", 2, 1)
    admitted = sorted(int(writer.communicate(timeout=600)[0]) for writer in writers)
    assert admitted == [0, 1] and spent(ledger) <= 0.3 and ledger.verify().ok


def test_deciding_before_the_lock_is_taken_would_overspend(tmp_path: Path) -> None:
    """The planted defect: the tests above can fail."""
    ledger = ledger_with(tmp_path, 0.3)
    for writer in started(CARELESS, tmp_path / "shared.db", 3, 1):
        writer.communicate(timeout=600)
    assert spent(ledger) > 0.3 and ledger.verify().ok


def test_a_writer_killed_inside_the_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, 1.0)
    program = (
        "import os, signal, sys\n"
        "from hushgrad.budget import Ledger\n"
        "from hushgrad.budget.rows import Stored\n"
        "with Ledger(sys.argv[1])._store.writing() as writer:\n"
        "    writer.append(Stored(3, 'half', 'a row'))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, ledger.place], check=False)
    assert done.returncode == -signal.SIGKILL
    assert ledger.verify().rows == 2
    ledger.reserve("shared", PureDP(0.5))  # and the lock is free
    assert ledger.verify().ok

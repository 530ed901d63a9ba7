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

from ledger_program import admitted, started

from hushgrad.accounting import epsilon
from hushgrad.budget import Ledger
from hushgrad.events import Compose, PureDP


def ledger_with(tmp_path: Path, budget: float) -> Ledger:
    ledger = Ledger.create(tmp_path / "shared.db")
    ledger.add("shared", epsilon=budget, delta=1e-6, composition="pld")
    return ledger


def spent(ledger: Ledger) -> float:
    return epsilon(Compose(r.charged for r in ledger.reservations("shared")), delta=1e-6)


def test_eight_writers_of_which_three_are_killed(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, 3.0)
    chance = random.Random(5)
    victims = chance.sample(range(8), 3)  # who go on until they are killed, however late that is
    writers = started(ledger.place, tmp_path, 8, turns=12, endless=victims)
    for victim in victims:
        time.sleep(chance.uniform(0.02, 0.2))
        os.kill(writers[victim].pid, signal.SIGKILL)
    for number, writer in enumerate(writers):
        writer.communicate()
        assert writer.returncode == (-signal.SIGKILL if number in victims else 0)
    assert ledger.verify().ok
    assert 2.5 < spent(ledger) <= 3.0  # the budget was fought for, and held
    assert ledger.status("shared").epsilon == spent(ledger)
    with closing(sqlite3.connect(ledger.place)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_processes_that_reserve_at_once(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, 0.3)  # room for one
    writers = started(ledger.place, tmp_path, 2, turns=1)
    assert sorted(admitted(tmp_path, writers)) == [0, 1] and spent(ledger) <= 0.3 and ledger.verify().ok


def test_deciding_before_the_lock_is_taken_would_overspend(tmp_path: Path) -> None:
    """The planted defect: the tests above can fail."""
    ledger = ledger_with(tmp_path, 0.3)
    admitted(tmp_path, started(ledger.place, tmp_path, 3, turns=1, careless=True))
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

"""The ledger in a real PostgreSQL server: one is started on loopback where its programs are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_program import admitted, started

from hushgrad.budget import BrokenChain, Ledger
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import PureDP

sqlalchemy = pytest.importorskip("sqlalchemy", reason="the ledger in PostgreSQL needs hushgrad[ledger]")
pytest.importorskip("psycopg", reason="the ledger in PostgreSQL needs a driver: pip install psycopg[binary]")


def programs() -> Path | None:
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a fresh server on loopback; stopped and removed afterwards."""
    tools = programs()
    if tools is None:
        pytest.skip("no PostgreSQL server is installed here (initdb not found): the shared ledger is not tested")
    folder = Path(tempfile.mkdtemp(prefix="hushgrad-pg-"))
    as_user = []
    if os.getuid() == 0:  # the server refuses to run as root
        if shutil.which("runuser") is None or subprocess.run(["id", "postgres"], capture_output=True, check=False).returncode:
            pytest.skip("PostgreSQL does not run as root, and there is no user for it: the shared ledger is not tested")
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    data, log = folder / "data", folder / "log"
    subprocess.run(
        [*as_user, str(tools / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres"], check=True, capture_output=True
    )
    control = [*as_user, str(tools / "pg_ctl"), "-D", str(data), "-l", str(log), "-w"]
    options = f"-c listen_addresses='' -c unix_socket_directories={folder}"  # a port may be taken by the time it is asked for
    subprocess.run([*control, "-o", options, "start"], check=True, stdout=subprocess.DEVNULL)
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder)


@pytest.fixture
def ledger(url: str) -> Ledger:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("DROP TABLE IF EXISTS hushgrad_ledger"))
    engine.dispose()
    ledger = Ledger.create(url)
    ledger.add("shared", epsilon=1.1, delta=1e-6, composition="pld")
    return ledger


def test_the_same_life_as_in_a_file(ledger: Ledger, url: str) -> None:
    run = ledger.reserve("shared", PureDP(0.5), hold=True)
    ledger.begin(run)
    ledger.commit(run, PureDP(0.25))
    with pytest.raises(BudgetExceeded):
        ledger.reserve("shared", PureDP(1.0))
    again = Ledger.create(url)
    assert again.head == ledger.head and again.verify().ok and again.verify().rows == 5
    assert again.reservation(run.id).charged == PureDP(0.25)


def test_four_processes_never_overspend(ledger: Ledger, url: str, tmp_path: Path) -> None:
    found = admitted(tmp_path, started(url, tmp_path, 4, turns=4, commits=False))
    assert sum(found) == 4 and ledger.status("shared").epsilon <= 1.1 and ledger.verify().ok


def test_a_changed_row_is_found_and_triggers_stop_accidents(ledger: Ledger, url: str) -> None:
    ledger.reserve("shared", PureDP(0.5))
    change = sqlalchemy.text("UPDATE hushgrad_ledger SET text = replace(text, '0.5', '0.1') WHERE number = 3")
    engine = sqlalchemy.create_engine(url)
    with pytest.raises(sqlalchemy.exc.SQLAlchemyError, match="only grows"), engine.begin() as connection:
        connection.execute(change)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("ALTER TABLE hushgrad_ledger DISABLE TRIGGER ALL"))
        connection.execute(change)
    engine.dispose()
    assert "Row 3 was changed" in ledger.verify().problem
    with pytest.raises(BrokenChain):
        ledger.reserve("shared", PureDP(0.1))


def test_a_server_that_is_not_there_is_one_sentence_without_the_password() -> None:
    with pytest.raises(ArgumentError, match="reachable") as refusal:
        Ledger("postgresql+psycopg://someone:hunter2@127.0.0.1:1/none")
    assert "hunter2" not in str(refusal.value)

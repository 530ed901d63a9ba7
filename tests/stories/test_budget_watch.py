"""A ledger that is put back to an earlier copy of itself is whole; the noted head finds it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest
from patience import HANGS, wait_until

from hushgrad.budget import Ledger
from hushgrad.budget.watch import note_head, noted_heads
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError, StorageError
from hushgrad.events import Gaussian


@pytest.fixture
def ledger(tmp_path):
    made = Ledger.create(tmp_path / "budget.db")
    made.add("patients", epsilon=5.0, delta=1e-6)
    yield made
    made.close()


def spend(ledger):
    with ledger.run("patients", Gaussian(20.0), run="one"):
        pass


def test_a_ledger_that_was_put_back_is_found_by_the_noted_head(tmp_path, ledger, capsys):
    place, notes = str(tmp_path / "budget.db"), str(tmp_path / "heads.txt")
    assert main(["ledger", "head", place, "--watch", notes, "--once"]) == 0
    ledger.close()
    shutil.copy(place, tmp_path / "earlier.db")
    spend(Ledger(place))
    assert main(["ledger", "head", place, "--watch", notes, "--once"]) == 0
    assert main(["ledger", "head", place]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == noted_heads(notes)[-1] and len(noted_heads(notes)) == 2
    shutil.copy(tmp_path / "earlier.db", place)
    for journal in tmp_path.glob("budget.db-*"):
        journal.unlink()
    assert main(["ledger", "verify", place]) == 0  # the copy is whole
    assert main(["ledger", "verify", place, "--noted", notes]) == 3
    assert main(["ledger", "head", place, "--watch", notes, "--once", "--json"]) == 3
    assert "cut off at the end" in capsys.readouterr().out and len(noted_heads(notes)) == 2  # nothing is noted of such a ledger


def test_the_watch_notes_every_move_until_ctrl_c(tmp_path, ledger):
    notes = tmp_path / "heads.txt"
    words = [sys.executable, "-m", "hushgrad.cli.main", "ledger", "head", str(tmp_path / "budget.db"), "--watch", str(notes)]
    watcher = subprocess.Popen([*words, "--every", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for count in (1, 2, 3):
            wait_until(lambda: noted_heads(notes)[-1:] == [ledger.head], lambda: watcher.poll() is None)
            assert len(noted_heads(notes)) >= count
            spend(ledger)
    finally:
        watcher.send_signal(signal.SIGINT)
        out, err = watcher.communicate(timeout=HANGS)
    assert watcher.returncode == 0 and err == "Ended.\n" and out.count("is whole") >= 3


def test_what_a_killed_watcher_left_of_a_line_is_cut_off(tmp_path, ledger):
    notes = tmp_path / "heads.txt"
    assert note_head(ledger, notes).ok
    for half in (b"0123", ledger.head.encode(), ledger.head.encode() + b" 7"):
        spend(ledger)
        notes.write_bytes(notes.read_bytes().rsplit(b"\n", 1)[0] + b"\n" + half)
        assert note_head(ledger, notes).ok and noted_heads(notes)[-1] == ledger.head
    assert notes.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("content", ["hello\n", "\n", "0" * 63 + "\n", "{}\n" * 3, "é" * 64 + "\n"])
def test_other_files_are_refused_and_left_alone(tmp_path, ledger, content):
    notes = tmp_path / "heads.txt"
    notes.write_text(content, encoding="utf-8")
    with pytest.raises(ArgumentError, match="one head in each line"):
        note_head(ledger, notes)
    assert notes.read_text(encoding="utf-8") == content
    with pytest.raises(StorageError, match="Choose another file"):
        note_head(ledger, tmp_path / "nowhere" / "heads.txt")


def test_the_words_of_the_command(tmp_path, ledger, capsys):
    place = str(tmp_path / "budget.db")
    assert main(["ledger", "head", place, "--json"]) == 0 and json.loads(capsys.readouterr().out)["head"] == ledger.head
    assert main(["ledger", "verify", place, "--head", "0" * 64, "--noted", "x"]) == 2
    assert main(["ledger", "verify", place, "--noted", str(tmp_path / "none")]) == 2
    assert main(["ledger", "head", place, "--watch", str(tmp_path / "h"), "--every", "0", "--once"]) == 2

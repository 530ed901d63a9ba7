"""What one process of several refuses, or does not survive, ends all of them: soon, and in the same words."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import pytest
from patience import wait_until
from several_processes import start

PROGRAM = Path(__file__).with_name("refused_alone_program.py")
REFUSED = ("begun", "folder", "mixing", "buffer", "examples", "twice", "threads", "frozen", "leaked", "detached", "unshared")
FOREIGN = {
    "foreign": "IndexError",
    "reading": "OSError",
    "journal": "OSError",
    "saved": "OSError",
    "interrupted": "KeyboardInterrupt",
}
PLACES = [
    (what, sharded, closure) for what, sharded, closure in product((*REFUSED, *FOREIGN, "killed"), (False, True), (False, True))
]
# Passes of its own for nobody, alone, wait in torch; so does Ctrl-C between two passes, until that process ends.
# A save by one process alone meets passes of torch's own where parameters are sharded.
PLACES = [
    (what, s, c)
    for what, s, c in PLACES
    if not (what in ("detached", "unshared") and s) and not (what == "interrupted" and not c)
]
DRAWN = [("mixing", True, False), ("mixing", True, True), ("unshared", False, False), *random.Random(20261119).sample(PLACES, 12)]


@pytest.mark.parametrize(("what", "sharded", "closure"), DRAWN)
def test_all_processes_end_with_what_one_of_them_met(tmp_path, what, sharded, closure):
    drawn = random.Random(f"{what} {sharded} {closure}")
    odd, at = drawn.randrange(2), drawn.randrange(2)  # with sharded parameters, examples are compared in the first two batches
    asked = {"what": what, "sharded": sharded, "closure": closure, "odd": odd, "at": at, "folder": str(tmp_path / "run")}
    children = start(PROGRAM, tmp_path, 2, asked)
    other = tmp_path / f"found.{1 - odd}"
    try:
        wait_until(other.exists, lambda: children[1 - odd].poll() is None)  # which does not wait for the group's timeout
        found = json.loads(other.read_text())
        if what == "killed":
            assert found["kind"] == "ProcessLost" and "Another process ended or did not answer in time" in found["says"]
            return
        mine = tmp_path / f"found.{odd}"
        wait_until(mine.exists, lambda: children[odd].poll() is None)
        own = json.loads(mine.read_text())
    finally:
        for child in children:
            child.kill()
    assert found["steps"] == own["steps"]
    if own["kind"] in FOREIGN.values():
        assert found["kind"] == "ProcessLost" and f"A process was stopped by {own['kind']} in a step" in found["says"]
        assert "17" not in found["says"]  # what the other's report says may be about records
    else:
        assert own["kind"] in ("CaptureError", "NotIsolated", "ArgumentError")
        assert (found["kind"], found["says"]) == (own["kind"], own["says"])

"""``make chaos`` and ``make fuzz``, cut short: every fault once, every reader a few times; and both find planted defects.

One process (faults_program.py) imports everything once and forks for each of the four: an import costs more than most faults.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
from several_processes import run

FOLDER = Path(__file__).parents[2] / "faults"
CHOSEN = "disk full|read-only|flipped|clock|worker dies|8 writers|Ctrl-C"
INPUTS = 25  # of each reader: a number, and not a time, so that they are the same ones on every machine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_every_fault_is_survived_every_reader_refuses_nonsense_and_planted_defects_are_found(tmp_path):
    (told,) = run(Path(__file__).with_name("faults_program.py"), tmp_path, 1, {"chosen": CHOSEN, "inputs": INPUTS}, group=False)
    printed = (tmp_path / "errors.0").read_text()[-3000:]
    register = runpy.run_path(str(FOLDER / "register.py"))["READS"]
    assert set(register.values()) <= {row[0] for row in told["fuzz"]}
    for name, tried, count in (("chaos", 1, len(CHOSEN.split("|"))), ("fuzz", INPUTS, 38)):
        assert len(told[name]) == count and all(row[1:3] == [tried, tried] for row in told[name]), (told[name], printed)
    for name in ("chaos, planted", "fuzz, planted"):
        assert any(survived < tried for _, tried, survived, _ in told[name]), (name, told[name])

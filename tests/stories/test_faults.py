"""``make chaos`` and ``make fuzz``, cut short: every fault once, every reader a few times; and both find planted defects.

One process imports everything once and forks for each of the four: an import costs more than most faults.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "faults"
CHOSEN = "disk full|read-only|flipped|clock|worker dies|8 writers|Ctrl-C"
INPUTS = 25  # of each reader: a number, and not a time, so that they are the same ones on every machine
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(FOLDER)!r})
import chaos, fuzz, lives
import hushgrad.recipes.files as files
import hushgrad.train.tree as tree

def planted(module, name, defect, task):
    # The first of several seeds that finds it: the first one here, perhaps a later one where files have other lengths.
    setattr(module, name, defect)
    for seed in range(6, 40):
        found = task(seed)
        if any(row.survived < row.tried for row in found):
            break
    return found

lives.warm_up()
tasks = {{
    "chaos": lambda: chaos.run(0, 1, only={CHOSEN!r}),
    "fuzz": lambda: fuzz.run(0, 1, count={INPUTS}),
    # Without the digest a flipped bit goes unnoticed; without the size check a header is believed.
    "chaos, planted": lambda: planted(tree, "_digest", lambda header, tensors: "none", lambda seed: chaos.run(0, seed, only="flipped")),
    "fuzz, planted": lambda: planted(
        files, "_exactly", lambda stream, size, path: bytes(stream.read()), lambda seed: fuzz.run(0, seed, only="idx files", count=60)),
}}
told = {{}}
for name, task in tasks.items():
    told[name] = lives.outcome(*lives.fork(lambda: [(row.name, row.tried, row.survived, row.seen) for row in task()]))
print("\\n" + json.dumps(told))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_every_fault_is_survived_every_reader_refuses_nonsense_and_planted_defects_are_found():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    register = runpy.run_path(str(FOLDER / "register.py"))["READS"]
    assert set(register.values()) <= {row[0] for row in told["fuzz"]}
    for name, tried, count in (("chaos", 1, len(CHOSEN.split("|"))), ("fuzz", INPUTS, 38)):
        assert len(told[name]) == count and all(row[1:3] == [tried, tried] for row in told[name]), (
            told[name],
            done.stdout[-3000:],
        )
    for name in ("chaos, planted", "fuzz, planted"):
        assert any(survived < tried for _, tried, survived, _ in told[name]), (name, told[name])

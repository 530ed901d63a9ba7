"""``make chaos`` and ``make fuzz``, cut short: every fault once, every reader for a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "faults"


def _run(script: str, *words: str) -> str:
    command = [sys.executable, str(FAULTS / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("fault", ["disk full", "read-only", "flipped", "clock", "worker dies", "8 writers", "Ctrl-C"])
def test_every_fault_is_survived(fault):
    out = _run("chaos.py", "--seconds", "0", "--seed", "1", "--only", fault)
    assert "survived" in out and "all survived" in out


def test_every_reader_refuses_nonsense():
    out = _run("fuzz.py", "--count", "25", "--seed", "1")  # a number of inputs, and not a time: the same ones on every machine
    assert "nothing found" in out and out.count("25 of 25") == 24


@pytest.mark.parametrize("script", ["chaos.py", "fuzz.py"])
def test_a_planted_defect_is_found(script, tmp_path):
    """Without the digest a flipped bit goes unnoticed; without the size check a header is believed."""
    planted = tmp_path / "planted.py"
    defect = {
        "chaos.py": "import hushgrad.train.tree as tree; tree._digest = lambda header, tensors: 'none'",
        "fuzz.py": "import hushgrad.recipes.files as files, numpy as np; files._exactly = lambda stream, size, path: bytes(stream.read())",
    }[script]
    only = {"chaos.py": "flipped", "fuzz.py": "idx files"}[script]
    planted.write_text(
        f"import sys; sys.path.insert(0, {str(FAULTS)!r}); sys.argv = ['x', '--seconds', '12', '--seed', '5', '--only', {only!r}]\n"
        f"{defect}\nimport runpy; runpy.run_path({str(FAULTS / script)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(planted)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr

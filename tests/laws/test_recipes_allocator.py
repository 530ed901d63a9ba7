"""Large blocks of memory are kept by the process: the second use of one asks the system for no pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS

FILE = Path(__file__).resolve().parents[2] / "src" / "hushgrad" / "recipes" / "allocator.py"
PROGRAM = """
import resource, runpy, sys
told = runpy.run_path(sys.argv[1])["keep_large_blocks"]() if len(sys.argv) > 1 else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(100_000_000)
before = faults()
for _ in range(3):
    bytearray(100_000_000)
print(told, faults() - before)
"""


def run(*words: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True, timeout=HANGS)
    told, count = done.stdout.split()
    return told, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc")
def test_large_blocks_are_kept():
    told, kept = run(str(FILE))
    if told != "True":
        pytest.skip("another C library than glibc")
    assert kept < run()[1] / 10

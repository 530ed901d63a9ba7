"""How long a test waits for what may hang, and how much a piece of work does: no verdict depends on the time that something takes.

A clock says how busy the machine is. So nothing is asserted about one: work is counted (calls, bytes), and who waits for another process
waits until it is there, or until it is certain that it never will be.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

__all__ = ["HANGS", "calls_in", "easily", "memory_of", "next_tick", "wait_until"]

Answer = TypeVar("Answer")

HANGS = 600.0  # seconds after which something hangs, on a machine that runs ten other suites, too; pytest gives up after 900


def wait_until(there: Callable[[], object], while_: Callable[[], object] = lambda: True) -> None:
    """Wait until ``there()``; an error as soon as ``while_()`` does not hold any more, or after ``HANGS`` seconds."""
    until = time.monotonic() + HANGS
    while not there():
        alive = while_()
        assert there() or (alive and time.monotonic() < until), "what is waited for will never be there"
        time.sleep(0.01)


def next_tick(folder: Path) -> None:
    """Wait until files of ``folder``'s disk would get a later time than any has now: a system's clock of files moves in steps."""

    def now() -> int:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_ctime_ns

    before = now()
    wait_until(lambda: now() > before)


def calls_in(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, of Python's and of C's: the same number on every machine, however busy."""
    count = 0

    def called(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event.endswith("call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def memory_of(work: Callable[[], object]) -> int:
    """How many bytes ``work`` holds at once at most, numpy's arrays among them."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def easily(question: Callable[[], Answer]) -> Answer:
    """What an accountant answers, with at most a million calls and 200 million numbers in Fourier transforms (about 5 s of work)."""
    import numpy as np  # here: programs that only wait do without

    answers, transformed = list[Answer](), [0]

    def counting(name: str):
        real = getattr(np.fft, name)

        def transform(numbers: object, *args: object) -> object:
            transformed[0] += np.size(numbers)
            return real(numbers, *args)

        return mock.patch.object(np.fft, name, transform)

    with counting("rfft"), counting("irfft"):
        calls = calls_in(lambda: answers.append(question()))
    assert calls <= 1_000_000 and transformed[0] <= 200_000_000, (calls, transformed)
    return answers[0]

"""The optional C libraries: plain shared objects beside the modules that use them, without any Python API, and threads to run them on.

A call through ctypes releases the interpreter's lock, so ordinary threads work side by side.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

__all__ = ["in_turns", "load"]

T = TypeVar("T")
Job = TypeVar("Job")

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def load(module: str, stem: str, use: Callable[[ctypes.CDLL], T]) -> T | None:
    """``use(library)`` for the library ``stem`` beside the file ``module``; None where it was not built or is another machine's.

    HUSHGRAD_KERNEL=numpy in the environment does without all of them.
    """
    libraries = sorted(Path(module).parent.glob(f"{stem}.*.so"))
    if os.environ.get("HUSHGRAD_KERNEL") == "numpy" or not libraries:
        return None
    try:
        return use(ctypes.CDLL(str(libraries[0])))
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing, so it is an older build
        warnings.warn(f"The C library {stem} could not be loaded ({error}); the slower way without it is used.", stacklevel=2)
        return None


def in_turns(jobs: Sequence[Job], work: Callable[[Job], None], threads: int) -> None:
    """``work(job)`` for every job, on so many threads; the result must not depend on the order."""
    waiting, lock = iter(jobs), threading.Lock()

    def run() -> None:
        while True:
            with lock:  # each job goes to exactly one thread, also without the interpreter's own lock
                job = next(waiting, None)
            if job is None:
                return
            work(job)

    helpers = [_pool(threads).submit(run) for _ in range(threads - 1)] if threads > 1 else []
    try:
        run()
    finally:
        for helper in helpers:
            helper.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    place = (os.getpid(), threads)  # a forked child must not inherit a pool whose threads stayed in the parent
    if place not in _pools:
        _pools[place] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hushgrad")
    return _pools[place]

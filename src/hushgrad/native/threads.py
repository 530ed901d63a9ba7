"""Threads to run the C libraries on.

A call through ctypes releases the interpreter lock, so threads run in parallel. torch's own OpenMP threads are used: they spin while they
wait for work, and other threads would have to share the processors with them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Job = TypeVar("Job")

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # the body of a parallel region
_home = os.getpid()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def in_turns(jobs: Sequence[Job], work: Callable[[Job], None], threads: int) -> None:
    """Call ``work(job)`` for every job, on at most ``threads`` threads; the result must not depend on the order."""
    if threads <= 1:
        for job in jobs:
            work(job)
        return
    waiting, lock, errors = iter(jobs), threading.Lock(), list[BaseException]()

    def run(_: object = None) -> None:
        try:
            while not errors:
                with lock:  # each job goes to one thread, also in free-threaded Python
                    job = next(waiting, None)
                if job is None:
                    return
                work(job)
        except BaseException as error:  # noqa: BLE001 (Ctrl-C too: nothing may be raised through a parallel region)
            errors.append(error)

    _together(run, threads)
    if errors:
        raise errors[0]


def _together(run: Callable[[], None], threads: int) -> None:
    """Call ``run()`` on several threads, including this one."""
    parallel = _parallel()
    if parallel is not None and os.getpid() == _home:  # a forked child does not inherit OpenMP's threads
        parallel(_BODY(run), None, threads, 0)
        return
    helpers = [_pool(threads).submit(run) for _ in range(threads - 1)]
    run()
    for helper in helpers:
        helper.result()


@cache
def _parallel() -> Callable[..., None] | None:
    """The function of torch's OpenMP library that opens a parallel region; None if it is not found."""
    try:
        function = ctypes.CDLL(None)["GOMP_parallel"]
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = (_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return function


def _pool(threads: int) -> ThreadPoolExecutor:
    place = (os.getpid(), threads)  # a forked child must not use a pool whose threads exist only in the parent
    if place not in _pools:
        _pools[place] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hushgrad")
    return _pools[place]

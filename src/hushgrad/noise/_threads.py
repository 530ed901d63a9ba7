"""Work on a long range in cache-sized chunks, on as many threads as torch uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["CHUNK", "SHARE", "over_chunks"]

CHUNK = 1 << 15  # numbers: 128 KiB of float32 and 192 KiB of key stream stay in a core's L2 cache
SHARE = 1 << 17  # numbers for a thread at a time, where the work itself stays in the cache; for less, a thread does not pay

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    place = (os.getpid(), threads)  # a forked child must not inherit a pool whose threads stayed in the parent
    if place not in _pools:
        _pools[place] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hushgrad-noise")
    return _pools[place]


def over_chunks(count: int, work: Callable[[int, int], None], chunk: int = CHUNK) -> None:
    """Call ``work(low, high)`` for consecutive chunks of ``range(count)``; the result must not depend on the order."""
    if count <= chunk:
        if count:
            work(0, count)
        return
    threads = min(torch.get_num_threads(), -(-count // chunk)) if count >= SHARE else 1
    chunks, lock = iter(range(0, count, chunk)), threading.Lock()

    def run() -> None:
        while True:
            with lock:  # each chunk goes to exactly one thread, also without the interpreter's own lock
                low = next(chunks, count)
            if low >= count:
                return
            work(low, min(low + chunk, count))

    helpers = [_pool(threads).submit(run) for _ in range(threads - 1)] if threads > 1 else []
    try:
        run()
    finally:
        for helper in helpers:
            helper.result()

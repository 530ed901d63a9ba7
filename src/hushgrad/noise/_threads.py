"""Work on a long range in cache-sized chunks, on as many threads as torch uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from hushgrad.noise._kernel import Piece

__all__ = ["CHUNK", "SHARE", "over_chunks", "over_shares"]

CHUNK = 1 << 15  # numbers: 128 KiB of float32 and 192 KiB of key stream stay in a core's L2 cache
SHARE = 1 << 17  # numbers for a thread at a time, where the work itself stays in the cache; for less, a thread does not pay
_TURNS = 4  # for each thread, so that one that starts late or is disturbed gets fewer

Job = TypeVar("Job")
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    place = (os.getpid(), threads)  # a forked child must not inherit a pool whose threads stayed in the parent
    if place not in _pools:
        _pools[place] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hushgrad-noise")
    return _pools[place]


def over_chunks(count: int, work: Callable[[int, int], None], chunk: int | None = CHUNK) -> None:
    """Call ``work(low, high)`` for consecutive chunks of ``range(count)``; the result must not depend on the order.

    ``chunk`` None: the work itself stays in the cache, and is cut for the threads alone.
    """
    threads = torch.get_num_threads() if count >= SHARE else 1
    if chunk is None:
        chunk = count if threads == 1 else max(SHARE, -(-count // (threads * _TURNS * CHUNK)) * CHUNK)
    if count <= chunk:
        if count:
            work(0, count)
        return
    threads = min(threads, -(-count // chunk))
    _in_turns([(low, min(low + chunk, count)) for low in range(0, count, chunk)], lambda part: work(*part), threads)


def over_shares(pieces: Sequence[Piece], work: Callable[[Sequence[Piece]], None]) -> None:
    """Call ``work`` on shares of the pieces, cut so that each thread gets some; the result must not depend on the order."""
    threads = torch.get_num_threads()
    if threads == 1 or sum(piece.count for piece in pieces) <= SHARE:
        if pieces:
            work(pieces)
        return
    shares: list[list[Piece]] = [[]]
    room = SHARE
    for piece in pieces:
        for low in range(0, piece.count, SHARE):
            part = replace(piece, start=piece.start + low, low=piece.low + low, count=min(SHARE, piece.count - low))
            if part.count > room:
                shares.append([])
                room = SHARE
            shares[-1].append(part)
            room -= part.count
    _in_turns(shares, work, min(threads, len(shares)))


def _in_turns(jobs: Sequence[Job], work: Callable[[Job], None], threads: int) -> None:
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

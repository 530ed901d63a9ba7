"""Parallel work on a long range in cache-sized chunks, on torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hushgrad import native

if TYPE_CHECKING:
    from hushgrad.noise._kernel import Piece

CHUNK = 1 << 15  # numbers: 128 KiB of float32 and 192 KiB of key stream stay in a core's L2 cache
SHARE = 1 << 17  # numbers for a thread at a time, if the work stays in the cache by itself; a smaller share is not worth a thread
_TURNS = 4  # shares for each thread, so that a slow thread can take fewer


def over_chunks(count: int, work: Callable[[int, int], None], chunk: int | None = CHUNK) -> None:
    """Call ``work(low, high)`` for consecutive chunks of ``range(count)``; the result must not depend on the order.

    ``chunk`` None: the work stays in the cache by itself, and is only divided among the threads.
    """
    threads = torch.get_num_threads() if count >= SHARE else 1
    if chunk is None:
        chunk = count if threads == 1 else max(SHARE, -(-count // (threads * _TURNS * CHUNK)) * CHUNK)
    if count <= chunk:
        if count:
            work(0, count)
        return
    threads = min(threads, -(-count // chunk))
    native.in_turns([(low, min(low + chunk, count)) for low in range(0, count, chunk)], lambda part: work(*part), threads)


def worth_one_thread(pieces: Sequence[Piece]) -> bool:
    """Whether the pieces are too small for a second thread."""
    total = 0
    for piece in pieces:
        total += piece.size
    return total <= SHARE


def over_shares(pieces: Sequence[Piece], work: Callable[[Sequence[Piece]], None]) -> None:
    """Call ``work`` on shares of the pieces, divided among the threads; the result must not depend on the order."""
    shares: list[list[Piece]] = [[]]
    room = SHARE
    for piece in pieces:
        for low in range(0, piece.size, SHARE):
            part = piece._replace(start=piece.start + low, low=piece.low + low, size=min(SHARE, piece.size - low))
            if part.size > room:
                shares.append([])
                room = SHARE
            shares[-1].append(part)
            room -= part.size
    native.in_turns(shares, work, min(torch.get_num_threads(), len(shares)))

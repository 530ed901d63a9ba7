"""How far a run may go before it flushes its journal to the disk again.

Flushing takes milliseconds. So a mark reserves as many steps as fit into four hundred times that: it is on the disk before the first
of them begins.
"""

from __future__ import annotations

import time

from hushgrad.release.frames import SHORT, Frames

__all__ = ["Marks"]

_SHARE = 400  # flushing takes at most one part in so many of the time


class Marks:
    """Steps below ``reached`` may be taken, and may have been."""

    def __init__(self, reached: int = 0) -> None:
        self.reached = reached
        self._block, self._flushed_at, self._took = 1, 0.0, 0.0

    def reserve(self, step: int, frames: Frames) -> None:
        """Reserve ``step`` and some behind it, in ``frames`` and on the disk."""
        began = time.perf_counter()
        spent = began - self._flushed_at
        mark = step + self._block
        frames.append(ord("m"), mark.to_bytes(SHORT, "little"))
        frames.flush()
        self.reached = mark
        self._flushed_at = time.perf_counter()
        took = self._flushed_at - began
        self._took = (3 * self._took + took) / 4 if self._took else took  # one quick flush says little about the next
        if spent < _SHARE * self._took:
            self._block = min(2 * self._block, 1 << 20)
        elif spent > 2 * _SHARE * self._took:
            self._block = max(1, self._block // 2)

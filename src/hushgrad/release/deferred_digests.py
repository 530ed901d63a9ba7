"""Digests of releases on a device, computed on demand, so that a step does not wait for the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch import Tensor

_MOST = 256  # steps that may wait


class DeferredDigests:
    """The norms of the steps whose digest is not yet in the journal, and the function that enters it.

    Used only by a run without a journal on disk: there the digest distinguishes two ledgers of one run, and nothing is compared with it
    before a release.
    """

    def __init__(self, enter: Callable[[int, bytes], None]) -> None:
        self._enter = enter
        self.waiting: list[tuple[int, Tensor]] = []

    def add(self, step: int, norms: Tensor) -> None:
        """Remember a release; every 256 steps the device is synchronised once."""
        self.waiting.append((step, norms))
        if len(self.waiting) >= _MOST:
            self.settle()

    def settle(self) -> None:
        """Enter the pending digests in order."""
        waiting, self.waiting = self.waiting, []
        for step, norms in waiting:
            self._enter(step, hashlib.blake2b(norms.detach().cpu().numpy(), digest_size=8).digest())  # type: ignore[arg-type]

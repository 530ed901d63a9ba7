"""The gate that a model must pass with its first batch: no example influences another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hushgrad.clipping import Capture, isolation_at_first_call
from hushgrad.errors import NotIsolated
from hushgrad.train.distributed import World
from hushgrad.train.together import CheckedTogether

__all__ = ["IsolationGate"]


class IsolationGate:
    """Runs the isolation check on the first batch, and refuses every step of a model that failed it."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._failed = False
        self._together: CheckedTogether | None = None

    def attach(self, world: World, *, sharded: bool) -> Any:
        """Have the first batch checked; the handle to remove the hook with."""
        if not sharded:
            return isolation_at_first_call(self._capture.model, self._checking)
        self._together = CheckedTogether(self._capture.model, world, self._checking)
        return self._together

    def before(self, examples: int) -> None:
        """The next pass is over this many examples in this process."""
        if self._together is not None:
            self._together.before(examples)

    def require_passed(self) -> None:
        """Raise if the check has failed.

        Raises:
            NotIsolated: for good, also if the check's own error was caught.
        """
        if self._failed:
            raise NotIsolated(
                "This model lets examples influence each other, as the first batch showed. Replace the layer first."
            )

    @contextmanager
    def _checking(self) -> Iterator[None]:
        self._failed = True
        with self._capture.pause():
            yield
        self._failed = False

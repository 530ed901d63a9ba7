"""The gate that a model must pass before its steps are released: no example influences another."""

from __future__ import annotations

from typing import Any

from hushgrad.clipping import Capture
from hushgrad.errors import NotIsolated
from hushgrad.release.placement.together import CheckedTogether
from hushgrad.release.placement.world import World

__all__ = ["IsolationGate"]


class IsolationGate:
    """Refuses every step of a model that failed the capture's proof, or whose passes went around it.

    The capture proves each kind of pass before it is used. Where parameters are sharded, all processes check together.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._together: CheckedTogether | None = None

    def attach(self, world: World, *, sharded: bool) -> Any:
        """Have the first batch of sharded parameters checked; the handle to remove the hook with, if there is one."""
        if sharded:
            self._together = CheckedTogether(self._capture.model, world, self._capture.pause)
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
        problem = self._capture.not_isolated
        if problem:
            raise NotIsolated(problem)

"""What the journal of a run shows to whoever has not its key: whether, and how often, something was released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.release.frames import frames_in

__all__ = ["Shown"]


class Shown:
    """Questions to the journal in a file; nothing is written and nobody has to own the folder."""

    @classmethod
    def is_begun(cls, path: Path) -> bool:
        """Whether the journal in ``path`` shows that a step may have been released; its key is not needed."""
        return any(frame.kind in b"ram" for frame in frames_in(path))

    @classmethod
    def steps_released(cls, path: Path) -> int:
        """How many releases the journal in ``path`` shows; its key is not needed."""
        return len(cls.digests(path))

    @classmethod
    def digests(cls, path: Path) -> list[bytes]:
        """The digest of every release that the journal in ``path`` shows, as far as it is written there; its key is not needed."""
        return [frame.content for frame in frames_in(path) if frame.kind == ord("r")]

    @classmethod
    def bound_in(cls, path: Path) -> dict[str, Any]:
        """What the run of the journal in ``path`` is bound to; its key is not needed."""
        bound = dict[str, Any]()
        for frame in frames_in(path):
            if frame.kind == ord("j"):
                bound.update(_check.parsed(frame.content).get("bind", {}))
        return bound

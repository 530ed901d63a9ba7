"""What earlier processes of a run left in its journal, and whether it is complete and in its own place."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.journal_frames import FRAME, WAYS_ON, Frames, damaged, frames_in
from hushgrad.release.journal_place import Known, born
from hushgrad.release.owner import boot_identity

_UNTOLD = (
    "The disk keeps no attributes of folders, by which an older copy of the run's files would be known: that none was put back is vouched "
    "for, not shown"
)


@dataclass(kw_only=True)
class JournalHistory:
    """(kind, digest) of every release, the last mark, what the run is bound to, and what the user vouched for."""

    recorded: list[tuple[int, bytes]] = field(default_factory=list)
    mark: int = 0
    bound: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    known: Known = field(default_factory=Known)  # what the folder knows
    _boot: str = ""
    _place: list[Any] | None = None
    _told: bool = False  # whether the folder records every frame

    @classmethod
    def of(cls, frames: Frames) -> JournalHistory:
        """Read these frames; what can no longer be verified is added to them as a note.

        Raises:
            ArgumentError: if the file is damaged, an older version, or a copy of one that still exists.
        """
        earlier = cls(known=frames.known)
        for frame in frames.there:
            earlier._add(frame.kind, frame.content)
        lasting = bool(earlier._boot) and earlier._boot == boot_identity()
        earlier._require_whole(frames.rest, lasting)
        if frames.is_put_back(earlier.known):
            raise ArgumentError(
                "Expected the journal as this folder last saw it: an older one was put in its place, and nobody knows what was released "
                f"since. {WAYS_ON}"
            )
        outside = earlier._copied(*frames.place.identity) or (earlier._touched() if frames.is_touched(earlier.known) else "")
        if frames.rest:
            frames.cut()
        for note in (earlier._lost(lasting), outside):
            if note and note not in earlier.notes:
                frames.tell(note=note)
                earlier.notes += (note,)
        return earlier

    def _add(self, kind: int, content: bytes) -> None:
        if kind in b"ra":
            self.recorded.append((kind, content))
        elif kind in b"m":
            self.mark = int.from_bytes(content, "little")
        else:
            told = _check.parsed(content)
            self._boot, self._place = told.get("open", self._boot), told.get("place", self._place)
            self._told = told.get("told", self._told)
            self.bound.update(told.get("bind", {}))
            self.notes += (told["note"],) if "note" in told else ()

    @property
    def digests(self) -> list[bytes]:
        """The digest of every release, as far as recorded."""
        return [digest for kind, digest in self.recorded if kind == ord("r")]

    @property
    def is_begun(self) -> bool:
        """Whether a step may have been released."""
        return bool(self.recorded) or self.mark > 0

    @property
    def _steps(self) -> int:
        return len(self.digests)

    def _require_whole(self, rest: bytes, lasting: bool) -> None:
        """Require that nothing follows the last frame, except what a crash may have left after the last flush; all else is damage."""
        opening = rest[:1] == b"j" and int.from_bytes(rest[1:6], "little") > len(rest) - FRAME
        if rest and not opening and (lasting or len(rest) > FRAME * (self.mark - self._steps + 1)):
            raise damaged()

    def _lost(self, lasting: bool) -> str:
        if lasting or self.mark <= self._steps:
            return ""
        return (
            f"The machine stopped in steps {self._steps} to {self.mark - 1}: that their repetition released the same values is vouched "
            "for by the same files and program, not shown"
        )

    def _touched(self) -> str:
        return (
            f"The run's journal was changed from outside, put back or given other rights, after {self._steps} releases: that nothing else "
            "was released since is vouched for, not shown"
        )

    def _forgotten(self) -> str:
        """The note for a folder that does not know the journal's length: an older version in its place would go unnoticed."""
        if not self._told:
            return _UNTOLD if self.is_begun else ""
        return (
            f"The folder's attribute with the length of the run's journal was removed, or the journal taken to another folder, after "
            f"{self._steps} releases: that nothing else was released since is vouched for, not shown"
        )

    def _copied(self, path: str, *identity: int) -> str:
        """Refuse a copy of a journal whose original still exists; for a copy alone, return a note that it is one."""
        before, *last = self._place or [path, *identity]
        if last == list(identity[: len(last)]):  # an earlier version stored the number alone
            return "" if self._told and self.known.length else self._forgotten()
        if _is_there(Path(before), last):
            raise ArgumentError(
                f"Expected the run itself, not a copy of it: {before!r} is still there, and two that go on would release one noise twice. "
                "Go on with that one, or remove it first."
            )
        return (
            f"The run's folder was copied or put back after {self._steps} releases: that nobody went on from the original is vouched for, "
            "not shown"
        )


def shown(path: Path) -> JournalHistory:
    """What the journal in ``path`` shows without its key. Nothing is checked or written, and the folder need not be owned."""
    earlier = JournalHistory()
    for frame in frames_in(path):
        earlier._add(frame.kind, frame.content)
    return earlier


def other_story(how: str) -> ArgumentError:
    """The error message for a journal and a state of different runs."""
    return ArgumentError(f"Expected the journal and the state of one run; the state {how}. {WAYS_ON}")


def _is_there(path: Path, identity: list[int]) -> bool:
    """Whether this very file is at ``path``, by its inode number and its time of creation."""
    try:
        with open(path, "rb") as file:
            return [os.fstat(file.fileno()).st_ino, born(file.fileno())][: len(identity)] == identity
    except OSError:  # an unreadable journal cannot be continued
        return False

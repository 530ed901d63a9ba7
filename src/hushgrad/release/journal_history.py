"""What the earlier lives of a run left in its journal, what it shows without its key, and whether it is all there, and theirs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.frames import FRAME, WAYS_ON, Frames, damaged, frames_in
from hushgrad.release.journal_place import Known, born
from hushgrad.release.owner import boot_identity

__all__ = ["JournalHistory", "other_story", "shown"]

_UNTOLD = (
    "The disk keeps no attributes of folders, by which an older copy of the run's files would be known: that none was put back is vouched "
    "for, not shown"
)


@dataclass(kw_only=True)
class JournalHistory:
    """(kind, digest) of every release, the last mark, what the run is bound to, and what was vouched for."""

    recorded: list[tuple[int, bytes]] = field(default_factory=list)
    mark: int = 0
    bound: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    known: Known = field(default_factory=Known)  # by the folder
    _boot: str = ""
    _place: list[Any] | None = None
    _told: bool = False  # the folder, of every frame

    @classmethod
    def of(cls, frames: Frames) -> JournalHistory:
        """What is in these frames; what nobody can show any more is added to them as a note.

        Raises:
            ArgumentError: where the file is damaged, an older one, or a copy of one that is still there.
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
        """The digest of every release, as far as it is written down."""
        return [digest for kind, digest in self.recorded if kind == ord("r")]

    @property
    def is_begun(self) -> bool:
        """Whether a step may have been released."""
        return bool(self.recorded) or self.mark > 0

    @property
    def _steps(self) -> int:
        return len(self.digests)

    def _require_whole(self, rest: bytes, lasting: bool) -> None:
        """Behind the last frame is nothing, or what a machine that stopped may have left behind the last flush; all else is damage."""
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
        """What is said where the folder does not know how long the journal was: nobody would see an older one in its place."""
        if not self._told:
            return _UNTOLD if self.is_begun else ""
        return (
            f"The folder's attribute with the length of the run's journal was removed, or the journal taken to another folder, after "
            f"{self._steps} releases: that nothing else was released since is vouched for, not shown"
        )

    def _copied(self, path: str, *identity: int) -> str:
        """Refuse a copy of a journal that is still where it was; of a copy alone, say that it is one."""
        before, *last = self._place or [path, *identity]
        if last == list(identity[: len(last)]):  # those of an earlier version know the number alone
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
    """What the journal in ``path`` shows to whoever has not its key; nothing is judged or written, and nobody has to own the folder."""
    earlier = JournalHistory()
    for frame in frames_in(path):
        earlier._add(frame.kind, frame.content)
    return earlier


def other_story(how: str) -> ArgumentError:
    """What is said of a journal and a state that are not of one run."""
    return ArgumentError(f"Expected the journal and the state of one run; the state {how}. {WAYS_ON}")


def _is_there(path: Path, identity: list[int]) -> bool:
    """Whether the very file is at ``path``, by its number on the disk and its birth."""
    try:
        with open(path, "rb") as file:
            return [os.fstat(file.fileno()).st_ino, born(file.fileno())][: len(identity)] == identity
    except OSError:  # nobody can go on from what cannot be read
        return False

"""The journal of a run: everything that was ever released under its key, in order, so that no row of noise is used twice.

A restart repeats the steps since its last checkpoint. That is safe: the same value again reveals nothing. But another value with
the same noise would reveal the difference of two bare sums. So the journal holds one digest for each release, and a run that repeats
steps must produce the same list; it is stopped *before* it releases anything else.

One file, ``journal``, next to the key, mode 0600, made of :mod:`frames <hushgrad.release.journal_frames>`:

| kind | 5 bytes | written |
|---|---|---|
| ``r`` | the digest of a release | before it is handed out |
| ``a`` | the digest of a reading of all lazy tables | before their noise is drawn |
| ``m`` | a mark: steps below it may be taken | flushed to the disk before the first of them begins |
| ``j`` | the length of a JSON object that follows | what the run is bound to; each opening; what the user vouches for |

The digests form a chain: each covers all before it, under a key of its own. A mark reserves several steps at once. A killed process loses
nothing that it has written; a machine crash may lose digests after the last mark, and the steps up to the mark then count as released:
they are repeated without comparison, and the guarantee says so (``notes``), also after later restarts, as it does for a copy without its
original.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.release.journal_frames import SHORT, WAYS_ON, Frames, Marks
from hushgrad.release.journal_history import JournalHistory, other_story
from hushgrad.release.journal_place import Known
from hushgrad.release.key_reuse import TWICE, KeyUse
from hushgrad.release.keys import RunKey
from hushgrad.release.owner import Owner, boot_identity, forked

__all__ = ["JOURNAL", "WAYS_ON", "Journal"]

JOURNAL = "journal"
_CHAIN = 16  # bytes of the whole digest, of which a frame has some


class Journal:
    """The releases of one run: in a file, see :meth:`create` and :meth:`open`, or only in memory.

    ``position`` counts the releases so far and ``chain`` is their digest; a checkpoint holds both, for :meth:`seek`.

        >>> journal = Journal(RunKey.make(seed=1))
        >>> journal.begin(0); journal.released(0, b"what was released")
        >>> journal.position, len(journal.chain)
        (1, 16)
    """

    def __init__(self, key: RunKey, *, notes: tuple[str, ...] | None = None) -> None:
        self._key = key.journal
        self._frames: Frames | None = None
        self._owner: Owner | None = None
        self._marks, self._closed, self._process = Marks(), False, os.getpid()
        self._before, self._half = 0, False  # something was entered and not done, or done and not entered
        self._key_use = KeyUse.of(key)  # what this process releases under it
        self._entered, self._last = self._key_use.begun(), tuple[int, ...]()
        self._recorded: list[tuple[int, bytes]] = []  # (kind, short digest): what earlier lives released
        self.bound: dict[str, Any] = {}
        # Keyed from the start: the place that the first release is witnessed at follows from it, and must not be known.
        self.position, self.chain = 0, hashlib.blake2b(b"start", digest_size=_CHAIN, key=self._key).digest()
        self._start = self.chain[:SHORT]
        self._notes = key.notes if notes is None else notes

    @classmethod
    def create(cls, path: Path, key: RunKey, owner: Owner, bound: Mapping[str, Any]) -> Journal:
        """A new journal in ``path``, flushed to the disk, bound to its key and to what is given.

        Raises:
            ArgumentError: if the folder knows of releases under this key whose journal is gone. A seed may be used again.
        """
        journal, frames = cls._in(path, key, owner, new=True)
        for name, value in {"key": key.fingerprint, **bound}.items():
            journal._bind(name, value)
        if frames.known.begun and not key.reproducible:
            journal.close()
            path.unlink()
            raise ArgumentError(
                "Expected a key that was never used: a run under it may have released something in this folder, and its journal is gone. "
                + WAYS_ON
            )
        journal._opening(Known())
        for note in journal.notes:
            frames.tell(note=note)
        return journal

    @classmethod
    def open(cls, path: Path, key: RunKey, owner: Owner) -> Journal:
        """The journal in ``path``; nothing is released yet. :meth:`seek` says where the run continues.

        Raises:
            ArgumentError: if the file is damaged, or a copy of one that still exists.
        """
        journal, frames = cls._in(path, key, owner, new=False)
        try:
            earlier = JournalHistory.of(frames)
        except BaseException:
            journal.close()
            raise
        journal._recorded, journal._marks = earlier.recorded, Marks(earlier.mark)
        journal.bound, journal._notes = earlier.bound, earlier.notes
        journal._opening(earlier.known)
        return journal

    @classmethod
    def _in(cls, path: Path, key: RunKey, owner: Owner, *, new: bool) -> tuple[Journal, Frames]:
        journal, frames = cls(key), Frames(path, new=new)
        journal._frames, journal._owner = frames, owner
        owner.lend(frames.close)  # whoever takes the folder over takes the file, too
        return journal, frames

    def _opening(self, known: Known) -> None:
        assert self._frames is not None
        self._frames.tell(open=boot_identity(), place=self._frames.place.identity, told=self._frames.claim(known))
        self.flush()

    @property
    def durable(self) -> bool:
        """Whether it is on disk."""
        return self._frames is not None

    def close(self) -> None:
        """No more releases."""
        if self._frames is not None:
            self._frames.close()
        self._frames, self._closed = None, True

    def __del__(self) -> None:
        if getattr(self, "_frames", None) is not None:
            self.close()

    def seek(self, position: int, chain: bytes) -> None:
        """Continue after the first ``position`` releases, whose digest is ``chain``, as a checkpoint says.

        Raises:
            ArgumentError: if the journal is shorter than that, or has other releases.
        """
        if self._frames is not None:
            if position > len(self._recorded):
                raise other_story("is ahead of its journal, so one of them is a copy from another time")
            if chain[:SHORT] != (self._recorded[position - 1][1] if position else self._start):
                raise other_story("is another run's")
        self.position, self.chain = position, chain

    def catch_up(self, position: int, chain: bytes, *, before: bytes, witness: bytes) -> None:
        """The same for releases that cannot be repeated: each is saved first, then entered here, then handed out.

        ``before`` is the digest of all but the last of the ``position`` releases that were saved, and ``witness`` the last one's.

        Raises:
            ArgumentError: if more was released than is saved, or what is saved does not continue what was released.
        """
        if position < len(self._recorded):
            raise ArgumentError(
                f"Expected the state of {len(self._recorded)} releases; it has {position}, and what was asked of others cannot be "
                f"asked again under the same noise. {WAYS_ON}"
            )
        if position == len(self._recorded) + 1:  # it died between the two writes; nothing has been handed out
            assert self._frames is not None
            last, self.chain = self._recorded[-1][1] if self._recorded else self.chain[:SHORT], before
            if before[:SHORT] != last or self.after(position - 1, witness) != chain:
                raise other_story("is another run's")
            self._frames.append(ord("r"), chain[:SHORT])
            self._recorded.append((ord("r"), chain[:SHORT]))
        self.seek(position, chain)

    def after(self, step: int, witness: bytes) -> bytes:
        """The value of ``chain`` after releasing ``step``."""
        return self._digest(ord("r"), step.to_bytes(8, "little") + witness)

    @property
    def ahead(self) -> int:
        """How many releases earlier processes made beyond this point: they are repeated first."""
        return max(0, len(self._recorded) - self.position)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the guarantee must say."""
        return tuple(note for note in self._notes if note != TWICE)

    @property
    def broken(self) -> str:
        """Why no theorem covers what was released, also after a restart; empty if one does."""
        if self._key_use.is_twice:
            self.vouched(TWICE)
        return TWICE if TWICE in self._notes else ""

    def vouched(self, note: str) -> None:
        """Make the guarantee state an unverified assumption, also after a restart."""
        if note not in self._notes:
            self._notes += (note,)
            mine = os.getpid() == self._process and (self._owner is None or self._owner.held)
            if self._frames is not None and self._frames.is_open and mine:  # else nothing is released here
                self._frames.tell(note=note)

    def bind(self, name: str, value: Any) -> None:
        """Remember a part of the run's identity, or compare it with the remembered one.

        Raises:
            ArgumentError: if it differs.
        """
        if name not in self.bound:
            self._bind(name, value)
            self.flush()
        elif self.bound[name] != value:
            raise ArgumentError(f"Expected the {name} of this run as they were when it began; they have changed since. {WAYS_ON}")

    def rebind(self, name: str, value: Any) -> None:
        """Remember another value of something that may change between restarts."""
        if self.bound.get(name) != value:
            self._bind(name, value)

    def begin(self, step: int) -> None:
        """Called before the noise of ``step`` is drawn: after a restart it must be known that it may have been released."""
        if self._frames is not None and step >= self._marks.reached:  # else the owner is asked before the release
            self._require_open()
            self._marks.reserve(step, self._frames)
        elif self._closed or os.getpid() != self._process:
            self._require_open()

    def released(self, step: int, witness: bytes) -> None:
        """Called before ``step`` is handed out. ``witness`` are bytes that another release would not have.

        Raises:
            ArgumentError: if an earlier process released another value with this noise. Nothing has been released.
        """
        self._next(ord("r"), step.to_bytes(8, "little") + witness)
        self._last = step, int.from_bytes(witness[:8], "little")

    def __enter__(self) -> None:
        """Inside, something is entered and done: both, or neither; after Ctrl-C in between, a run on disk can only be resumed."""
        if os.getpid() != self._process:
            raise forked()
        if self._half:
            raise ArgumentError(
                "Expected a run that was not interrupted while it entered a release into its journal. Nothing was released since; call "
                "detach(), then make_private and Checkpoint again: it goes on from its last save."
            )
        self._before, self._half, self._last = self.position, self._frames is not None, ()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._half = False
            self._entered.extend(self._last)
        elif issubclass(kind, HushgradError):  # a refusal: nothing is half done where nothing was entered
            self._half = self._frames is not None and self.position != self._before

    def read_all(self, step: int) -> None:
        """Called before the noise of all lazy tables is drawn after ``step`` steps."""
        self._next(ord("a"), step.to_bytes(8, "little"))

    def read_all_before(self, step: int) -> bool:
        """Whether an earlier process read all lazy tables at this point, so that the same must be done again."""
        digest = self._digest(ord("a"), step.to_bytes(8, "little")) if self.ahead else b""
        return bool(digest) and self._recorded[self.position] == (ord("a"), digest[:SHORT])

    def _require_open(self) -> None:
        if self._closed:
            raise ArgumentError("Expected a run that is attached: this one's journal is closed.")
        if os.getpid() != self._process:
            raise forked()
        if self._owner is not None:
            self._owner.require()

    def _next(self, kind: int, content: bytes) -> None:
        frames, recorded = self._frames, self._recorded
        repeated = self.position < len(recorded)
        asked = frames is None or frames.asks  # in memory there is no owner; else writing the frame may ask who it is
        if repeated or not asked or self._closed or os.getpid() != self._process:
            self._require_open()
        chain = self._digest(kind, content)
        entry = kind, chain[:SHORT]
        if repeated:
            if recorded[self.position] != entry:
                raise ArgumentError(
                    f"Expected release {self.position} to be repeated as it was; it came out differently (other data, learning rate, "
                    f"augmentation, code or machine), and two values under one noise give the sums away. Nothing was released. {WAYS_ON}"
                )
        elif frames is not None:
            frames.append(*entry)
            recorded.append(entry)
        self.chain, self.position = chain, self.position + 1

    def _digest(self, kind: int, content: bytes) -> bytes:
        return hashlib.blake2b(self.chain + bytes([kind]) + content, digest_size=_CHAIN, key=self._key).digest()

    def _bind(self, name: str, value: Any) -> None:
        self.bound[name] = value
        if self._frames is not None:
            self._frames.tell(bind={name: value})

    def flush(self) -> None:
        """Flush everything to the disk, before a state is saved that relies on it."""
        if self._frames is not None:
            self._frames.flush()

"""The journal of a run: everything that was ever released under its key, in order, so that no row of noise serves twice.

A restart repeats the steps since its last checkpoint, and may: the same value again tells nobody anything. Another value under
the same noise gives the bare sums away. So the journal holds one digest for each release, and a run that repeats must make the
same list; it is stopped *before* it releases anything else.

One file, ``journal``, beside the key, mode 0600, only ever appended to. After a line of magic it is frames of 8 bytes:

| kind | 5 bytes | written |
|---|---|---|
| ``r`` | the digest of a release | before it is handed out |
| ``a`` | the digest of a reading of all lazy tables | before their noise is drawn |
| ``m`` | a mark: steps below it may be taken | flushed to the disk before the first of them begins |
| ``j`` | the length of a JSON object that follows | what the run is bound to; each opening |

and 2 bytes of a checksum that runs over the whole file. The digests are a chain: each is over all before it, under a key of its
own. Flushing takes milliseconds, so a mark reserves as many steps as fit into four hundred times that. A killed process loses
nothing that it had written; a machine that stops may lose digests behind the last mark, and the steps up to the mark count as
released: they are repeated, nobody can compare them, and the guarantee says so (``notes``).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError, StorageError
from hushgrad.release.keys import RunKey
from hushgrad.release.owner import Owner, boot_identity

__all__ = ["JOURNAL", "WAYS_ON", "Journal"]

JOURNAL = "journal"
WAYS_ON = "Put this run's files back as they were, or start a new run with a new key and this run's ledger as prior=."
_MAGIC = b"hushgrad journal 1     \n"  # frames stay aligned: no kill cuts one at the end of a page
_FRAME, _SHORT, _CHAIN = 8, 5, 16  # bytes of a frame, of a digest in it, of the whole digest
_SHARE = 400  # flushing takes at most one part in so many of the time


class Journal:
    """The releases of one run: in a file that :meth:`create` and :meth:`open` know, or, without one, in memory alone.

    ``position`` counts the releases so far and ``chain`` is their digest; both belong into a checkpoint, and :meth:`seek` takes
    them from there.

        >>> journal = Journal(RunKey.make(seed=1))
        >>> journal.begin(0); journal.released(0, b"what was released")
        >>> journal.position, len(journal.chain)
        (1, 16)
    """

    def __init__(self, key: RunKey) -> None:
        self._key = key.journal
        self._file: int | None = None
        self._owner: Owner | None = None
        self._closed, self._process = False, os.getpid()
        self._recorded: list[tuple[int, bytes]] = []  # (kind, short digest): what earlier lives released
        self._mark, self._block, self._flushed_at = 0, 1, 0.0
        self._checksum = zlib.crc32(_MAGIC)
        self.bound: dict[str, Any] = {}
        # Keyed from the start: the place that the first release is witnessed at follows from it, and must not be known.
        self.position, self.chain = 0, hashlib.blake2b(b"start", digest_size=_CHAIN, key=self._key).digest()
        self.notes: tuple[str, ...] = ()

    # Files ---------------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, key: RunKey, owner: Owner, bound: Mapping[str, Any]) -> Journal:
        """A new journal in ``path``, flushed to the disk, bound to what is given."""
        journal = cls(key)
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        journal._file, journal._owner = _opened(path, flags), owner
        journal._write(_MAGIC)
        for name, value in bound.items():
            journal._bind(name, value)
        journal._tell(open=boot_identity())
        journal.flush()
        return journal

    @classmethod
    def open(cls, path: Path, key: RunKey, owner: Owner) -> Journal:
        """The journal in ``path``; nothing is released yet. :meth:`seek` says where the run goes on.

        Raises:
            ArgumentError: where the file is damaged.
        """
        journal = cls(key)
        journal._file, journal._owner = _opened(path, os.O_RDWR | os.O_APPEND), owner
        journal._replay(path.read_bytes())
        journal._tell(open=boot_identity())
        journal.flush()
        return journal

    @classmethod
    def is_begun(cls, path: Path) -> bool:
        """Whether the journal in ``path`` shows that a step may have been released; its key is not needed."""
        journal = cls(RunKey(bytes(32)))
        return any(kind in b"ram" for kind, _, _ in journal._frames(path.read_bytes()))

    @classmethod
    def steps_released(cls, path: Path) -> int:
        """How many releases the journal in ``path`` shows; its key is not needed."""
        journal = cls(RunKey(bytes(32)))
        return sum(kind == ord("r") for kind, _, _ in journal._frames(path.read_bytes()))

    @classmethod
    def digests(cls, path: Path) -> list[bytes]:
        """The digest of every release that the journal in ``path`` shows, as far as it is written there; its key is not needed."""
        journal = cls(RunKey(bytes(32)))
        return [content for kind, content, _ in journal._frames(path.read_bytes()) if kind == ord("r")]

    @classmethod
    def bound_in(cls, path: Path) -> dict[str, Any]:
        """What the run of the journal in ``path`` is bound to; its key is not needed."""
        journal, bound = cls(RunKey(bytes(32))), dict[str, Any]()
        for kind, content, _ in journal._frames(path.read_bytes()):
            if kind == ord("j"):
                bound.update(_check.parsed(content).get("bind", {}))
        return bound

    @property
    def durable(self) -> bool:
        """Whether it is on disk."""
        return self._file is not None

    def close(self) -> None:
        """No more releases."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._closed = None, True

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def seek(self, position: int, chain: bytes) -> None:
        """Go on behind the first ``position`` releases, whose digest is ``chain``: what a checkpoint says.

        Raises:
            ArgumentError: where the journal is shorter than that, or tells another story.
        """
        if self._file is not None:
            behind = position > len(self._recorded)
            if behind or (position and self._recorded[position - 1][1] != chain[:_SHORT]):
                raise ArgumentError(
                    "Expected the journal and the state of one run; the state "
                    + (
                        "is ahead of its journal, so one of them is a copy from another time. "
                        if behind
                        else "is another run's. "
                    )
                    + WAYS_ON
                )
        self.position, self.chain = position, chain

    def catch_up(self, position: int, chain: bytes) -> None:
        """The same where a release cannot be repeated: it is saved first, then written here, then handed out.

        Raises:
            ArgumentError: where more was released than is saved.
        """
        if position < len(self._recorded):
            raise ArgumentError(
                f"Expected the state of {len(self._recorded)} releases; it has {position}, and what was asked of others cannot be "
                f"asked again under the same noise. {WAYS_ON}"
            )
        if position == len(self._recorded) + 1:  # it died between the two writes; nothing has been handed out
            self._frame(ord("r"), chain[:_SHORT])
            self._recorded.append((ord("r"), chain[:_SHORT]))
        self.seek(position, chain)

    def after(self, step: int, witness: bytes) -> bytes:
        """What ``chain`` will be when ``step`` is released."""
        return self._digest(ord("r"), struct.pack("<Q", step) + witness)

    @property
    def ahead(self) -> int:
        """How many releases earlier lives made beyond this point: they are repeated first."""
        return max(0, len(self._recorded) - self.position)

    @property
    def begun(self) -> int:
        """Steps below this may have been released."""
        return self._mark

    # What a run calls -----------------------------------------------------------------------------------------------------

    def bind(self, name: str, value: Any) -> None:
        """Remember a part of the run's identity, or find it to be the remembered one.

        Raises:
            ArgumentError: where it is another one.
        """
        if name not in self.bound:
            self._bind(name, value)
            self.flush()
        elif self.bound[name] != value:
            raise ArgumentError(f"Expected the {name} of this run as they were when it began; they have changed since. {WAYS_ON}")

    def rebind(self, name: str, value: Any) -> None:
        """Remember another value of what may change between two lives."""
        if self.bound.get(name) != value:
            self._bind(name, value)

    def begin(self, step: int) -> None:
        """Before the noise of ``step`` is drawn: whoever restarts must know that it may have been released."""
        if self._file is None or step >= self._mark:  # else it is asked before the release, and has been here before
            self._require_open()
            self._reserve(step)

    def released(self, step: int, witness: bytes) -> None:
        """Before ``step`` is handed out. ``witness`` are bytes that another release would not have.

        Raises:
            ArgumentError: where an earlier life released another value under this noise. Nothing has been released.
        """
        self._next(ord("r"), struct.pack("<Q", step) + witness)

    def read_all(self, step: int) -> None:
        """Before the noise of all lazy tables is drawn after ``step`` steps."""
        self._next(ord("a"), struct.pack("<Q", step))

    def read_all_before(self, step: int) -> bool:
        """Whether an earlier life read all lazy tables at this point, so that the same must be done again."""
        if not self.ahead:
            return False
        chain = self._digest(ord("a"), struct.pack("<Q", step))
        return self._recorded[self.position] == (ord("a"), chain[:_SHORT])

    def _require_open(self) -> None:
        if self._closed:
            raise ArgumentError("Expected a run that is attached: this one's journal is closed.")
        if os.getpid() != self._process:
            raise ArgumentError(
                "Expected a step in the process that began this run: a forked one has a copy of its key, and would release its noise a "
                "second time. Nothing was released; call make_private in the process that trains."
            )
        if self._owner is not None:
            self._owner.require()

    def _next(self, kind: int, content: bytes) -> None:
        self._require_open()
        chain = self._digest(kind, content)
        if self.ahead:
            if self._recorded[self.position] != (kind, chain[:_SHORT]):
                raise ArgumentError(
                    f"Expected release {self.position} to be repeated as it was; it came out differently (other data, learning rate, "
                    f"augmentation, code or machine), and two values under one noise give the sums away. Nothing was released. {WAYS_ON}"
                )
        elif self._file is not None:
            self._frame(kind, chain[:_SHORT])
            self._recorded.append((kind, chain[:_SHORT]))
        self.chain = chain
        self.position += 1

    def _digest(self, kind: int, content: bytes) -> bytes:
        return hashlib.blake2b(self.chain + bytes([kind]) + content, digest_size=_CHAIN, key=self._key).digest()

    # Marks -----------------------------------------------------------------------------------------------------------------

    def _reserve(self, step: int) -> None:
        if self._file is None:
            return
        began = time.perf_counter()
        spent = began - self._flushed_at
        mark = step + self._block
        self._frame(ord("m"), mark.to_bytes(_SHORT, "little"))
        self.flush()
        self._mark = mark
        self._flushed_at = time.perf_counter()
        took = self._flushed_at - began
        if spent < _SHARE * took:
            self._block = min(2 * self._block, 1 << 20)
        elif spent > 2 * _SHARE * took:
            self._block = max(1, self._block // 2)

    def _bind(self, name: str, value: Any) -> None:
        self.bound[name] = value
        self._tell(bind={name: value})

    def _tell(self, **content: Any) -> None:
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _FRAME)
        self._frame(ord("j"), len(text).to_bytes(_SHORT, "little"), text)

    def _frame(self, kind: int, content: bytes, text: bytes = b"") -> None:
        if self._file is None:
            return
        head = bytes([kind]) + content
        checksum = zlib.crc32(head + text, self._checksum)
        self._write(head + struct.pack("<H", checksum & 0xFFFF) + text)
        self._checksum = checksum

    def _write(self, data: bytes) -> None:
        """All of it or nothing: half a frame would hide those behind it."""
        assert self._file is not None
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise _unwritable(error) from None
        if written != len(data):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise _unwritable("the disk is full")

    def flush(self) -> None:
        """Have the disk hold all that was written: before a state is saved that counts on it."""
        if self._file is not None:
            try:
                os.fsync(self._file)
            except OSError as error:
                raise _unwritable(error) from None

    # Reading ----------------------------------------------------------------------------------------------------------------

    def _replay(self, data: bytes) -> None:
        boot, good = "", len(_MAGIC)
        if not data.startswith(_MAGIC):
            raise _damaged()
        for kind, content, end in self._frames(data):
            good = end
            if kind in b"ra":
                self._recorded.append((kind, content))
            elif kind in b"m":
                self._mark = int.from_bytes(content, "little")
            else:
                told = _check.parsed(content)
                boot = told.get("open", boot)
                self.bound.update(told.get("bind", {}))
        self._cut(data, good, lasting=bool(boot) and boot == boot_identity())

    def _cut(self, data: bytes, good: int, *, lasting: bool) -> None:
        """Take off what a machine that stopped may have left behind the last flush; anything else is damage."""
        steps = sum(kind == ord("r") for kind, _ in self._recorded)
        tail = len(data) - good
        opening = (
            data[good : good + 1] == b"j" and good + int.from_bytes(data[good + 1 : good + 6], "little") > len(data) - _FRAME
        )
        if tail and not opening and (lasting or tail > _FRAME * (self._mark - steps + 1)):
            raise _damaged()
        if tail:
            assert self._file is not None
            os.ftruncate(self._file, good)
        if not lasting and self._mark > steps:
            self.notes = (
                f"The machine stopped in steps {steps} to {self._mark - 1}: that their repetition released the same values is vouched "
                "for by the same files and program, not shown",
            )

    def _frames(self, data: bytes) -> Iterator[tuple[int, bytes, int]]:
        """(kind, content, where it ends) of every whole frame; the checksum is brought to the last of them."""
        at = len(_MAGIC)
        while at + _FRAME <= len(data):
            head, (check,), end = data[at : at + 6], struct.unpack("<H", data[at + 6 : at + 8]), at + _FRAME
            text = b""
            if head[0] == ord("j"):
                end += int.from_bytes(head[1:], "little")
                text = data[at + _FRAME : end]
            checksum = zlib.crc32(head + text, self._checksum)
            if head[0] not in b"ramj" or end > len(data) or checksum & 0xFFFF != check:
                return
            self._checksum = checksum
            yield head[0], text if head[0] == ord("j") else head[1:], end
            at = end


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(why: object) -> StorageError:
    return StorageError(f"Expected to be able to write the journal: {why}. Nothing was released; make room, then continue.")


def _damaged() -> ArgumentError:
    return ArgumentError(f"Expected the journal to be as it was written; it was damaged. {WAYS_ON}")

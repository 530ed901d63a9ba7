"""An append-only file of checksummed frames: the format of a journal.

After a magic line come frames of 8 bytes: a kind, 5 bytes of content, and 2 bytes of a checksum that runs over the whole file. A frame
of kind ``j`` is followed by JSON, whose length is its content. One process writes: the file itself is locked, under whatever name it was
opened (a hard link, a mount), and so is its folder. The file stores its own location, so a copy is recognised. The folder stores its length
(:mod:`hushgrad.release.journal_place`), so a truncated or older file in its place is recognised. If the folder was restored as well
(``cp -a``), the file's change time, which only the operating system can set, differs from the one in the folder.

Flushing takes milliseconds. So a mark reserves as many steps as fit into four hundred times that, before the first of them begins.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hushgrad.errors import ArgumentError, StorageError
from hushgrad.release.journal_place import Known, Place
from hushgrad.release.owner import locked

WAYS_ON = "Put this run's files back as they were, or start a new run with a new key and this run's ledger as prior=."
FRAME, SHORT = 8, 5  # bytes of a frame, and of what it says
_KINDS = b"ramj"
_NAME = b"hushgrad journal "
_MAGIC = _NAME + b"5     \n"  # frames stay aligned: no kill cuts one at the end of a page
_A_MINUTE = 60 * 10**9  # nanoseconds: longer than any process waits between writing a frame and saying when
_SHARE = 400  # flushing takes at most one part in so many of the time


class Frame(NamedTuple):
    """One frame and what follows it; ``end`` is where the next one begins, ``checksum`` covers everything so far."""

    kind: int
    content: bytes
    end: int
    checksum: int


def frames_in(path: Path) -> Iterator[Frame]:
    """Every whole frame of a file."""
    return _frames(path.read_bytes())


def is_journal(path: Path) -> bool:
    """Whether the file is a journal, of any version."""
    with open(path, "rb") as file:
        return file.read(len(_NAME)) == _NAME


class _End(NamedTuple):
    """Where the last whole frame ends, the checksum of the first one, which names the run's key, and that of all so far."""

    size: int = 0
    first: int = 0
    checksum: int = zlib.crc32(_MAGIC)


class Frames:
    """The file while it is open for writing."""

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path = path.resolve()
        if new:
            path.unlink(missing_ok=True)
        self._file: int | None = _opened(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0))
        self._alone = locked(self._file)
        if self._alone is False:
            self.close()
            raise ArgumentError(
                f"Expected {str(path)!r} to be written by one process: another one has it open, by this or another name of the same file. "
                "Wait for it or stop it."
            )
        self.place = Place(self.path, self._file)
        self._end, self._torn = _End(), False  # torn: a write was interrupted, and may have left something behind the end
        self._begun, self._told = 0, False
        self.there: list[Frame] = []
        self.rest = b""  # what is behind the last whole frame
        try:
            self._begin(new)
        except BaseException:  # nobody has it to close it, and it would stay locked
            self.close()
            raise

    def _begin(self, new: bool) -> None:
        if new:
            self._write(_MAGIC, _End(len(_MAGIC)))
        else:
            self._read()

    def _read(self) -> None:
        data = self.path.read_bytes()
        self.there = list(_frames(data))
        if len(data) < len(_MAGIC):
            raise damaged()
        self._end = _End(len(_MAGIC))
        if self.there:
            self._end = _End(self.there[-1].end, self.there[0].checksum, self.there[-1].checksum)
        self.rest = data[self._end.size :]

    def cut(self) -> None:
        """Remove what follows the last whole frame."""
        os.ftruncate(self._held(), self.path.stat().st_size - len(self.rest))

    @property
    def known(self) -> Known:
        """What the folder knows about this run's file."""
        return self.place.known(self._end.first)

    def is_touched(self, known: Known) -> bool:
        """Whether the file was changed after its last frame was written: restored, or its mode or the clock changed."""
        return known.length == self._end.size and not 0 <= known.written - os.fstat(self._held()).st_ctime_ns < _A_MINUTE

    def is_put_back(self, known: Known) -> bool:
        """Whether the file is shorter than its folder knows: it was truncated, or replaced by an older one."""
        return self._end.size < known.least

    def claim(self, known: Known) -> bool:
        """Become the writer; returns whether the folder records it."""
        self._begun = known.begun
        self.place.claim(self._end.first, known, self._end.size)
        self._told = self.place.told
        return self._told

    @property
    def asks(self) -> bool:
        """Whether each frame checks who owns the run, so that nothing else has to. Others cannot write to a locked file."""
        return self._alone is True and self.place.told

    def close(self) -> None:
        """No more frames."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    @property
    def is_open(self) -> bool:
        """Whether no other process has taken the file over."""
        return self._file is not None

    def tell(self, **content: Any) -> None:
        """Append a frame of JSON."""
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % FRAME)
        self.append(ord("j"), len(text).to_bytes(SHORT, "little"), text)

    def append(self, kind: int, content: bytes, text: bytes = b"") -> None:
        """Append a frame, and what follows it.

        Raises:
            ArgumentError: if another process has claimed the folder. The frame is removed again.
        """
        head = bytes((kind,)) + content
        size, first, before = self._end
        checksum = zlib.crc32(head + text, before)
        data = head + (checksum & 0xFFFF).to_bytes(2, "little") + text
        self._write(data, _End(size + len(data), first or checksum, checksum))

    def _write(self, data: bytes, end: _End) -> None:
        """Write all of it or nothing: half a frame would hide those after it.

        An interrupt may come anywhere; what it leaves behind is removed by the next write.
        """
        file = self._file if self._file is not None else self._held()
        if self._torn:
            self._restore(file)
        self._torn = True
        try:
            if os.write(file, data) != len(data):
                raise _unwritable("the disk is full")
            if self.place.told:
                self.place.grown(end.size)
        except (OSError, ArgumentError) as error:
            self._restore(file)
            raise error if isinstance(error, (StorageError, ArgumentError)) else _unwritable(error) from None
        self._end = end
        self._torn = False

    def _restore(self, file: int) -> None:
        """Remove what is behind the last whole frame.

        The folder is told first, since a death in between would make the file seem put back, and again afterwards, since the file's
        change time moves.
        """
        try:
            self._tell_length()
        finally:
            try:
                os.ftruncate(file, self._end.size)
            except OSError as error:
                raise _unwritable(error) from None
            self._torn = False
        self._tell_length()

    def _tell_length(self) -> None:
        if self.place.told:
            self.place.grown(self._end.size)

    def _held(self) -> int:
        if self._file is None:
            raise ArgumentError(
                "Expected an open journal: another run has taken it over. Nothing was released; go on with that one."
            )
        return self._file

    def flush(self, begun: int = 0) -> None:
        """Flush everything to the disk. ``begun``: steps below it may be released now."""
        if self._told and not self.place.told:  # there was no room for the attribute any more, and the next life has to know
            self._told = False
            self.tell(told=False)
        file = self._held()
        try:
            os.fsync(file)
        except OSError as error:
            raise _unwritable(error) from None
        self._begun = max(begun, self._begun)
        if self.place.told:
            self.place.flushed(self._end.size, self._begun)


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
        frames.flush(mark)
        self.reached = mark
        self._flushed_at = time.perf_counter()
        took = self._flushed_at - began
        self._took = (3 * self._took + took) / 4 if self._took else took  # one quick flush says little about the next
        if spent < _SHARE * self._took:
            self._block = min(2 * self._block, 1 << 20)
        elif spent > 2 * _SHARE * self._took:
            self._block = max(1, self._block // 2)


def _frames(data: bytes) -> Iterator[Frame]:
    if _MAGIC.startswith(data[: len(_MAGIC)]) and len(data) < len(_MAGIC):
        return  # it died before it had written anything
    if not data.startswith(_MAGIC):
        if data.startswith(_NAME):
            raise ArgumentError(
                "Expected a journal of this version of hushgrad; another one wrote it and digests releases in another way. Finish the run "
                "with that version, or start a new run with a new key and this run's ledger as prior=."
            )
        raise damaged()
    at, sum_so_far = len(_MAGIC), zlib.crc32(_MAGIC)
    while at + FRAME <= len(data):
        head, (check,), end = data[at : at + 6], struct.unpack("<H", data[at + 6 : at + 8]), at + FRAME
        text = b""
        if head[0] == ord("j"):
            end += int.from_bytes(head[1:], "little")
            text = data[at + FRAME : end]
        sum_so_far = zlib.crc32(head + text, sum_so_far)
        if head[0] not in _KINDS or end > len(data) or sum_so_far & 0xFFFF != check:
            return
        yield Frame(head[0], text if head[0] == ord("j") else head[1:], end, sum_so_far)
        at = end


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(why: object) -> StorageError:
    return StorageError(f"Expected to be able to write the journal: {why}. Nothing was released; make room, then continue.")


def damaged() -> ArgumentError:
    """The error for a file that is not in this format."""
    return ArgumentError(f"Expected the journal to be as it was written; it was damaged. {WAYS_ON}")

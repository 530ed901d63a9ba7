"""A file of frames that is only ever appended to: what a journal is written in.

After a line of magic come frames of 8 bytes: a kind, 5 bytes, and 2 bytes of a checksum that runs over the whole file. Behind a frame
of kind ``j`` follows as much JSON as its 5 bytes say. One process writes it: the file itself is locked, by whatever name it was
opened (a hard link, a mount), besides its folder. It knows where it lies, too, so that a copy is known as one; and its folder knows,
in an attribute of its own, how long this run's file is and how long it was when it was last flushed, so that one that was cut, or that an
older one was put in the place of, is known, too. A machine that stops may lose what was not flushed; after it only the flushed length
counts. Where the attribute was put back as well (``cp -a``), the file was changed at another time than the attribute says, which the system
alone writes down.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hushgrad.errors import ArgumentError, StorageError
from hushgrad.release.born import born
from hushgrad.release.owner import boot_identity, locked

__all__ = ["FRAME", "SHORT", "WAYS_ON", "Frame", "Frames", "damaged", "frames_in"]

WAYS_ON = "Put this run's files back as they were, or start a new run with a new key and this run's ledger as prior=."
FRAME, SHORT = 8, 5  # bytes of a frame, and of what it says
_KINDS = b"ramj"
_NAME = b"hushgrad journal "
_MAGIC = _NAME + b"2     \n"  # frames stay aligned: no kill cuts one at the end of a page
# Of the folder: numbers for it and for the file, the file's flushed length, the machine's start, its length, and when it was written.
_LENGTH = "user.hushgrad.released"
_A_MINUTE = 60 * 10**9  # nanoseconds: longer than any process waits between writing a frame and saying when


class Frame(NamedTuple):
    """One frame, with what follows it; ``end`` is where the next one begins, and ``checksum`` that of all so far."""

    kind: int
    content: bytes
    end: int
    checksum: int


def frames_in(path: Path) -> Iterator[Frame]:
    """Every whole frame of a file."""
    return _frames(path.read_bytes())


class Frames:
    """The file while it is written."""

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path, self._checksum = path.resolve(), zlib.crc32(_MAGIC)
        self._folder = str(self.path.parent)
        if new:
            path.unlink(missing_ok=True)
        self._file: int | None = _opened(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0))
        if locked(self._file) is False:
            self.close()
            raise ArgumentError(
                f"Expected {str(path)!r} to be written by one process: another one has it open, by this or another name of the same file. "
                "Wait for it or stop it."
            )
        self._size, self._about = 0, b""  # what the folder is told of the file: nothing before the first flush
        self._first = 0  # the checksum of the first frame, which names the run's key
        self.there: list[Frame] = []
        self.rest = b""  # what is behind the last whole frame
        if new:
            self._write(_MAGIC)
        else:
            self._read()

    def _read(self) -> None:
        data = self.path.read_bytes()
        self.there = list(_frames(data))
        if len(data) < len(_MAGIC):
            raise damaged()
        good = self.there[-1].end if self.there else len(_MAGIC)
        if self.there:
            self._first, self._checksum = self.there[0].checksum, self.there[-1].checksum
        self.rest, self._size = data[good:], good

    def cut(self) -> None:
        """Take off what is behind the last whole frame."""
        os.ftruncate(self._held(), self.path.stat().st_size - len(self.rest))

    @property
    def is_put_back(self) -> bool:
        """Whether the file is shorter than its folder knows this run's: somebody cut it, or put an older one in its place."""
        flushed, start, length, _ = self._known()
        return self._size < (length if start == _start() else flushed)

    @property
    def is_touched(self) -> bool:
        """Whether the file was changed at another time than its last frame was written: put back, or its rights or the clock changed."""
        _, _, length, written = self._known()
        return length == self._size and not 0 <= written - os.fstat(self._held()).st_ctime_ns < _A_MINUTE

    def _known(self) -> list[int]:
        """What the folder knows of its journal; nothing where it was never told, or the system or the disk keeps no attributes."""
        with contextlib.suppress(OSError, AttributeError, ValueError):
            folder, file, *known = map(int, os.getxattr(self._folder, _LENGTH).split())
            mine = self._numbers()
            return known if len(known) == 4 and (folder == mine[0] or file == mine[1]) else [0] * 4
        return [0] * 4

    def _numbers(self) -> tuple[int, int]:
        """Of this run in this very folder, and of this very file: a copy of both has others, whatever attributes were copied."""
        folder = os.open(self._folder, os.O_PATH)
        try:
            about = os.fstat(folder).st_ino, born(folder), self._first
        finally:
            os.close(folder)
        return zlib.crc32(repr(about).encode()), zlib.crc32(repr(self.place[1:]).encode())

    @property
    def place(self) -> list[Any]:
        """Where the file lies: its path, and its number on the disk and its birth, which a copy has not."""
        return [str(self.path), os.fstat(self._held()).st_ino, born(self._held())]

    def close(self) -> None:
        """No more frames."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def tell(self, **content: Any) -> None:
        """Append a frame of JSON."""
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % FRAME)
        self.append(ord("j"), len(text).to_bytes(SHORT, "little"), text)

    @property
    def is_open(self) -> bool:
        """Whether nobody has taken the file over."""
        return self._file is not None

    def append(self, kind: int, content: bytes, text: bytes = b"") -> None:
        """Append a frame, and what follows it."""
        head = bytes((kind,)) + content
        checksum = zlib.crc32(head + text, self._checksum)
        self._write(head + (checksum & 0xFFFF).to_bytes(2, "little") + text)
        self._first, self._checksum = self._first or checksum, checksum
        if self._about:
            self._remember()

    def _remember(self) -> None:
        """Tell the folder how long the file is; no more where it takes no attributes."""
        try:
            os.setxattr(self._folder, _LENGTH, b"%b %d %d" % (self._about, self._size, time.time_ns()))
        except (OSError, AttributeError):
            self._about = b""

    def _write(self, data: bytes) -> None:
        """All of it or nothing: half a frame would hide those behind it."""
        file = self._file if self._file is not None else self._held()
        try:
            written = os.write(file, data)
        except OSError as error:
            raise _unwritable(error) from None
        if written != len(data):
            os.ftruncate(file, os.fstat(file).st_size - written)
            if self._about:
                self._remember()
            raise _unwritable("the disk is full")
        self._size += written

    def _held(self) -> int:
        if self._file is None:
            raise ArgumentError(
                "Expected an open journal: another run has taken it over. Nothing was released; go on with that one."
            )
        return self._file

    def flush(self) -> None:
        """Have the disk hold all that was written."""
        file = self._held()
        try:
            os.fsync(file)
        except OSError as error:
            raise _unwritable(error) from None
        if hasattr(os, "setxattr"):
            self._about = b"%d %d %d %d" % (*self._numbers(), self._size, _start())
            self._remember()


def _start() -> int:
    """A number for the machine's last start, other than 0."""
    return zlib.crc32(boot_identity().encode()) or 1


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
    """What is said of a file that was not written like this."""
    return ArgumentError(f"Expected the journal to be as it was written; it was damaged. {WAYS_ON}")

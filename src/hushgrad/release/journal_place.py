"""What the folder of a journal knows about it: its length now and at the last flush, and who writes it.

The folder stores this in an extended attribute of its own, which no copy of a file has. Its name is drawn by the process that opens the
journal and removes all others, so a previous writer finds its attribute gone when it enters its next release. One system call thus records
the length and checks the ownership. On a disk without extended attributes nothing is stored, and the lock is checked instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from hushgrad.release.owner import boot_identity, taken_over

_OURS = "user.hushgrad."
_REPLACE = getattr(os, "XATTR_REPLACE", 0)
_GONE = {errno.ENODATA, errno.ENOENT, errno.ENOTDIR}  # the attribute, or the folder
# Numbers for the folder and for the file, the machine's start, the steps that may have been released, the file's flushed length; its
# length, and when that was written. Short enough for the folder's own record on the disk (ext4 has room for 52 bytes there).
_CONTENT, _GROWN = struct.Struct("<IIIQQQQ"), struct.Struct("<QQ").pack
_BIRTH, _OF_FILE = 0x800, 0x1000  # STATX_BTIME, AT_EMPTY_PATH of Linux
_SECONDS, _NANOSECONDS, _SIZE = 80, 88, 256  # where struct statx has the birth, and its size


class Known(NamedTuple):
    """What a folder knows about a journal; all 0 if it knows nothing."""

    start: int = 0
    begun: int = 0
    flushed: int = 0
    length: int = 0
    written: int = 0

    @property
    def least(self) -> int:
        """The least length of the file: a machine crash may have lost what was not flushed."""
        return self.length if self.start == _start() else self.flushed


class Place:
    """The folder and the open file of one journal. ``told`` says whether the folder records every frame."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._folder, self._file = path, str(path.parent), file
        self._name, self._about = _OURS + secrets.token_hex(4), b""
        self.told = False

    @property
    def identity(self) -> list[Any]:
        """The path of the file, its inode number and its time of creation, which a copy does not share."""
        return [str(self._path), os.fstat(self._file).st_ino, born(self._file)]

    def known(self, first: int) -> Known:
        """What the folder knows about the journal whose first frame has the checksum ``first``: by its run, or by its file."""
        found, names = [Known()], self._names()
        mine = self._numbers(first) if names else ()
        for name in names:
            try:
                *numbers, start, begun, flushed, length, written = _CONTENT.unpack(os.getxattr(self._folder, name))
            except (OSError, struct.error):  # removed meanwhile; of another version
                continue
            if any(a == b for a, b in zip(numbers, mine, strict=True)):
                found.append(Known(start, begun, flushed, length, written))
        return max(found, key=lambda known: known.length)

    def claim(self, first: int, known: Known, size: int) -> None:
        """Become the writer: the folder forgets the previous one."""
        others = set(self._names())
        try:
            self._about = struct.pack("<IIIQQ", *self._numbers(first), _start(), known.begun, known.flushed)
            written = known.written if known.length == size else time.time_ns()  # nothing was written now
            os.setxattr(self._folder, self._name, self._about + _GROWN(size, written))
            self.told = True
            for name in others - {self._name}:
                os.removexattr(self._folder, name)
        except (OSError, AttributeError):  # no extended attributes here
            self.told = False

    def grown(self, size: int) -> None:
        """Record that the file has ``size`` bytes, which survive the death of this process.

        Raises:
            ArgumentError: if another process has claimed the folder, or it is gone.
        """
        try:
            os.setxattr(self._folder, self._name, self._about + _GROWN(size, time.time_ns()), _REPLACE)
        except OSError as error:
            if error.errno in _GONE:
                raise taken_over(self._folder) from None
            self.told = False  # no room for the attribute

    def flushed(self, size: int, begun: int) -> None:
        """Record that all of these are on the disk; ``begun``: steps below it may be released now."""
        self._about = self._about[:12] + struct.pack("<QQ", begun, size)
        self.grown(size)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listxattr(self._folder) if name.startswith(_OURS)]
        except (OSError, AttributeError):
            return []

    def _numbers(self, first: int) -> tuple[int, int]:
        """Identifies this run in this very folder and file: a copy of both has other numbers, whatever attributes were copied."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            about = os.fstat(folder).st_ino, born(folder), first
        finally:
            os.close(folder)
        return zlib.crc32(repr(about).encode()), zlib.crc32(repr(self.identity[1:]).encode())


def _start() -> int:
    """A nonzero number for the machine's last boot."""
    return zlib.crc32(boot_identity().encode()) or 1


def born(file: int) -> int:
    """When an open file was created, in nanoseconds; 0 if the system does not say.

    A disk reuses the inode number of a removed file, but not its time of creation.

    >>> with open(__file__) as file:
    ...     born(file.fileno()) == born(file.fileno()) >= 0
    True
    """
    birth = getattr(os.fstat(file), "st_birthtime", None)
    if birth is not None:
        return int(birth * 10**9)
    asked = getattr(ctypes.CDLL(None), "statx", None) if sys.platform == "linux" else None
    about = ctypes.create_string_buffer(_SIZE)
    if asked is None or asked(file, b"", _OF_FILE, _BIRTH, about) or not _number(about.raw[:4]) & _BIRTH:
        return 0
    return _number(about.raw[_SECONDS:_NANOSECONDS]) * 10**9 + _number(about.raw[_NANOSECONDS : _NANOSECONDS + 4])


def _number(content: bytes) -> int:
    return int.from_bytes(content, sys.byteorder)

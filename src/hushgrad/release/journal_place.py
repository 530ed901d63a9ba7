"""Where a journal lies, and what its folder knows of it: how long it is and was when it was flushed, and who writes it.

The folder has an attribute of its own for that, which no copy of a file has. Its name is drawn by whoever opens the journal, who removes
all others: who wrote before finds its own gone, or the folder, when it enters its next release. So one call of the system tells the length
and asks who owns the run. Where the disk keeps no attributes nothing is told, and the lock is looked up instead.
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

__all__ = ["Known", "Place", "born"]

_OURS = "user.hushgrad."
_REPLACE = getattr(os, "XATTR_REPLACE", 0)
_GONE = {errno.ENODATA, errno.ENOENT, errno.ENOTDIR}  # the attribute, or the folder
# Numbers for the folder and for the file, the machine's start, the steps that may have been released, the file's flushed length; its
# length, and when that was written. Short enough for the folder's own record on the disk (ext4 has room for 52 bytes there).
_CONTENT, _GROWN = struct.Struct("<IIIQQQQ"), struct.Struct("<QQ").pack
_BIRTH, _OF_FILE = 0x800, 0x1000  # STATX_BTIME, AT_EMPTY_PATH of Linux
_SECONDS, _NANOSECONDS, _SIZE = 80, 88, 256  # where struct statx has the birth, and its size


class Known(NamedTuple):
    """What a folder knows of a journal; all 0 where it knows nothing."""

    start: int = 0
    begun: int = 0
    flushed: int = 0
    length: int = 0
    written: int = 0

    @property
    def least(self) -> int:
        """How long the file must be: a machine that stopped may have lost what was not flushed."""
        return self.length if self.start == _start() else self.flushed


class Place:
    """The folder and the open file of one journal. ``told`` says whether the folder is told of every frame."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._folder, self._file = path, str(path.parent), file
        self._name, self._about = _OURS + secrets.token_hex(4), b""
        self.told = False

    @property
    def identity(self) -> list[Any]:
        """The path of the file, and its number on the disk and its birth, which a copy has not."""
        return [str(self._path), os.fstat(self._file).st_ino, born(self._file)]

    def known(self, first: int) -> Known:
        """What the folder knows of the journal whose first frame has the checksum ``first``: by its run, or by its file."""
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
        """Write from now on: the folder forgets whoever did before."""
        others = set(self._names())
        try:
            self._about = struct.pack("<IIIQQ", *self._numbers(first), _start(), known.begun, known.flushed)
            written = known.written if known.length == size else time.time_ns()  # nothing was, just now
            os.setxattr(self._folder, self._name, self._about + _GROWN(size, written))
            self.told = True
            for name in others - {self._name}:
                os.removexattr(self._folder, name)
        except (OSError, AttributeError):  # the disk or the system keeps no attributes
            self.told = False

    def grown(self, size: int) -> None:
        """The file has ``size`` bytes, and the system keeps them, whatever becomes of this process.

        Raises:
            ArgumentError: where somebody else has claimed the folder, or it is not there any more.
        """
        try:
            os.setxattr(self._folder, self._name, self._about + _GROWN(size, time.time_ns()), _REPLACE)
        except OSError as error:
            if error.errno in _GONE:
                raise taken_over(self._folder) from None
            self.told = False  # there was no room for it

    def flushed(self, size: int, begun: int) -> None:
        """All of these are on the disk; ``begun``: steps below it may be released now."""
        self._about = self._about[:12] + struct.pack("<QQ", begun, size)
        self.grown(size)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listxattr(self._folder) if name.startswith(_OURS)]
        except (OSError, AttributeError):
            return []

    def _numbers(self, first: int) -> tuple[int, int]:
        """Of this run in this very folder, and of this very file: a copy of both has others, whatever attributes were copied."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            about = os.fstat(folder).st_ino, born(folder), first
        finally:
            os.close(folder)
        return zlib.crc32(repr(about).encode()), zlib.crc32(repr(self.identity[1:]).encode())


def _start() -> int:
    """A number for the machine's last start, other than 0."""
    return zlib.crc32(boot_identity().encode()) or 1


def born(file: int) -> int:
    """When an open file was made, in nanoseconds; 0 where the system does not tell.

    A disk gives the number of a removed file to the next one, and a birth to nobody twice.

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

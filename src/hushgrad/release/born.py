"""When a file was made, in nanoseconds: a disk gives the number of a removed file to the next one, and a birth to nobody twice."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["born"]

_BIRTH, _OF_FILE = 0x800, 0x1000  # STATX_BTIME, AT_EMPTY_PATH of Linux
_SECONDS, _NANOSECONDS, _SIZE = 80, 88, 256  # where struct statx has the birth, and its size


def born(file: int) -> int:
    """The birth of an open file; 0 where the system does not tell.

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

"""One frame of a journal in one call of C: while its lock is there as it was it is written, and the folder is told how long the file is.

Without the C library, and where anything is not as usual, nothing is written here and the longer way says why
(:meth:`Frames.append <hushgrad.release.frames.Frames.append>`).
"""

from __future__ import annotations

import ctypes
import os

from hushgrad import native
from hushgrad.errors import StorageError
from hushgrad.native import _abi

__all__ = ["Entry", "unwritable"]

_ENTERED = None if native.EXACT is None else native.EXACT.entered


class Entry(_abi.Entry):
    """What C reads and writes (``entry`` of abi.h), and the memory that it points to."""

    def __init__(self, file: int, folder: str, attribute: str) -> None:
        self._texts = [ctypes.create_string_buffer(text) for text in (os.fsencode(folder), attribute.encode())]
        self._frame, self._told = (ctypes.create_string_buffer(size) for size in (_abi.FRAME_BYTES, _abi.TOLD_AT_MOST))
        super().__init__(
            file=file,
            folder=ctypes.addressof(self._texts[0]),
            attribute=ctypes.addressof(self._texts[1]),
            frame=ctypes.addressof(self._frame),
            told=ctypes.addressof(self._told),
        )

    def guard(self, lock: tuple[str, int, int]) -> None:
        """Write only while the file of this path has this disk and this number there."""
        place, self.disk, self.number = lock
        self._texts.append(ctypes.create_string_buffer(os.fsencode(place)))
        self.lock = ctypes.addressof(self._texts[-1])

    @property
    def begins(self) -> bytes:
        """How all begins that the folder is told; empty where it is told nothing."""
        return self._told.raw[: self.about]

    @begins.setter
    def begins(self, text: bytes) -> None:
        self._told.raw, self.about = text, len(text)

    def write(self, frame: bytes) -> bool:
        """Whether it was written; if not, nothing was.

        Raises:
            StorageError: where half of it was, and could not be taken off again.
        """
        if _ENTERED is None or not self.lock:
            return False
        self._frame.raw = frame
        done: int = _ENTERED(self)
        if done < 0:
            raise unwritable("half a frame could not be taken off again")
        return done > 0


def unwritable(why: object) -> StorageError:
    """What is said where a journal takes no more."""
    return StorageError(f"Expected to be able to write the journal: {why}. Nothing was released; make room, then continue.")

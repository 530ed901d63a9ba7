"""Atomic file replacement: a process that is killed at any instant leaves the old file or the new one."""

from __future__ import annotations

import glob
import io
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hushgrad._printed import reason
from hushgrad.errors import StorageError

_filling: set[Path] = set()  # by this process: each of its threads has a file of its own


@contextmanager
def replacing(path: Path, *, mode: int = 0o600) -> Iterator[Path]:
    """A new empty file next to ``path`` to be filled; when the block ends it is flushed to the disk and renamed to ``path``.

    A rename is atomic. If anything fails, ``path`` is unchanged and the new file is removed. A half-written file of a killed
    process, which may hold a key, is removed when its successor writes the same file.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = Path(directory) / "notes.txt"
        ...     with replacing(path) as new:
        ...         _ = new.write_text("whole")
        ...     path.read_text(), oct(path.stat().st_mode & 0o777)
        ('whole', '0o600')

    Raises:
        StorageError: if the disk is full, the folder is read-only, or something else is in the way.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{os.getpid()}")
    _filling.add(temporary)
    try:
        sweep(path)
        _create(temporary, mode)
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a directory cannot be opened, and the rename is journalled
            _flush(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise _refused(path, error, "What was there before is untouched. " if path.exists() else "") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        _filling.discard(temporary)


def written(path: str | Path, content: str | Callable[[io.BytesIO], object]) -> None:
    """Write a file that a user asked for: with all of this content (text, or a function that fills a buffer), or not at all.

    What cannot be replaced is written in place: a pipe, a device, a link (``/dev/stdout`` is one), a file in a read-only folder.

    Raises:
        StorageError: if the disk is full, the place is read-only, or something else is in the way.
    """
    place, buffer = Path(path), io.BytesIO()
    if isinstance(content, str):
        buffer.write(content.encode())
    else:
        content(buffer)
    kept = place.stat().st_mode & 0o777 if place.exists() else None
    if place.is_symlink() or (kept is not None and not (place.is_file() and os.access(place.absolute().parent, os.W_OK))):
        try:
            place.write_bytes(buffer.getvalue())
        except OSError as error:
            raise _refused(place, error) from None
        return
    with replacing(place, mode=0o666) as new:
        new.write_bytes(buffer.getvalue())
        if kept is not None:
            new.chmod(kept)


def _refused(path: Path, error: Exception, before: str = "") -> StorageError:
    remedy = "Make room or choose another folder, then continue."
    return StorageError(f"Expected to be able to write {str(path)!r}: {reason(error)}. {before}{remedy}")


def sweep(path: Path) -> None:
    """Remove half-written versions of ``path`` that killed processes of this machine left."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.(\d+)")
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*"):
        named = ours.fullmatch(leftover.name)
        if named and leftover not in _filling and not _alive(int(named[1])):
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    if os.name != "posix":  # elsewhere to ask is to interrupt
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return process != os.getpid()


def _create(path: Path, mode: int) -> None:
    """Create the file; a leftover of that name is removed, whatever its mode, so nobody else can have it open."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Ownership of a folder of secrets: one process may write. Two processes under one key would release its noise twice.

The file ``.lock`` in the folder is locked by the operating system, which releases it when the owner dies, however it dies. It holds
the owner's host and process number, for the message to whoever comes second. On a file system without locks, the file
is a *lease*: its owner touches it every few seconds, and it is stale after a minute without a touch. A stale lease is not taken
silently, since its owner may only be suspended: say ``take_over=True``. The old owner finds out before its next release.

Within one process the newest owner wins if ``newest`` says so, and the older one is told at its next step: a program that
starts over after an error need not collect its garbage first.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.errors import ArgumentError, StorageError

LOCK = ".lock"
_BEAT, _STALE = 10.0, 60.0  # seconds
_ITSELF = getattr(os, "O_NOFOLLOW", 0)  # do not follow a link and overwrite its target
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}

_here: WeakValueDictionary[str, Owner] = WeakValueDictionary()


@atexit.register
def _let_all_go() -> None:
    """At the end of the process: release owners that are still referenced, which would leave their lock behind."""
    for owner in list(_here.values()):
        owner.release()


def boot_identity() -> str:
    """Identifies this machine since its last boot; empty if the system does not say. Written data survive until it changes."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""


class Owner:
    """The right to write one folder, from construction to :meth:`release` or the end of the process.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = Owner(folder)
        ...     second = Owner(folder, newest=True)  # of the same process: takes over
        ...     first.held, second.held
        (False, True)

    Raises:
        ArgumentError: if another process owns the folder; the message names it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, take_over: bool = False, newest: bool = False) -> None:
        self._path = Path(folder).resolve() / LOCK
        self._place = str(self._path)  # used at every step
        self._token, self._process = secrets.token_hex(8), os.getpid()
        self._file: int | None = None
        self._number = 0, 0  # device and inode of that file
        self._lent: list[Callable[[], None]] = []
        self._ends = threading.Event()
        self._lease = False
        before = _here.get(str(self._path))
        if before is not None and newest:
            before._let_go()
        elif before is not None and before.held:
            raise _owned(self._path.parent, self._read(), "")
        try:
            _require_plain(self._path.parent)
            self._take(take_over)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise _unreadable(self._path, error) from None
        _here[str(self._path)] = self

    @property
    def held(self) -> bool:
        """Whether this is still the owner: the lock is the one on the disk (somebody may have deleted it), or the lease there is ours."""
        if self._file is None:
            return False
        if self._lease:
            return self._read().get("token") == self._token
        try:
            there = os.stat(self._place)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(self._path, error) from None
        return there.st_ino == self._number[1] and there.st_dev == self._number[0]

    def require(self) -> None:
        """Called before anything is released.

        Raises:
            ArgumentError: if another owner has taken over.
        """
        if not self.held:
            raise taken_over(self._path.parent)

    def release(self) -> None:
        """Release the folder and remove the lock. In a forked process this only drops a copy."""
        try:
            if self._process == os.getpid() and self.held:
                self._path.unlink(missing_ok=True)
        except StorageError:  # the disk does not answer; the lock ends with the file that is closed here
            pass
        finally:
            self._let_go()

    def lend(self, close: Callable[[], None]) -> None:
        """Call ``close`` when the folder is released: closes a file that the owner alone writes, so that the next owner can."""
        self._lent.append(close)

    def _let_go(self) -> None:
        self._ends.set()
        self._close()

    def _close(self) -> None:
        for close in self._lent:
            close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.release()

    # Taking it --------------------------------------------------------------------------------------------------------

    def _take(self, take_over: bool) -> None:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | _ITSELF, 0o600)
            try:
                taken = locked(file)
                if taken and self._read().get("lease"):  # by a host that shares the disk but has no locks there
                    self._require_no_lease(take_over)
            except BaseException:
                os.close(file)
                raise
            if taken is None:
                os.close(file)
                return self._take_lease(take_over)
            if not taken:
                os.close(file)
                raise _owned(self._path.parent, self._read(), "")
            about = os.fstat(file)
            self._number = about.st_dev, about.st_ino
            self._file = file
            if self.held:  # otherwise its last owner removed it in between
                break
            os.close(file)
            self._file = None
        os.ftruncate(file, 0)
        os.write(file, self._words())

    def _require_no_lease(self, take_over: bool) -> None:
        """Refuse: the holder of a lease may only be suspended, so it is never taken silently."""
        words = self._read()
        if words.get("token") and not take_over and str(self._path) not in _here:
            stale = self._age() >= _STALE
            raise _owned(self._path.parent, words, "It has not been heard of for a minute. " if stale else "", lease=True)

    def _take_lease(self, take_over: bool) -> None:
        self._require_no_lease(take_over)
        self._lease = True
        temporary = self._path.with_name(f"{LOCK}.{self._token}")
        temporary.write_bytes(self._words())
        os.replace(temporary, self._path)
        time.sleep(0.05)  # if two take it at once, the last writer wins
        self._file = os.open(self._path, os.O_RDONLY)
        self.require()
        threading.Thread(target=self._beats, daemon=True, name="hushgrad lease").start()

    def _beats(self) -> None:
        while not self._ends.wait(_BEAT):
            if self._read().get("token") != self._token:
                return
            os.utime(self._path)

    def _words(self) -> bytes:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token, "lease": self._lease}
        return json.dumps(about).encode()

    def _read(self) -> dict[str, Any]:
        try:
            return _check.parsed_object(self._path.read_bytes())
        except OSError:  # missing: no owner to name
            return {}

    def _age(self) -> float:
        """Seconds since the lease was last touched, by the clock of the disk's own machine."""
        probe = self._path.with_name(f"{LOCK}.{self._token}")
        try:
            probe.touch()
            return probe.stat().st_mtime - self._path.stat().st_mtime
        except OSError:
            return 0.0
        finally:
            probe.unlink(missing_ok=True)


def taken_over(folder: str | Path) -> ArgumentError:
    """The error message to a former owner."""
    return ArgumentError(
        f"Expected to own {str(folder)!r}: another run has taken it over, or it is not there any more, and a step here would release its "
        "noise a second time. Nothing was released; go on with the other one."
    )


def forked() -> ArgumentError:
    """The error message to the copy of an owner in a forked process."""
    return ArgumentError(
        "Expected a step in the process that began this run: a forked one has a copy of its key, and would release its noise a "
        "second time. Nothing was released; call make_private in the process that trains, and settle() lazy tables before a fork."
    )


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"Expected to be able to write {str(path)!r}: {reason(error)}. Make it writable again, or choose another folder."
    )


def _require_plain(folder: Path) -> None:
    """Require a plain file or folder: a pipe would block its reader for ever, and a device holds no state."""
    odd = [path.name for path in folder.iterdir() if os.path.exists(path) and not (path.is_file() or path.is_dir())]
    if odd:
        raise ArgumentError(
            f"Expected files and folders alone in {str(folder)!r}; {min(odd)!r} is neither. Put the run's own file back."
        )


def locked(file: int) -> bool | None:
    """Take the system's lock of an open file; returns whether it is ours now, or None if there are no locks here.

    The lock belongs to the file, under whatever name it was opened, and ends when it is closed or its process ends.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _owned(folder: Path, words: dict[str, Any], more: str, *, lease: bool = False) -> ArgumentError:
    who = f"process {words['pid']} on {words['host']}" if {"pid", "host"} <= words.keys() else "another process"
    remedy = "Wait for it or stop it" + ("; if it is gone, take over explicitly (take_over=True, --take-over)." if lease else ".")
    return ArgumentError(f"Expected {str(folder)!r} to have no other owner: {who} has it. {more}{remedy}")


def _forget_in_child() -> None:
    """A forked child (a data-loading worker) must not keep its parent's locks alive."""
    for owner in list(_here.values()):
        owner._close()
    _here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

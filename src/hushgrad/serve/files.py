"""Reads untrusted run folders: no symbolic links, no pipes, limited sizes, and only known files.

Names in a request never become paths. A scan lists what is there, and a request is looked up in the list.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import HushgradError

# What may be read, and how many bytes of it at most. A key or a checkpoint has no name here, so it cannot be served.
LIMITS = {
    "recipe.json": 1 << 20,
    "plan.json": 16 << 20,
    "guarantee.json": 4 << 20,
    "ledger.json": 16 << 20,
    "report.json": 4 << 20,
    "audit.json": 4 << 20,
    "tuning.json": 4 << 20,
    "reservation.json": 1 << 20,
    "metrics.jsonl": 64 << 20,
}
_DEEPEST = 3  # folders below the one that was given
_MOST = 2000  # folders that one scan looks into
_WHOLE = 256 << 10  # bytes of metrics that are read in full; of longer files some lines are taken
_LINE = 4096
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Unreadable(HushgradError):
    """A file of a run folder is missing, not a plain file, too large or not JSON. The message reveals nothing of its content."""


@dataclass(frozen=True)
class RunFolder:
    """A run folder found by a scan: ``parts`` are the names of the folders on the way down from ``root``."""

    root: Path
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name on the page."""
        return "/".join(self.parts)

    def stat(self, name: str) -> os.stat_result | None:
        """Size and times of a plain file, or None."""
        try:
            with self._opened(name) as file:
                return os.fstat(file)
        except Unreadable:
            return None

    def text(self, name: str) -> str:
        """The whole file.

        Raises:
            Unreadable: if it cannot be read.
        """
        with self._opened(name) as file:
            most = LIMITS[name]
            if os.fstat(file).st_size > most:
                raise Unreadable(f"{name} is larger than {most >> 20} MiB.")
            try:
                return _read(file, 0, most).decode("utf-8")
            except UnicodeDecodeError:
                raise Unreadable(f"{name} is not UTF-8 text.") from None

    def object(self, name: str) -> dict[str, Any]:
        """The file's one JSON object."""
        try:
            content = _check.parsed(self.text(name))
        except ValueError:
            raise Unreadable(f"{name} is not JSON.") from None
        if not isinstance(content, dict):
            raise Unreadable(f"{name} does not hold one JSON object.")
        return content

    def lines(self, name: str, *, about: int) -> list[str]:
        """Lines of a file that may be large and growing: all of a small one, ``about`` that many of a large one.

        The work does not depend on the size: lines are picked at equal distances, and always the last complete one.
        """
        with self._opened(name) as file:
            size = os.fstat(file).st_size
            if size <= _WHOLE:
                return _complete(_read(file, 0, size), cut_front=False)
            found = _complete(_read(file, 0, _LINE), cut_front=False)[:1]
            for k in range(1, about):
                chunk = _complete(_read(file, k * size // about, 2 * _LINE), cut_front=True)
                found += chunk[:1] + [line for line in chunk[1:] if '"test_' in line][:1]  # test results are rare
            chunk = _complete(_read(file, size - 2 * _LINE, 2 * _LINE), cut_front=True)
            return found + [line for line in chunk[:-1] if '"test_' in line][-1:] + chunk[-1:]

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A descriptor of the plain file, reached without following any symbolic link, even one made at this very moment."""
        if name not in LIMITS:
            raise Unreadable(f"{name} is not among the files that are read.")
        opened: list[int] = []
        try:
            opened.append(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in self.parts:
                opened.append(os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=opened[-1]))
            opened.append(os.open(name, _FLAGS, dir_fd=opened[-1]))  # non-blocking: a pipe without a writer does not hang us
            if not stat.S_ISREG(os.fstat(opened[-1]).st_mode):
                raise Unreadable(f"{name} is not a plain file.")
            yield opened[-1]
        except OSError as error:
            raise Unreadable(f"{name} cannot be read: {error.strerror}.") from None
        finally:
            for descriptor in opened:
                os.close(descriptor)


def folders(root: Path) -> tuple[list[RunFolder], bool]:
    """Run folders (with a recipe.json or plan.json) below ``root``, and whether the scan stopped before all were seen."""
    found: list[RunFolder] = []
    waiting: list[tuple[str, ...]] = [()]
    looked = 0
    while waiting and looked < _MOST:
        parts = waiting.pop(0)
        looked += 1
        files, below = _entries(root.joinpath(*parts))
        if parts and files & {"recipe.json", "plan.json"}:
            found.append(RunFolder(root, parts))
        elif len(parts) < _DEEPEST:
            waiting += [(*parts, name) for name in below]
    return found, bool(waiting)


def _entries(folder: Path) -> tuple[set[str], list[str]]:
    """Names of known plain files, and of real folders whose names can be shown."""
    files, below = set(), []
    try:
        with os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(10 * _MOST), strict=False):
                if entry.name in LIMITS and entry.is_file(follow_symlinks=False):
                    files.add(entry.name)
                elif entry.name.isprintable() and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
    except OSError:
        return set(), []
    return files, sorted(below)[:_MOST]


def _read(file: int, start: int, most: int) -> bytes:
    chunks, missing = [], most
    while missing > 0 and (chunk := os.pread(file, min(missing, 1 << 20), start + most - missing)):
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _complete(content: bytes, *, cut_front: bool) -> list[str]:
    """The complete lines; the last one may just be being written."""
    lines = content.split(b"\n")[1 if cut_front else 0 : -1]
    return [line.decode("utf-8", errors="replace") for line in lines if line and len(line) <= _LINE]

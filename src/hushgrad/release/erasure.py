"""Finds every secret that a run, a search or a server has written, and erases it; never a file that only has the name of one.

A file is a secret of ours by its name and its format: the user's own ``key.json`` stays. Temporary versions are known by their names,
which nobody else chooses. A symbolic link to a file is never ours. Erasing overwrites, flushes and unlinks; on a copy-on-write or
wear-levelled disk only disk encryption erases the old blocks for certain.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError, StorageError
from hushgrad.release.atomic import sweep
from hushgrad.release.encryption import is_sealed
from hushgrad.release.journal_frames import is_journal
from hushgrad.release.keys import KEY, is_key
from hushgrad.release.owner import LOCK, Owner

# The whole names of a run's files, of a search's with its trials', and of a server's: whatever is called otherwise is the user's own.
_NAMES = r"key\.json|state\.safetensors|cohorts\.safetensors|journal|shard-\d+-\d+\.safetensors"
_NAMED = re.compile(_NAMES)
_TEMPORARY = re.compile(rf"\.(?:{_NAMES})\.[0-9a-f]{{8}}\.\d+")  # see hushgrad.release.atomic
_HEADERS = ("hushgrad", "hushgrad shard")  # in the metadata of a state and of a shard
_HOMES = ("checkpoint", "search")
_SEARCH = "recipe.json"  # in the folder of a search
_TABLES = {"model", "data", "plan", "optimizer", "run", "tune"}  # in that file
_TRIAL = re.compile(r"\d{5,}")
# Of a run that is over; a key in each.
_FINISHED = {"guarantee.json": "epsilon", "tuning.json": "mean_trials", "settled.json": "settled"}


# Finding ----------------------------------------------------------------------------------------------------------------


def secrets_of(folder: str | os.PathLike[str]) -> list[Path]:
    """Every file in this very folder, not below it, that reveals noise, and temporary versions of them."""
    root = Path(folder)
    return sorted(path for path in (root.iterdir() if root.is_dir() else ()) if _is_secret(path))


def secrets_in(folder: str | os.PathLike[str], *, linked: bool = True) -> list[Path]:
    """Every file in the folder of a run, a search or a server, or in its subfolders, that reveals noise.

    ``linked``: also in a subfolder that is a link, which may be another run's.
    """
    root = Path(folder)
    homes = [root / name for name in _HOMES if linked or not (root / name).is_symlink()]
    return sorted(path for home in (root, *homes, *_trials(root / "search", homes)) for path in secrets_of(home))


def unknown_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Files with the name of a secret that no version wrote, or that are damaged: they are never erased, and a person must look."""
    homes = (Path(folder), *(Path(folder) / name for name in _HOMES))
    named = (path for home in homes if home.is_dir() for path in home.iterdir() if _NAMED.fullmatch(path.name))
    return sorted(path for path in named if path.is_file() and not _is_secret(path))


def _trials(home: Path, homes: list[Path]) -> list[Path]:
    """The checkpoints of the trials in ``home``, if it is one of ``homes``."""
    found = home.glob("*/checkpoint") if home in homes else ()
    return [path for path in found if not path.is_symlink() and not path.parent.is_symlink()]


def _is_secret(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    try:
        return bool(_TEMPORARY.fullmatch(path.name) or (_NAMED.fullmatch(path.name) and _is_ours(path)))
    except FileNotFoundError:  # erased meanwhile
        return False
    except PermissionError:  # nobody can say, and it cannot be erased either: it counts as held
        return True


def _is_ours(path: Path) -> bool:
    """Whether a file with one of our names has our format as well."""
    if path.name == KEY:
        return is_key(path)
    if path.suffix != ".safetensors":
        return is_journal(path)
    return is_sealed(path) or any(name in _metadata(path) for name in _HEADERS)


def _metadata(path: Path) -> dict[str, Any]:
    """The metadata of a safetensors file; nothing if it is none."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > os.fstat(file.fileno()).st_size:
            return {}
        try:
            header = json.loads(file.read(size))
        except (ValueError, RecursionError):
            return {}
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; nothing if there is none."""
    try:
        return _check.parsed_object(path.read_bytes()) if path.is_file() else {}
    except OSError:
        return {}


# Erasing ----------------------------------------------------------------------------------------------------------------


def erase(paths: Iterable[Path]) -> None:
    """Overwrite each file, flush it to the disk, remove it; keys first, so that a crash in between leaves none.

    It gets the name of a temporary version first: half overwritten, it is known by nothing else.
    """
    for path in sorted(paths, key=lambda path: (KEY not in path.name, path)):
        try:
            _overwrite(path)
        except FileNotFoundError:  # another command finished the same folder meanwhile
            continue


def _overwrite(path: Path) -> None:
    with open(path, "r+b"):  # what may not be written keeps its name
        pass
    if not _TEMPORARY.fullmatch(path.name):
        path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.{os.getpid()}"))
    with open(path, "r+b", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            left -= file.write(os.urandom(min(left, 1 << 20)))
        os.fsync(file.fileno())
    path.unlink()


def destroy(folder: str | os.PathLike[str], *, linked: bool = True) -> None:
    """Erase every secret of a run, a search or a server. What may be published stays, and so does every file that is not the run's.

    ``linked``: also in a subfolder that is a link, as a run does that is told to write there.

    Raises:
        ArgumentError: if another process owns one of the subfolders, or one of a trial; nothing was erased.
    """
    root = Path(folder)
    homes = _homes(root, linked)
    with ExitStack() as owned:
        for place in (*homes, *filter(secrets_of, _trials(root / "search", homes))):
            owned.callback(Owner(place, newest=True).release)
        erase(secrets_in(root, linked=linked))
    for home in homes:
        _remove(home)


def finish(folder: str | os.PathLike[str]) -> bool:
    """Erase what a finished run still holds because it died between its last two writes; returns whether it did.

    Every command that sees a folder calls it, so it follows no links, and leaves a folder alone which may not be written.
    """
    root = Path(folder)
    try:
        over = any(key in _object(root / name) for name, key in _FINISHED.items())
        if not over or not (secrets_in(root, linked=False) or _homes(root, linked=False)):
            return False
        owner = Owner(root)
    except (ArgumentError, StorageError, PermissionError):  # the run is alive and will do it, or the folder is somebody else's
        return False
    try:
        destroy(root, linked=False)
        return True
    except (ArgumentError, StorageError):  # the same of a subfolder
        return False
    finally:
        owner.release()


def _homes(root: Path, linked: bool) -> list[Path]:
    """The subfolders that belong to the run: with secrets in them, those of a search, and those that a death left empty."""
    homes = [root / name for name in _HOMES if linked or not (root / name).is_symlink()]
    return [home for home in homes if home.is_dir() and _is_home(home)]


def _is_home(home: Path) -> bool:
    held = _is_search(home) or any(map(secrets_of, (home, *_trials(home, [home]))))
    return held or not any(path.name != LOCK for path in home.iterdir())


def _is_search(home: Path) -> bool:
    """Whether a search wrote the recipe in this folder."""
    tables = _object(home / _SEARCH)
    return (
        home.name == "search"
        and set(tables) - {"ledger"} == _TABLES
        and all(isinstance(table, dict) for table in tables.values())
    )


def _remove(home: Path) -> None:
    """Remove a subfolder with all that a search wrote (the number of trials and their scores are secret), or if it is empty."""
    below = [path for path in home.iterdir() if path.is_dir() and not path.is_symlink() and _TRIAL.fullmatch(path.name)]
    if _is_search(home) and not home.is_symlink():
        for path in below:
            shutil.rmtree(path)
        sweep(home / _SEARCH)
        (home / _SEARCH).unlink()  # last: the folder is known by it
    for path in (*(trial / "checkpoint" for trial in below), *below, home):
        with suppress(OSError):  # it is gone, the user's own files are in it, or it is a link
            path.rmdir()

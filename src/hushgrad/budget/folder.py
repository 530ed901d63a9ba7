r"""An upper bound on the steps of a run that ended early, from its folder.

**Why the charge is never below what was released.** ``hushgrad train`` charges a step before it takes it, and saves a
checkpoint after every ``checkpoint_every``-th step (and when it is interrupted) *before* it takes another one. So a run whose
last complete checkpoint holds s steps has taken, since it was last started, at most the steps up to and including the next
multiple of ``checkpoint_every``: had it got further, a later checkpoint would be there. Steps up to that multiple may have
been seen (metrics are written after each one), so they are all charged; a run that is continued and killed again repeats
them with the same noise, which releases the same values. Without a checkpoint s is 0. Whether one was never saved or is lost is told by
the journal, which is there before a reservation begins: without the run's own journal the folder proves nothing.

The bound needs the reserved event to be a number of equal steps. Where it is not (correlated noise, whose steps do not
compose), where the cadence of the checkpoints is unknown, or where a file cannot be read, the whole reservation stays charged:
a part of a run never costs more than all of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hushgrad import _check
from hushgrad.budget.file_digests import require_belonging
from hushgrad.errors import ArgumentError, HushgradError, StorageError
from hushgrad.events import Event, Repeat, Unanalysed
from hushgrad.guarantee import Ledger
from hushgrad.release.erasure import destroy
from hushgrad.release.journal import JOURNAL
from hushgrad.release.journal_history import shown
from hushgrad.release.owner import Owner

RESERVATION, SETTLED = "reservation.json", "settled.json"
_LARGEST = 64 << 20  # bytes of a file or header: more is not what a run wrote
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}


@dataclass(frozen=True)
class Finding:
    """The event to charge, and the reason."""

    event: Event
    why: str


def finding(folder: Path, reserved: Event, *, identity: str = "") -> Finding:
    """What a stopped run in ``folder`` may have released; ``identity`` is its name, if known."""
    if (folder / "guarantee.json").is_file():
        return _finished(folder, reserved, identity)
    try:
        return _unfinished(folder, reserved, identity)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, HushgradError) as error:
        return Finding(reserved, f"the folder tells too little ({type(error).__name__}): the whole reservation is charged")


def _finished(folder: Path, reserved: Event, identity: str) -> Finding:
    try:
        ledger = Ledger.from_json(_read(folder / "ledger.json"))
        event, names = ledger.event(), {entry.run for entry in ledger}
        require_belonging(folder, _read(folder / "report.json"))
    except (OSError, ValueError, RecursionError, HushgradError):
        return Finding(reserved, "finished, but its ledger cannot be trusted: the whole reservation is charged")
    if identity and identity not in names:
        return Finding(reserved, "its ledger is another run's: the whole reservation is charged")
    return Finding(event, "finished: charged for the steps in its ledger")


def _unfinished(folder: Path, reserved: Event, identity: str) -> Finding:
    named = identity_of(folder)
    if not named or named != (identity or named):
        return Finding(reserved, "its journal is lost, or another run's: the whole reservation is charged")
    books = _saved_books(folder / "checkpoint" / "state.safetensors")
    if books.get("declared") is not None or not isinstance(reserved, Repeat):
        return Finding(reserved, "its steps do not compose: the whole reservation is charged")
    if books.get("foreign"):
        return Finding(Unanalysed("a step was taken on a batch that the run's loader did not issue"), "foreign steps")
    every = _check.positive_int(checkpoint_every=_read(folder / "recipe.json")["run"]["checkpoint_every"])
    planned = _check.positive_int(steps=_read(folder / "plan.json")["steps"])
    if planned != reserved.times:
        return Finding(reserved, "its plan is not the one that was reserved: the whole reservation is charged")
    saved = _check.integer(0, issued=books.get("issued", 0))
    released = len(shown(folder / "checkpoint" / JOURNAL).digests)  # a state that is lost, or old, says too little
    taken = min(max((saved // every + 1) * every, released), planned)
    why = f"{saved} steps in its checkpoint, {released} in its journal; at most {taken} were taken before the next would have been saved"
    return Finding(reserved.of * taken, why)


def _saved_books(path: Path) -> dict[str, Any]:
    """The counts in a checkpoint; empty if nothing was ever saved.

    Raises:
        ValueError: for a damaged file, found by the digest that it carries.
    """
    if not path.exists():
        return {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _LARGEST:
            raise ValueError("not a safetensors header")
        header = _check.parsed(file.read(size))
        metadata = header.pop("__metadata__")
        if _digest(metadata["hushgrad"], header, file, 8 + size) != metadata["digest"]:
            raise ValueError("damaged")
    books: dict[str, Any] = _plain(_check.parsed(metadata["hushgrad"]))["private"]["books"]
    return books


def _digest(text: str, tensors: dict[str, Any], file: BinaryIO, start: int) -> str:
    """The digest of ``hushgrad.train.tree``, without torch: over the text and each tensor's name, type, shape and bytes."""
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(tensors):
        begin, end = tensors[name]["data_offsets"]
        digest.update(f"\n{name} torch.{_DTYPES[tensors[name]['dtype']]} {tuple(tensors[name]['shape'])}\n".encode())
        file.seek(start + begin)
        missing = end - begin
        while missing > 0:
            chunk = file.read(min(missing, 1 << 20))
            if not chunk:
                raise ValueError("cut short")
            digest.update(chunk)
            missing -= len(chunk)
    return digest.hexdigest()


def _plain(x: Any) -> Any:
    """The tagged JSON of a checkpoint as dicts and values; tensors stay names."""
    if isinstance(x, list):
        return [_plain(item) for item in x]
    if not isinstance(x, dict):
        return x
    ((tag, content),) = x.items()
    if tag == "dict":
        return {key: _plain(value) for key, value in content}
    return _plain(content)


def reservation_of(folder: Path) -> str:
    """The id of the reservation that the run in ``folder`` was made under; empty if there is none.

    Raises:
        ArgumentError: where the file is damaged.
    """
    path = folder / RESERVATION
    if not path.is_file():
        return ""
    try:
        return str(_read(path)["reservation"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ArgumentError(f"Expected {path.name} to name a reservation; it is damaged.") from None


def owners_of(folder: Path) -> list[str]:
    """The tokens of the starts of the run in ``folder``: the last one, and one that was about to begin."""
    path = folder / RESERVATION
    content = _read(path) if path.is_file() else {}
    return [str(content[name]) for name in ("owner", "next") if content.get(name)]


def identity_of(folder: Path) -> str:
    """The name of the run in ``folder``, from its journal; empty if there is none."""
    journals = (folder / home / JOURNAL for home in ("checkpoint", "search"))
    return next((str(shown(path).bound.get("run", "")) for path in journals if path.is_file()), "")


def retire(folder: Path, why: str) -> None:
    """Make sure that the run cannot continue: erase every secret, so that no more of its steps can be taken or undone."""
    (folder / SETTLED).write_text(json.dumps({"settled": why}) + "\n", encoding="utf-8")
    destroy(folder)


@contextmanager
def holding(folder: Path) -> Iterator[bool]:
    """Own a run folder for the block; False if another process owns it, that is if the run is alive."""
    try:
        owner = Owner(folder)
    except StorageError:
        raise
    except ArgumentError:
        yield False
        return
    try:
        yield True
    finally:
        owner.release()


def _read(path: Path) -> Any:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path.name} is too large")
    return _check.parsed(path.read_text(encoding="utf-8"))

"""The files of a finished run: ``report.json`` names each of them, and itself, by SHA-256.

This detects a file that was changed, truncated, lost or taken from another run. It does not protect against somebody who rewrites all of
them: the signature of a privacy card does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hushgrad._printed import reason
from hushgrad.errors import ArgumentError

ADDED = "tuning.json"  # may be another tool's record of a search
NAMED = ("plan.json", "recipe.json", "ledger.json", "metrics.jsonl", "guarantee.json", ADDED)


class ForeignFile(ArgumentError):
    """A file of a run is missing, was changed or belongs to another run. The message names it and quotes nothing of it."""


def with_digests(out: Path, content: Mapping[str, Any], later: Mapping[str, str]) -> dict[str, Any]:
    """The content of a report with the digests of the run's files, and then its own.

    Args:
        out: the run's folder.
        content: of the report.
        later: texts of files that are written after the report.
    """
    files = {name: hashlib.sha256(later[name].encode()).hexdigest() for name in NAMED if name in later}
    files |= {name: file_sha256(out / name) for name in NAMED if name not in later and (out / name).is_file()}
    named = {**content, "files": dict(sorted(files.items()))}
    return {**named, "sha256": _digest(named)}


def require_belonging(folder: Path, report: Mapping[str, Any]) -> bool:
    """Require that every file is the one that the report names. Returns whether it names any; reports of earlier versions do not.

    Raises:
        ForeignFile: with the name of the file that is missing, was changed or is another run's.
    """
    files = report.get("files")
    if "files" not in report and "sha256" not in report:
        return False
    named = {name: value for name, value in report.items() if name != "sha256"}
    if not isinstance(files, dict) or _digest(named) != report.get("sha256"):
        raise ForeignFile("Expected report.json to be as the run wrote it: its SHA-256 is another one. It was changed.")
    for name in NAMED:
        _require_file(folder / name, files.get(name))
    return True


def _require_file(file: Path, named: str | None) -> None:
    if not file.is_file():
        if named is not None:
            raise ForeignFile(f"Expected {file.name} in the run's folder: report.json names it, and it is gone. Put it back.")
        return
    if named is None:
        if file.name != ADDED:
            raise ForeignFile(f"Expected no {file.name} in the run's folder: report.json names none. It is another run's.")
        return
    if file_sha256(file) != named:
        raise ForeignFile(
            f"Expected {file.name} to be the file that report.json names: its SHA-256 is another one. "
            "It was changed, cut short or taken from another run."
        )


def require_own_model(file: Path, report: Mapping[str, Any]) -> None:
    """Require that a model file in a run's folder is the run's own.

    Args:
        file: the model file.
        report: the content of the ``report.json`` beside it.
    """
    if "model_sha256" in report:
        _require_file(file, report["model_sha256"])


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Args:
        path: of any size; it is read in pieces.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ForeignFile(f"Expected a readable {Path(path).name}: {reason(error)}.") from None
    return digest.hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

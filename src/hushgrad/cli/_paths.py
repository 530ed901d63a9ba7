"""Checks of a command's input and output files, before anything that takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hushgrad import _check
from hushgrad.cli._parser import Parser, UsageError


def add_model(parser: Parser) -> None:
    """Add the options of a command that reads a trained model."""
    parser.takes("model MODEL", "the folder of a run, or its model.safetensors")
    code = "run what the model file names as module:function: trust it first"
    parser.flag("--allow-code", code)


def require_model(model: str) -> None:
    """Require a model file, or a folder with one; whether it is readable is checked later."""
    if not any(place.is_file() for place in (Path(model), Path(model) / "model.safetensors")):
        _check.fail("model", model, "to be a model file, or the folder of a finished run", "hushgrad train writes one.")


def require_place(*files: str | None) -> None:
    """Require that each of these can be written, as far as that can be told without writing.

    Raises:
        UsageError: where the folder is missing or read-only, or the file is a folder or read-only.
    """
    for file in map(Path, filter(None, files)):
        folder = file.absolute().parent
        if not folder.is_dir():
            raise UsageError(f"Cannot write {file}: there is no such folder.")
        if file.is_dir():
            raise UsageError(f"Cannot write {file}: it is a folder. Give the name of a file in it.")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise UsageError(f"Cannot write {file}: it is read-only. Choose another place.")


def require_picture(file: str | None) -> None:
    """Require that a picture can be written there, in the format of its suffix."""
    require_place(file)
    if file and Path(file).suffix[1:].lower() not in ("", "png", "svg", "pdf", "jpg", "jpeg", "webp", "tif", "tiff", "ps", "eps"):
        raise UsageError(f"A picture is not saved as {Path(file).suffix}: let {file} end in .png, .svg or .pdf.")


def require_records(file: str) -> None:
    """Require that the file of records exists."""
    if not Path(file).exists():
        _check.fail("file", file, "to be there", "Give a file of records, as the model was trained on.")


def tell_undeclared(found: Mapping[str, Sequence[int]]) -> None:
    """Report on stderr the rows whose cells are not what the model's columns declare."""
    for name, rows in found.items():
        some = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
        print(
            f"Note: column {name!r} holds what was not declared in {len(rows)} row{'s' * (len(rows) > 1)} ({some}). "
            "Such cells count as missing.",
            file=sys.stderr,
        )

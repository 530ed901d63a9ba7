"""Files that a command is given, looked for before anything that takes long."""

from __future__ import annotations

from pathlib import Path

from hushgrad import _check

__all__ = ["require_model", "require_records"]


def require_model(model: str) -> None:
    """That there is a model file, or a folder with one: whether it can be read is seen later."""
    if not any(place.is_file() for place in (Path(model), Path(model) / "model.safetensors")):
        _check.fail("model", model, "to be a model file, or the folder of a finished run", "hushgrad train writes one.")


def require_records(file: str) -> None:
    """That there are records."""
    if not Path(file).exists():
        _check.fail("file", file, "to be there", "Give a file of records, as the model was trained on.")

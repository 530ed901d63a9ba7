"""A command in a process of its own, which has imported torch already; several_processes.py starts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import several_processes

__all__ = ["started"]


def started(words: list[str], folder: Path, **environment: str) -> several_processes.Child:
    """``hushgrad WORDS``, which writes its errors into ``folder/errors.0`` and its answers nowhere."""
    asked = {"words": words, "environment": environment}
    (child,) = several_processes.start(Path(__file__), folder, 1, asked, group=False)
    return child


def main(options: dict) -> NoReturn:
    from hushgrad.cli.main import main as command

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ |= options["environment"]
    raise SystemExit(command(options["words"]))

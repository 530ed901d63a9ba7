"""``hushgrad key``: who holds the key of a run can subtract its noise; see whether it is still there, and destroy it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from hushgrad import _check
from hushgrad.cli._parser import Parser, print_json

__all__ = ["run"]

_SECRETS = ("checkpoint/key.json", "checkpoint/state.safetensors")


def _parser() -> Parser:
    parser = Parser(
        "key",
        "The noise of a run follows from its key. A run that finishes erases it; one that was stopped keeps it, to go on.\n"
        "status   say whether the folder still holds the key, and who can read it (exit code 1 if others can)\n"
        "destroy  erase key and checkpoint for good: the run cannot go on, and nobody can subtract its noise any more",
        example="hushgrad key destroy runs/mnist",
    )
    parser.add_argument("action", choices=("status", "destroy"))
    parser.add_argument("run", metavar="RUN", help="the --out of hushgrad train")
    return parser


def run(words: list[str]) -> int:
    """Show or destroy the key of a run; see ``hushgrad key --help``."""
    options = _parser().parse(words)
    folder = Path(options.run)
    if not (folder / "plan.json").is_file():
        _check.fail("run", str(folder), "to be the folder of a run, with plan.json in it", "Give the --out of hushgrad train.")
    held = [name for name in _SECRETS if (folder / name).exists()]
    open_to_others = [name for name in held if stat.S_IMODE((folder / name).stat().st_mode) & 0o077]
    if options.action == "destroy":
        _destroy(folder)
        held, open_to_others = [], []
    if options.json:
        print_json({"run": str(folder), "held": held, "open_to_others": open_to_others})
    else:
        print(_sentence(folder, held, open_to_others))
    return 1 if open_to_others else 0


def _sentence(folder: Path, held: list[str], open_to_others: list[str]) -> str:
    if open_to_others:
        return f"{folder}: others can read {', '.join(open_to_others)}. Make them 0600, or destroy the key."
    if held:
        return f"{folder}: the key is there, readable by its owner only. It is as secret as the data."
    return f"{folder}: no key. Nobody can subtract the noise; the run cannot go on."


def _destroy(folder: Path) -> None:
    """Overwrite, then remove. On a copy-on-write or wear-levelled disk only encryption of the disk erases the old blocks."""
    for name in _SECRETS:
        path = folder / name
        if path.is_file():
            with open(path, "r+b", buffering=0) as file:
                file.write(os.urandom(path.stat().st_size))
                os.fsync(file.fileno())
    if (folder / "checkpoint").is_dir():
        shutil.rmtree(folder / "checkpoint")

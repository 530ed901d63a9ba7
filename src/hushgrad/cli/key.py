"""``hushgrad key``: shows whether a run's key still exists, and destroys it. Anyone with the key can subtract the noise."""

from __future__ import annotations

import stat
from pathlib import Path

from hushgrad import _check
from hushgrad.cli._parser import Parser, say
from hushgrad.release.erasure import destroy, finish, secrets_in, unknown_in
from hushgrad.release.owner import Owner

_MARKS = ("plan.json", "tuning.json", "privacy.json", "reservation.json", "settled.json", "search/recipe.json")


def _parser() -> Parser:
    parser = Parser(
        "key",
        "The noise of a run, a search or a federated server follows from its key. A run that finishes erases it; one that was\n"
        "stopped keeps it, to go on; what a finished or settled one still holds, because it died at its very end, is erased now.\n"
        "status   list every secret that the folder holds, and who can read it (exit code 1 if others can)\n"
        "destroy  erase all of them for good: the run cannot go on, and nobody can subtract its noise any more",
        example="hushgrad key destroy runs/mnist",
    )
    parser.takes("action", choices=("status", "destroy"))
    parser.takes("run RUN", "the --out of hushgrad train or tune, the directory of a checkpoint or of a server")
    return parser


def run(words: list[str]) -> int:
    """Show or destroy the key of a run; see ``hushgrad key --help``."""
    options = _parser().parse(words)
    folder = Path(options.run)
    finish(folder)
    if not secrets_in(folder) and not any((folder / name).is_file() for name in _MARKS):
        _check.fail("run", str(folder), "to be the folder of a run, with plan.json in it", "Give the --out of hushgrad train.")
    if options.action == "destroy":
        owner = Owner(folder)  # a run that is going on is stopped first
        destroy(folder)
        owner.release()
    secrets = secrets_in(folder)
    held = [path.relative_to(folder).as_posix() for path in secrets]
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in zip(held, secrets, strict=True)}
    open_to_others = [name for name, mode in modes.items() if mode & 0o077]
    unknown = [path.relative_to(folder).as_posix() for path in unknown_in(folder)]
    content = {"run": str(folder), "held": held, "open_to_others": open_to_others, "unknown": unknown}
    say(options, content, _sentence(folder, held, open_to_others) + _doubt(unknown))
    return 1 if open_to_others else 0


def _sentence(folder: Path, held: list[str], open_to_others: list[str]) -> str:
    if open_to_others:
        return f"{folder}: others can read {', '.join(open_to_others)}. Make them 0600, or destroy the key."
    if held:
        return f"{folder}: the key is there, readable by its owner only ({', '.join(held)}). It is as secret as the data."
    return f"{folder}: no key. Nobody can subtract the noise; the run cannot go on."


def _doubt(unknown: list[str]) -> str:
    if not unknown:
        return ""
    return f" Left alone, because hushgrad did not write them or they are damaged: {', '.join(unknown)}. Look, and remove what is yours."

"""The ``hushgrad`` command: a lazy table of commands.

``hushgrad NAME ...`` imports the one module that NAME names and calls its function with the remaining words. So a command's
``--help`` imports the standard library only. A command is one file and one line in ``COMMANDS``; its function takes the list
of words, prints its answer, returns the exit code, and raises hushgrad's errors for a user's mistakes.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a negative answer (a refuted claim, a failed check) |
| 2 | wrong usage, or a file could not be read or written: one sentence on stderr, no traceback |
| 3 | refused by a budget or a policy; nothing was done |
| 130 | interrupted |
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from hushgrad.cli._parser import UsageError, suggestion
from hushgrad.errors import BudgetExceeded, HushgradError, PolicyRefused

# name: one line for the overview. The module of that name in this room has the function run.
COMMANDS = {
    "epsilon": "how much privacy a run spends",
    "crosscheck": "what other libraries say about the same run",
    "calibrate": "which noise, steps, rate or batch meets a budget",
    "plan": "which plan is best for a budget",
    "advise": "which recipe suits a budget, from public facts",
    "train": "train a model by a recipe",
    "predict": "what a trained model says about new records",
    "evaluate": "how good a trained model is on labelled records",
    "export": "a trained model for other programs (.pt2, ONNX)",
    "tune": "search hyper-parameters privately; what would it cost?",
    "ledger": "budgets of data sets: reserve, commit, verify",
    "audit": "attack a run and bound its epsilon from below",
    "report": "the privacy card of a run",
    "compare": "two runs side by side",
    "release": "let a model out, if a ledger has booked it",
    "key": "look after the secret key of a run, or destroy it",
    "doctor": "what this machine does with a private step",
    "serve": "a local web page: planner, runs, cards, ledger",
    "completion": "let your shell complete commands and options",
    "reproduce": "repeat a published result",
}


def overview() -> str:
    """The text of ``hushgrad --help``."""
    lines = [f"  {name:10} {about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hushgrad COMMAND [options]",
            "",
            "Differentially private training for PyTorch, and the accounting behind it.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --help     this text; hushgrad COMMAND --help explains a command",
            "  --version  the version",
            "",
            "example:",
            "  hushgrad epsilon --noise-multiplier 1.1 --rate 0.01 --steps 10000 --delta 1e-5",
        ]
    )


def command(name: str) -> Callable[[list[str]], int]:
    """The function of a command.

    Raises:
        UsageError: for an unknown name, with the closest known one.
    """
    if name not in COMMANDS:
        raise UsageError(f"No such command: {name or repr(name)}.{suggestion(name, COMMANDS)} Try hushgrad --help.")
    run: Callable[[list[str]], int] = vars(importlib.import_module(f"hushgrad.cli.{name}"))["run"]
    return run


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake gives one sentence on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to stop
    try:
        try:
            return _answer(list(sys.argv[1:] if words is None else words))
        finally:
            if sys.stdout is not None:  # None: it was closed before we began
                sys.stdout.flush()  # a reader that has gone, or a full disk, shows here and not after the end
    except (UsageError, HushgradError) as error:
        print(f"hushgrad: {error}", file=sys.stderr)
        return 3 if isinstance(error, (BudgetExceeded, PolicyRefused)) else 2
    except ModuleNotFoundError as error:
        package = (error.name or "hushgrad").partition(".")[0]
        if package == "hushgrad":
            raise
        print(
            f"hushgrad: Expected {package}, which this needs and is not installed. Install it with pip install {package}.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:  # the reader (head, less) has gone: no more to say
        _drop_output()
        return 0
    except UnicodeEncodeError as error:  # a path or a name that this locale has no bytes for
        letter = error.object[error.start : error.end]
        print(
            f"hushgrad: The locale's encoding, {error.encoding}, has no {letter!a}, which is in a path. Set PYTHONUTF8=1, or rename it.",
            file=sys.stderr,
        )
        return 2
    except OSError as error:  # the disk or the folder, not the program
        where = "" if error.filename is None else f": {str(error.filename)!r}"
        print(f"hushgrad: {error.strerror or error}{where}. Choose a path that can be read and written.", file=sys.stderr)
        _drop_output()
        return 2
    except KeyboardInterrupt:  # a command with something to save catches it itself
        print("Interrupted.", file=sys.stderr)
        return 130


def _answer(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        return command(arguments[1])(["--help"])
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        from hushgrad import __version__

        print(f"hushgrad {__version__}")
        return 0
    return command(arguments[0])(arguments[1:])


def _drop_output() -> None:
    """Drop pending output: Python flushes once more at exit, and would complain again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no real file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

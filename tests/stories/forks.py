"""Commands in children of the test's own process, which has imported torch already: a fresh Python takes two seconds to do so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from hushgrad.cli.main import main

__all__ = ["ended", "forked"]


def forked(
    words: list[str],
    errors: Path,
    *,
    folder: Path | None = None,
    before: Callable[[], object] = lambda: None,
) -> int:
    """The process of a command that writes its errors into a file, and its answers nowhere; ``before`` is called in it at first.

    It must not train (see command_program.py): autograd refuses to work in a child whose parent had threads of its own.
    """
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        nowhere, told = os.open(os.devnull, os.O_WRONLY), os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(nowhere, 1)
        os.dup2(told, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)  # those of the parent are not here
        os.chdir(folder or Path.cwd())
        before()
        code = main(words)
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

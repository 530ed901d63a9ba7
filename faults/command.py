"""What ``make chaos`` and ``make fuzz`` have in common: a time, a printed seed, a choice, a table in the docs, an exit code."""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path
from typing import Protocol

from table import Row, write_table

__all__ = ["is_chosen", "parser", "report", "seed_of"]


class Trials(Protocol):
    """All trials whose name holds ``only``, for about so many seconds."""

    def __call__(self, seconds: float, seed: int, *, only: str = "") -> list[Row]: ...


def parser(about: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """The options of both commands; ``about`` is a module's docstring, of which the first line is shown."""
    options = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    options.add_argument("--seconds", type=float, default=seconds)
    options.add_argument("--seed", type=int, default=None, help="drawn and printed if it is left out")
    options.add_argument("--only", default="", help="trials whose name holds this text, or one of several: A|B")
    options.add_argument("--docs", type=Path, default=None, help="page whose table is replaced")
    options.add_argument("--more", action="store_true", help="add to the rows that are there, as --only does")
    return options


def is_chosen(name: str, only: str) -> bool:
    """Whether ``name`` holds ``only``, or one of its alternatives: A|B."""
    return any(part in name for part in only.split("|"))


def seed_of(options: argparse.Namespace) -> int:
    """The given seed, or a fresh one; printed, so that a failure can be repeated."""
    seed = secrets.randbelow(10**6) if options.seed is None else int(options.seed)
    print(f"seed {seed}", flush=True)
    return seed


def report(name: str, options: argparse.Namespace, seed: int, run: Trials, *, good: str) -> int:
    """Run, write the table, say what failed; the exit code is 1 if anything did."""
    began = time.monotonic()
    rows = run(options.seconds, seed, only=options.only)
    if options.docs is not None:
        part = f" ONLY='{options.only}'" if options.only else ""
        took = time.monotonic() - began
        more = options.more or bool(part)
        write_table(options.docs, name, rows, f"make {name} SEED={seed}{part}", took, seed=seed, part=more)
    failed = [row.name for row in rows if row.survived < row.tried]
    print(good if not failed else f"FAILED (seed {seed}): {', '.join(failed)}")
    return 1 if failed else 0

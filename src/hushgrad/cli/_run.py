"""Shared by ``train`` and ``tune``: the options of a run described by a recipe, its ledger, and its interruption."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad.cli._parser import Parser, UsageError, quoted

if TYPE_CHECKING:
    from hushgrad.recipes import Recipe

_INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def add_run(parser: Parser) -> None:
    """Add the options that both commands have."""
    taken = "take the folder from a process that is gone but not known to be"
    policy = "a policy in TOML that must allow it (default: the variable HUSHGRAD_POLICY)"
    parser.flag("--take-over", taken)
    parser.takes("--data PATH", "the same as --set data.path=PATH")
    parser.takes("--plan FILE", "the plan that hushgrad plan --save wrote, instead of the recipe's [plan]")
    parser.takes("--policy FILE", policy)
    parser.flag("--allow-code", "run what the recipe names as module:function: trust it first")
    parser.takes("--set TABLE.KEY=VALUE", "change one value of the recipe", action="append", default=[])
    parser.takes("--ledger PLACE", "budget ledger that pays: a path or postgresql://... (with --dataset)")
    parser.takes("--dataset NAME", "the data set in the ledger")


def require_payer(options: argparse.Namespace) -> None:
    """Refuse a missing ledger, data set or policy before torch is imported and the data are read."""
    if (options.ledger is None) != (options.dataset is None):
        raise UsageError("--ledger and --dataset belong together: who pays, and from which budget.")
    from hushgrad.budget import Ledger, read_policy

    read_policy(options.policy)
    if options.ledger is not None:
        ledger = Ledger(options.ledger)
        ledger.dataset(options.dataset)
        ledger.close()


def recipe_of(options: argparse.Namespace, *changes: str) -> Recipe:
    """The recipe of the options, with single values changed and its ledger."""
    from hushgrad.recipes import load_recipe

    data = [] if options.data is None else [f"data.path={quoted(options.data)}"]
    changed = [*options.set, *data, *changes]
    recipe = load_recipe(options.recipe, changes=changed, allow_code=options.allow_code, plan=options.plan)
    return paid(recipe, options)


def paid(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe with its ledger, if one is given."""
    return recipe if options.ledger is None else recipe.paid_by(options.ledger, options.dataset)


def interrupted(options: argparse.Namespace, command: str, began: Path, *, what: str, saved: str = "") -> int:
    """Print how to resume a run whose first file, ``began``, exists; returns the exit code."""
    if began.exists():
        code = " --allow-code" if options.allow_code or str(options.recipe).endswith(".py") else ""
        again = f"hushgrad {command} --out {shlex.quote(options.out)} --resume{code}"
        print(f"Interrupted{saved}. Continue with: {again}", file=sys.stderr)
    else:
        print(f"Interrupted before the {what} began.", file=sys.stderr)
    return _INTERRUPTED

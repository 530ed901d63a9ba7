"""``hushgrad train``: train a model by a recipe, and write it down with its guarantee."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from hushgrad.cli._parser import Parser, print_json

__all__ = ["run"]

_INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def _parser() -> Parser:
    parser = Parser(
        "train",
        "Train a private model as a recipe says (.toml or .py). Without a recipe: a small demo on embedded digits.\n"
        "DIR then holds model.safetensors, plan.json, ledger.json, metrics.jsonl, guarantee.json and a report.",
        example="hushgrad train examples/mnist_cnn.toml --out runs/mnist",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a .toml or .py file; a .py recipe is run as a program")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results: new, empty, or with --resume")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run, bit for bit")
    parser.add_argument("--data", metavar="PATH", help="the same as --set data.path=PATH")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="change one value of the recipe")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def run(words: list[str]) -> int:
    """Train; see ``hushgrad train --help``."""
    options = _parser().parse(words)
    from hushgrad.recipes import load_recipe, train  # torch: imported after the words have been understood

    changes = [*options.set, *([] if options.data is None else [f"data.path={options.data!r}"])]
    recipe = load_recipe(options.recipe, changes=changes) if options.recipe or changes else None
    try:
        outcome = train(recipe, options.out, resume=options.resume, progress=not options.quiet)
    except KeyboardInterrupt:
        return _interrupted(options)
    if options.json:
        print_json(outcome.to_json())
        return 0
    print(outcome.guarantee)
    print(f"Test accuracy {outcome.test['test_accuracy']:.2%} after {outcome.steps} steps, {outcome.seconds:.1f} s.")
    print(f"Model, plan, ledger and report: {outcome.out}")
    return 0


def _interrupted(options: argparse.Namespace) -> int:
    folder = Path(options.out)
    saved = "a checkpoint is saved" if (folder / "checkpoint" / "state.safetensors").exists() else "no step is saved yet"
    if (folder / "recipe.json").exists():
        command = f"hushgrad train --out {shlex.quote(options.out)} --resume"
        print(f"Interrupted; {saved}. Continue with: {command}", file=sys.stderr)
    else:
        print("Interrupted before the training began.", file=sys.stderr)
    return _INTERRUPTED

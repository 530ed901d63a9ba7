"""``hushgrad train``: train a model by a recipe, and write it down with its guarantee."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad.cli._parser import Parser, UsageError, ask, print_json, quoted
from hushgrad.cli._payer import require_payer
from hushgrad.cli.advise import add_budget, advice_of
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.recipes import Recipe

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
    parser.add_argument(
        "--take-over", action="store_true", help="take the folder from a process that is gone but not known to be"
    )
    parser.add_argument("--data", metavar="PATH", help="the same as --set data.path=PATH")
    parser.add_argument("--plan", metavar="FILE", help="the plan that hushgrad plan --save wrote, instead of the recipe's [plan]")
    parser.add_argument(
        "--policy", metavar="FILE", help="a policy in TOML that must allow it (default: the variable HUSHGRAD_POLICY)"
    )
    parser.add_argument("--allow-code", action="store_true", help="run what the recipe names as module:function: trust it first")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="change one value of the recipe")
    parser.add_argument("--secure", action="store_true", help="noise on a public grid; the same as --set plan.secure=true")
    parser.add_argument("--ledger", metavar="PLACE", help="budget ledger that pays: a path or postgresql://... (with --dataset)")
    parser.add_argument("--dataset", metavar="NAME", help="the data set in the ledger")
    parser.add_argument(
        "--by", metavar="NAME", help="who runs it, for the card; the same as --set run.by=NAME (default: the login)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument(
        "--auto", action="store_true", help="RECIPE is a codebook of public facts; the rest is chosen as by advise"
    )
    parser.add_argument("--test-data", metavar="PATH", help="public records to test on (with --auto; else a fifth is split off)")
    add_budget(parser, required=False)
    return parser


def run(words: list[str]) -> int:
    """Train; see ``hushgrad train --help``."""
    options = _parser().parse(words)
    if options.ledger is not None and options.resume:
        raise UsageError("An interrupted run knows its ledger: leave --ledger and --dataset out with --resume.")
    _require_auto(options)
    require_payer(options)
    from hushgrad.recipes import train  # torch: imported after the words have been understood
    from hushgrad.recipes.metrics import compared

    try:
        how = {"resume": options.resume, "take_over": options.take_over, "allow_code": options.allow_code}
        recipe = _recipe(options)
        asked = () if recipe is None else recipe.questions()
        ask(asked)
        outcome = train(recipe, options.out, **how, progress=not options.quiet, policy=options.policy)
    except KeyboardInterrupt:
        return _interrupted(options)
    ask(() if asked else questions(outcome.guarantee.epsilon, outcome.guarantee.delta))
    if options.json:
        print_json(outcome.to_json())
        return 0
    print(outcome.guarantee)
    print(f"Test accuracy {outcome.test['test_accuracy']:.2%} after {outcome.steps} steps, {outcome.seconds:.1f} s.")
    print(compared(outcome.test), end="")
    print(f"Model, plan, ledger and report: {outcome.out}")
    return 0


def _require_auto(options: argparse.Namespace) -> None:
    """What belongs to --auto needs it, and it needs them."""
    given = [name for name in ("epsilon", "delta", "records", "minutes", "test_data") if vars(options)[name] is not None]
    if given and not options.auto:
        raise UsageError(
            f"--{given[0].replace('_', '-')} belongs to --auto. A recipe says it in its tables: --set plan.epsilon=..."
        )
    if options.auto and options.plan is not None:
        raise UsageError("--auto makes a plan of its own: leave --plan out, or train by a recipe.")
    missing = [name for name in ("recipe", "data", "epsilon", "delta") if vars(options)[name] is None]
    if options.auto and not options.resume and missing:
        raise UsageError(
            "--auto needs a codebook, --data, --epsilon and --delta: hushgrad train bank.toml --auto --data bank.csv ..."
        )


def _automatic(options: argparse.Namespace) -> Recipe:
    """The recipe that the codebook leads to, with single values changed where asked."""
    from hushgrad.recipes import Recipe
    from hushgrad.recipes.recipe_file import changed

    advice = advice_of(options.recipe, options)
    if not (options.quiet or options.json):
        print(advice)
        if options.test_data is None:
            print("- Tested on about a fifth of the records, which nothing protects: --test-data takes public ones instead.")
    tables = advice.recipe(options.data, test_path=options.test_data).tables()
    changes = [*options.set, *(["plan.secure=true"] if options.secure else [])]
    changes += [] if options.by is None else [f"run.by={quoted(options.by)}"]
    recipe = Recipe.from_tables(changed(tables, changes))
    return recipe if options.ledger is None else recipe.paid_by(options.ledger, options.dataset)


def _recipe(options: argparse.Namespace) -> Recipe | None:
    from hushgrad.recipes import load_recipe

    if options.auto and not options.resume:
        return _automatic(options)
    changes = [*options.set, *([] if options.data is None else [f"data.path={quoted(options.data)}"])]
    changes += [
        *(["plan.secure=true"] if options.secure else []),
        *([] if options.by is None else [f"run.by={quoted(options.by)}"]),
    ]
    if not (options.recipe or changes or options.ledger or options.plan):
        return None
    recipe = load_recipe(options.recipe, changes=changes, allow_code=options.allow_code, plan=options.plan)
    return recipe if options.ledger is None else recipe.paid_by(options.ledger, options.dataset)


def _interrupted(options: argparse.Namespace) -> int:
    folder = Path(options.out)
    saved = "a checkpoint is saved" if (folder / "checkpoint" / "state.safetensors").exists() else "no step is saved yet"
    if (folder / "recipe.json").exists():
        code = " --allow-code" if options.allow_code or str(options.recipe).endswith(".py") else ""
        command = f"hushgrad train --out {shlex.quote(options.out)} --resume{code}"
        print(f"Interrupted; {saved}. Continue with: {command}", file=sys.stderr)
    else:
        print("Interrupted before the training began.", file=sys.stderr)
    return _INTERRUPTED

"""``hushgrad train``: trains a model by a recipe and stores it with its guarantee."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad.cli._parser import Parser, UsageError, ask, quoted, say
from hushgrad.cli._run import add_run, interrupted, paid, recipe_of, require_payer
from hushgrad.cli.advise import add_budget, advice_of
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.recipes import Recipe


def _parser() -> Parser:
    parser = Parser(
        "train",
        "Train a private model as a recipe says (.toml or .py). Without a recipe: a small demo on embedded digits.\n"
        "DIR then holds model.safetensors, plan.json, ledger.json, metrics.jsonl, guarantee.json and a report.",
        example="hushgrad train examples/mnist_cnn.toml --out runs/mnist",
    )
    parser.takes("recipe RECIPE", "a .toml or .py file; a .py recipe is run as a program", nargs="?")
    parser.takes("--out DIR", "folder for the results: new, empty, or with --resume", required=True)
    parser.flag("--resume", "continue an interrupted run, bit for bit")
    add_run(parser)
    parser.flag("--secure", "noise on a public grid; the same as --set plan.secure=true")
    parser.takes("--by NAME", "who runs it, for the card; the same as --set run.by=NAME (default: the login)")
    parser.flag("--quiet", "no progress")
    parser.flag("--auto", "RECIPE is a codebook of public facts; the rest is chosen as by advise")
    parser.takes("--test-data PATH", "public records to test on (with --auto; else a fifth is split off)")
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
    tested = f"Test accuracy {outcome.test['test_accuracy']:.2%} after {outcome.steps} steps, {outcome.seconds:.1f} s."
    results = f"{compared(outcome.test)}Model, plan, ledger and report: {outcome.out}"
    return say(options, outcome.to_json(), outcome.guarantee, tested, results)


def _require_auto(options: argparse.Namespace) -> None:
    """Require --auto for the options that belong to it, and these options for --auto."""
    given = [name for name in ("epsilon", "delta", "records", "minutes", "test_data") if vars(options)[name] is not None]
    if given and not options.auto:
        raise UsageError(
            f"--{given[0].replace('_', '-')} belongs to --auto. A recipe says it in its tables: --set plan.epsilon=..."
        )
    if options.auto and options.plan is not None:
        raise UsageError("--auto makes a plan of its own: leave --plan out, or train by a recipe.")
    missing = [name for name in ("recipe", "data", "epsilon", "delta") if vars(options)[name] is None]
    if options.auto and missing and not (options.resume and options.recipe is None):
        raise UsageError(
            "--auto needs a codebook, --data, --epsilon and --delta: hushgrad train bank.toml --auto --data bank.csv ..."
        )


def _automatic(options: argparse.Namespace) -> Recipe:
    """The recipe derived from the codebook, with single values changed if requested."""
    from hushgrad.recipes import Recipe
    from hushgrad.recipes.recipe_file import changed

    advice = advice_of(options.recipe, options)
    if not (options.quiet or options.json):
        print(advice)
        if options.test_data is None:
            print("- Tested on about a fifth of the records, which nothing protects: --test-data takes public ones instead.")
    tables = advice.recipe(options.data, test_path=options.test_data).tables()
    recipe = Recipe.from_tables(changed(tables, [*options.set, *_changes(options)]))
    return paid(recipe, options)


def _changes(options: argparse.Namespace) -> list[str]:
    """The changes that ``--secure`` and ``--by`` make to a recipe."""
    by = [] if options.by is None else [f"run.by={quoted(options.by)}"]
    return [*(["plan.secure=true"] if options.secure else []), *by]


def _recipe(options: argparse.Namespace) -> Recipe | None:
    if options.auto and options.recipe is not None:  # with --resume too: it has to be that of the interrupted run
        return _automatic(options)
    changes = _changes(options)
    if not (options.recipe or options.set or options.data or changes or options.ledger or options.plan):
        return None
    return recipe_of(options, *changes)


def _interrupted(options: argparse.Namespace) -> int:
    folder = Path(options.out)
    saved = "a checkpoint is saved" if (folder / "checkpoint" / "state.safetensors").exists() else "no step is saved yet"
    return interrupted(options, "train", folder / "recipe.json", what="training", saved=f"; {saved}")

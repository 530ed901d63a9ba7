"""``hushgrad tune``: private hyper-parameter search, and what it costs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad._printed import at_most
from hushgrad.cli._parser import Parser, UsageError, ask, print_json, quoted
from hushgrad.cli._payer import require_payer
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.recipes import Recipe
    from hushgrad.tuning import Priced, Tuned

_INTERRUPTED = 130


def _parser() -> Parser:
    parser = Parser(
        "tune",
        "Search hyper-parameters privately: a secret random number of trials, and only the best one is released.\n"
        "An epsilon in the recipe is the budget of the whole search. With --dry nothing is trained and the cost is printed;\n"
        "without a recipe, --dry --epsilon E --delta D says what a search costs whose single trials cost E.",
        example="hushgrad tune recipe.toml --over optimizer.lr=0.1,0.3,1 --mean 10 --out runs/tuned",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a .toml or .py file, with a [tune] table or --over")
    parser.add_argument("--out", metavar="DIR", help="folder for the winner: new, empty, or with --resume")
    parser.add_argument("--over", action="append", default=[], metavar="TABLE.KEY=V,V", help="values to try; may be repeated")
    parser.add_argument("--mean", type=float, help="mean number of trials (10)")
    parser.add_argument("--shape", help="0 logarithmic (default, cheap), 1 geometric, poisson")
    parser.add_argument(
        "--score", choices=("public", "private"), help="on the public test set, or noisy on held-out private records"
    )
    parser.add_argument("--dry", action="store_true", help="print the cost and stop")
    parser.add_argument("--epsilon", type=float, help="with --dry and without a recipe: the epsilon of one trial")
    parser.add_argument("--delta", type=float, help="with --epsilon")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted search: the same one")
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
    parser.add_argument("--ledger", metavar="PLACE", help="budget ledger that pays (with --dataset)")
    parser.add_argument("--dataset", metavar="NAME", help="the data set in the ledger")
    parser.add_argument(
        "--progress",
        action="store_true",
        help="show every trial's progress, which tells how many there are: as secret as the data",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress; the default")
    return parser


def run(words: list[str]) -> int:
    """Search, or say what it would cost; see ``hushgrad tune --help``."""
    options = _parser().parse(words)
    _require_sense(options)
    if options.dry and options.recipe is None and options.epsilon is not None:
        return _answer(options)
    require_payer(options)
    from hushgrad.tuning import priced, settings_of, tune

    recipe = None if options.resume else _recipe(options)
    settings = None if recipe is None else settings_of(recipe, over=options.over, changes=_changes(options))
    if recipe is not None:
        ask(recipe.questions())
    if options.dry and recipe is not None:
        return _say_price(options, priced(recipe, settings=settings))
    try:
        how = {
            "resume": options.resume,
            "allow_code": options.allow_code,
            "policy": options.policy,
            "take_over": options.take_over,
        }
        tuned = tune(recipe, options.out, settings=settings, **how, progress=options.progress and not options.quiet)
    except KeyboardInterrupt:
        return _interrupted(options)
    return _say_outcome(options, tuned)


def _interrupted(options: argparse.Namespace) -> int:
    if (Path(options.out) / "search" / "recipe.json").exists():
        code = " --allow-code" if options.allow_code or str(options.recipe).endswith(".py") else ""
        print(f"Interrupted. Continue with: hushgrad tune --out {shlex.quote(options.out)} --resume{code}", file=sys.stderr)
    else:
        print("Interrupted before the search began.", file=sys.stderr)
    return _INTERRUPTED


def _require_sense(options: argparse.Namespace) -> None:
    if (options.epsilon is None) != (options.delta is None):
        raise UsageError("--epsilon and --delta belong together.")
    if options.epsilon is not None and (options.recipe is not None or not options.dry):
        raise UsageError("--epsilon is for --dry without a recipe. Use --set plan.epsilon=... to change the recipe's budget.")
    if not options.dry and options.out is None:
        raise UsageError("Say where the winner goes: --out DIR. With --dry only the cost is printed.")
    fixed = [
        name for name in ("recipe", "over", "mean", "shape", "score", "data", "set", "ledger", "plan") if vars(options)[name]
    ]
    if options.resume and fixed:
        raise UsageError(f"An interrupted search is what it is: leave {', '.join(fixed)} out with --resume.")


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    return {"mean": options.mean, "shape": _shape(options.shape), "score": options.score}


def _shape(word: str | None) -> float | None:
    if word is None:
        return None
    try:
        return float("inf") if word in ("poisson", "inf") else float(word)
    except ValueError:
        raise UsageError(f"--shape {word} must be a number above -1, or poisson.") from None


def _recipe(options: argparse.Namespace) -> Recipe:
    from hushgrad.recipes import load_recipe

    changes = [*options.set, *([] if options.data is None else [f"data.path={quoted(options.data)}"])]
    recipe = load_recipe(options.recipe, changes=changes, allow_code=options.allow_code, plan=options.plan)
    return recipe if options.ledger is None else recipe.paid_by(options.ledger, options.dataset)


def _answer(options: argparse.Namespace) -> int:
    """What a search costs whose trials are Gaussian mechanisms of the given epsilon: needs no torch."""
    from hushgrad.accounting import calibrate
    from hushgrad.events import Gaussian
    from hushgrad.tuning import Stopping, calibrated_noise, tuning_cost

    chosen = {key: value for key, value in (("mean", options.mean), ("shape", _shape(options.shape))) if value is not None}
    stopping = Stopping(**chosen)
    ask(questions(options.epsilon, options.delta))
    noise = calibrate(Gaussian, epsilon=options.epsilon, delta=options.delta)
    cost = tuning_cost(Gaussian(noise), delta=options.delta, stopping=stopping)
    needed = calibrated_noise(Gaussian, epsilon=options.epsilon, delta=options.delta, stopping=stopping)
    if options.json:
        facts = {
            "naive_epsilon": options.epsilon,
            "epsilon": cost.epsilon,
            "delta": options.delta,
            "noise_factor": needed / noise,
        }
        print_json({**facts, "stopping": str(stopping)})
        return 0
    print(f"{stopping}.")
    print(
        f"Trials of epsilon {at_most(options.epsilon, 6)} each make a search of epsilon "
        f"{at_most(cost.epsilon)} at delta {at_most(options.delta, 6)}."
    )
    print(f"A search of epsilon {at_most(options.epsilon, 6)} needs {needed / noise:.3g} times the noise in each trial.")
    print("Computed for Gaussian trials; give a recipe for its own figures.")
    return 0


def _say_price(options: argparse.Namespace, search: Priced) -> int:
    facts = search.to_json()
    if options.json:
        print_json(facts)
        return 0
    print(f"{facts['candidates']} candidates over {', '.join(facts['over'])}; {facts['stopping']}.")
    print(f"Score: {facts['score']}.")
    print(
        f"Naive epsilon {at_most(facts['naive_epsilon'])}, true epsilon {at_most(facts['epsilon'])} at delta {at_most(facts['delta'], 6)}."
    )
    print(f"Noise multiplier {_span(facts['noise_multiplier'])} in each trial", end="")
    without = facts["noise_multiplier_without_tuning"]
    print(f" ({_span(without)} would do for one run that is not chosen)." if without is not None else ".")
    return 0


def _span(noise: float | list[float]) -> str:
    """One number, or the ends of those that the candidates have."""
    return f"{noise[0]:.4g} to {noise[-1]:.4g}" if isinstance(noise, list) else f"{noise:.4g}"


def _say_outcome(options: argparse.Namespace, tuned: Tuned) -> int:
    if options.json:
        print_json(tuned.to_json())
        return 0
    print(tuned.guarantee)
    print(f"The winner alone would claim epsilon {at_most(tuned.naive_epsilon)}; that would be wrong.")
    if tuned.candidate is None:
        print("The secret number of trials was 0: nothing is released. The search is paid for all the same.")
        return 0
    print(f"Chosen: {', '.join(f'{place} = {value}' for place, value in tuned.candidate.items())}")
    for sentence in tuned.edges:
        print(sentence)
    print(f"Test accuracy {tuned.test['test_accuracy']:.2%}. Model, plan, ledger and report: {tuned.out}")
    return 0

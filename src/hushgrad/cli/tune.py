"""``hushgrad tune``: private hyper-parameter search, and what it costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad._printed import at_most
from hushgrad.cli._parser import Parser, UsageError, ask, say
from hushgrad.cli._run import add_run, interrupted, recipe_of, require_payer
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.tuning import Priced, Tuned


def _parser() -> Parser:
    parser = Parser(
        "tune",
        "Search hyper-parameters privately: a secret random number of trials, and only the best one is released.\n"
        "An epsilon in the recipe is the budget of the whole search. With --dry nothing is trained and the cost is printed;\n"
        "without a recipe, --dry --epsilon E --delta D says what a search costs whose single trials cost E.",
        example="hushgrad tune recipe.toml --over optimizer.lr=0.1,0.3,1 --mean 10 --out runs/tuned",
    )
    parser.takes("recipe RECIPE", "a .toml or .py file, with a [tune] table or --over", nargs="?")
    parser.takes("--out DIR", "folder for the winner: new, empty, or with --resume")
    parser.takes("--over TABLE.KEY=V,V", "values to try; may be repeated", action="append", default=[])
    parser.takes("--mean", "mean number of trials (10)", type=float)
    parser.takes("--shape", "0 logarithmic (default, cheap), 1 geometric, poisson")
    parser.takes("--score", "on the public test set, or noisy on held-out private records", choices=("public", "private"))
    parser.flag("--dry", "print the cost and stop")
    parser.takes("--epsilon", "with --dry and without a recipe: the epsilon of one trial", type=float)
    parser.takes("--delta", "with --epsilon", type=float)
    parser.flag("--resume", "continue an interrupted search: the same one")
    add_run(parser)
    parser.flag("--progress", "show every trial's progress, which tells how many there are: as secret as the data")
    parser.flag("--quiet", "no progress; the default")
    return parser


def run(words: list[str]) -> int:
    """Search, or report what a search would cost; see ``hushgrad tune --help``."""
    options = _parser().parse(words)
    _require_sense(options)
    if options.dry and options.recipe is None and options.epsilon is not None:
        return _answer(options)
    require_payer(options)
    from hushgrad.tuning import priced, settings_of, tune

    recipe = None if options.resume else recipe_of(options)
    changes = {"mean": options.mean, "shape": _shape(options.shape), "score": options.score}
    settings = None if recipe is None else settings_of(recipe, over=options.over, changes=changes)
    if recipe is not None:
        ask(recipe.questions())
    if options.dry and recipe is not None:
        return _say_price(options, priced(recipe, settings=settings))
    try:
        how = {name: vars(options)[name] for name in ("resume", "allow_code", "policy", "take_over")}
        tuned = tune(recipe, options.out, settings=settings, **how, progress=options.progress and not options.quiet)
    except KeyboardInterrupt:
        began = Path(options.out) / "search" / "recipe.json"
        return interrupted(options, "tune", began, what="search")
    return _say_outcome(options, tuned)


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


def _shape(word: str | None) -> float | None:
    if word is None:
        return None
    try:
        return float("inf") if word in ("poisson", "inf") else float(word)
    except ValueError:
        raise UsageError(f"--shape {word} must be a number above -1, or poisson.") from None


def _answer(options: argparse.Namespace) -> int:
    """The cost of a search whose trials are Gaussian mechanisms of the given epsilon; needs no torch."""
    from hushgrad.accounting import calibrate
    from hushgrad.events import Gaussian
    from hushgrad.tuning import Stopping, calibrated_noise, tuning_cost

    chosen = {key: value for key, value in (("mean", options.mean), ("shape", _shape(options.shape))) if value is not None}
    stopping = Stopping(**chosen)
    ask(questions(options.epsilon, options.delta))
    noise = calibrate(Gaussian, epsilon=options.epsilon, delta=options.delta)
    cost = tuning_cost(Gaussian(noise), delta=options.delta, stopping=stopping)
    needed = calibrated_noise(Gaussian, epsilon=options.epsilon, delta=options.delta, stopping=stopping)
    one, factor = at_most(options.epsilon, 6), needed / noise
    facts = {"naive_epsilon": options.epsilon, "epsilon": cost.epsilon, "delta": options.delta, "noise_factor": factor}
    return say(
        options,
        {**facts, "stopping": str(stopping)},
        f"{stopping}.",
        f"Trials of epsilon {one} each make a search of epsilon {at_most(cost.epsilon)} at delta {at_most(options.delta, 6)}.",
        f"A search of epsilon {one} needs {factor:.3g} times the noise in each trial.",
        "Computed for Gaussian trials; give a recipe for its own figures.",
    )


def _say_price(options: argparse.Namespace, search: Priced) -> int:
    facts = search.to_json()
    naive, true, delta = at_most(facts["naive_epsilon"]), at_most(facts["epsilon"]), at_most(facts["delta"], 6)
    without = facts["noise_multiplier_without_tuning"]
    alone = "" if without is None else f" ({_span(without)} would do for one run that is not chosen)"
    return say(
        options,
        facts,
        f"{facts['candidates']} candidates over {', '.join(facts['over'])}; {facts['stopping']}.",
        f"Score: {facts['score']}.",
        f"Naive epsilon {naive}, true epsilon {true} at delta {delta}.",
        f"Noise multiplier {_span(facts['noise_multiplier'])} in each trial{alone}.",
    )


def _span(noise: float | list[float]) -> str:
    """One number, or the ends of those that the candidates have."""
    return f"{noise[0]:.4g} to {noise[-1]:.4g}" if isinstance(noise, list) else f"{noise:.4g}"


def _say_outcome(options: argparse.Namespace, tuned: Tuned) -> int:
    texts = [tuned.guarantee, f"The winner alone would claim epsilon {at_most(tuned.naive_epsilon)}; that would be wrong."]
    if tuned.candidate is None:
        texts += ["The secret number of trials was 0: nothing is released. The search is paid for all the same."]
    else:
        texts += [f"Chosen: {', '.join(f'{place} = {value}' for place, value in tuned.candidate.items())}", *tuned.edges]
        texts += [f"Test accuracy {tuned.test['test_accuracy']:.2%}. Model, plan, ledger and report: {tuned.out}"]
    return say(options, tuned.to_json(), *texts)

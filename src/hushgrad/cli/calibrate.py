"""``hushgrad calibrate``: which noise, number of steps, rate or batch size meets a budget."""

from __future__ import annotations

import argparse
from typing import Any

from hushgrad._printed import at_least, at_most
from hushgrad.cli._parser import Parser, UsageError, ask, say, table, whole
from hushgrad.cli._question import accountant_names, add_question
from hushgrad.cli._waiting import waiting
from hushgrad.guarantee import questions

_UNKNOWNS = ("noise", "steps", "rate", "batch")


def _parser() -> Parser:
    parser = Parser(
        "calibrate",
        "Which noise, steps, rate or batch size meets a budget. The answer's certified epsilon is at most the target.",
        example="hushgrad calibrate --epsilon 1 --delta 1e-5 --rate 0.004267 --steps 14040",
    )
    parser.takes("--epsilon E", "the epsilon that must not be exceeded", type=float, required=True)
    add_question(parser)
    parser.takes("--for", "what is looked for (default: noise)", dest="unknown", choices=_UNKNOWNS, default="noise")
    parser.takes("--dataset-size N", "number of records; needed for --for batch", type=whole)
    return parser


def run(words: list[str]) -> int:
    """Answer the question; see ``hushgrad calibrate --help``."""
    options = _parser().parse(words)
    names = accountant_names(options.accountant)
    with waiting("Calibrating"):
        answers = [_ask(name, options) for name in names]
    ask(questions(options.epsilon, options.delta, records=options.dataset_size))
    asked = {k: v for k, v in vars(options).items() if k not in ("json", "accountant")}
    say(options, asked | {"answers": answers}, *_lines(answers, options))
    return 2 if all("refused" in answer for answer in answers) else 0


def _lines(answers: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    budget = f"epsilon = {at_most(options.epsilon, 6)}, delta = {at_most(options.delta, 6)}"
    rows = [("accountant", options.unknown, "")]
    for answer in answers:
        rows.append((answer["accountant"], _shown(answer.get("value"), options.unknown), answer.get("refused", "")))
    return [f"{options.unknown} for {budget}, {options.relation}", table(rows)]


def _shown(value: float | int | None, unknown: str) -> str:
    """Nine digits, rounded to the private side, so that what is printed meets the budget too."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return at_most(value, 9) if unknown == "noise" else at_least(value, 9)


def _ask(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from hushgrad.errors import NoTheorem

    try:
        return {"accountant": name, "value": _solve(name, options)}
    except NoTheorem as error:
        return {"accountant": name, "refused": str(error)}


def _solve(name: str, options: argparse.Namespace) -> float | int:
    from hushgrad import accounting
    from hushgrad.events import Event, Gaussian

    budget: dict[str, Any] = {"epsilon": options.epsilon, "delta": options.delta}
    budget |= {"accountant": name, "relation": options.relation}
    steps = 1 if options.steps is None else options.steps
    rate = 1.0 if options.rate is None else options.rate
    if options.unknown == "noise":
        _unused(options, "noise_multiplier")
        return accounting.calibrate_noise(steps=steps, rate=rate, **budget)
    if options.noise_multiplier is None:
        raise UsageError(f"Give --noise-multiplier to look for the {options.unknown}.")
    step: Event = Gaussian(options.noise_multiplier)
    if options.unknown == "steps":
        _unused(options, "steps")
        return accounting.calibrate_steps(step.sampled(rate=rate), **budget)
    _unused(options, "rate")
    if options.unknown == "rate":
        return accounting.calibrate_rate(step, steps=steps, **budget)
    if options.dataset_size is None:
        raise UsageError("Give --dataset-size to look for the batch size.")
    return accounting.calibrate_batch_size(step, steps=steps, dataset_size=options.dataset_size, **budget)


def _unused(options: argparse.Namespace, name: str) -> None:
    if vars(options)[name] is not None:
        raise UsageError(f"--{name.replace('_', '-')} is what is looked for with --for {options.unknown}. Leave it out.")

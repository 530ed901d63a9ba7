"""``hushgrad epsilon``: how much privacy a run spends, by one or several accountants side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad._printed import at_least, at_most
from hushgrad.cli._parser import Parser, UsageError, ask, say, table
from hushgrad.cli._paths import require_picture
from hushgrad.cli._question import accountant_names, add_description, add_question, event_from
from hushgrad.cli._waiting import waiting
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.events import Event


def _parser() -> Parser:
    parser = Parser(
        "epsilon",
        "How much privacy a run spends: the smallest epsilon that is proved for it, never below the truth.",
        example="hushgrad epsilon --noise-multiplier 1.1 --rate 0.004267 --steps 14040 --delta 1e-5 --accountant pld,rdp",
    )
    add_question(parser)
    add_description(parser)
    parser.flag("--interval", "also a certified lower bound (pld)")
    parser.flag("--attack", "also say what the best attacker can do, in plain words")
    parser.takes("--plot PATH", "save a plot of delta over epsilon (needs matplotlib)")
    return parser


def run(words: list[str]) -> int:
    """Answer the question; see ``hushgrad epsilon --help``."""
    options = _parser().parse(words)
    event = event_from(options)
    names = accountant_names(options.accountant)
    with waiting("Accounting"):
        answers = [_ask(event, name, options) for name in names]
    require_picture(options.plot)
    if options.plot:
        _plot(event, names, options)
    shown = [{k: v if k != "attack" else vars(v) for k, v in answer.items()} for answer in answers]
    content = {"event": event.to_json(), "delta": options.delta, "relation": options.relation, "answers": shown}
    say(options, content, *_lines(event, answers, options))
    found = [answer["epsilon"] for answer in answers if "epsilon" in answer]
    ask(questions(min(found, default=None), options.delta))
    return 2 if all("refused" in answer for answer in answers) else 0


def _ask(event: Event, name: str, options: argparse.Namespace) -> dict[str, Any]:
    from hushgrad.accounting import attack, epsilon, epsilon_interval
    from hushgrad.errors import NoTheorem

    question = {"accountant": name, "relation": options.relation}
    answer: dict[str, Any] = {"accountant": name}
    try:
        if options.interval and name == "pld":
            answer["lower"], answer["epsilon"] = epsilon_interval(event, delta=options.delta, **question)
        else:
            answer["epsilon"] = epsilon(event, delta=options.delta, **question)
        if options.attack:
            answer["attack"] = attack(event, **question)
    except NoTheorem as error:
        return {"accountant": name, "refused": str(error)}
    return answer


def _lines(event: Event, answers: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    rows = [("accountant", "epsilon", "")]
    for answer in answers:
        if "refused" in answer:
            rows.append((answer["accountant"], "-", answer["refused"]))
            continue
        note = f"at least {at_least(answer['lower'], 6)}" if "lower" in answer else ""
        rows.append((answer["accountant"], at_most(answer["epsilon"], 6), note))
    attacks = [f"{answer['accountant']}: {answer['attack']}" for answer in answers if "attack" in answer]
    return [f"{event}, delta = {at_most(options.delta, 6)}, {options.relation}", table(rows), *attacks]


def _plot(event: Event, names: list[str], options: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib. Install it with pip install 'hushgrad[report]'.") from None
    from hushgrad.accounting import delta_curve, epsilon
    from hushgrad.errors import NoTheorem
    from hushgrad.release.atomic import written

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        question = {"accountant": name, "relation": options.relation}
        try:
            top = epsilon(event, delta=min(options.delta, 0.1) / 10.0, **question)
        except NoTheorem:
            continue
        if not 0.0 < top < float("inf"):
            continue
        epsilons = [top * k / 60 for k in range(61)]
        deltas = delta_curve(event, epsilons, **question)
        axes.plot(epsilons, [max(d, 1e-300) for d in deltas], label=name)
    if not axes.lines:
        raise UsageError("There is no curve to plot: epsilon is 0 or infinite, or no accountant knows it. Leave --plot out.")
    axes.axhline(options.delta, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="epsilon", ylabel="delta", yscale="log", ylim=(options.delta / 100, 1.5), title=str(event)[:70])
    axes.legend()
    written(options.plot, lambda buffer: figure.savefig(buffer, format=Path(options.plot).suffix[1:] or "png"))

"""``hushgrad advise``: a recipe for a budget, from public facts alone, with the expected accuracy and the reasons."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hushgrad.cli._parser import Parser, say, whole

if TYPE_CHECKING:
    import argparse

    from hushgrad.advice import Advice


def _parser() -> Parser:
    parser = Parser(
        "advise",
        "Say which features, model, batch, steps, clip norm and learning rate suit a budget, and what to expect.\n"
        "CODEBOOK is a .toml file with public facts: kind, classes, columns with low and high, cuts or values. No data are read.",
        example="hushgrad advise bank.toml --records 36000 --epsilon 1 --delta 1e-5",
    )
    parser.takes("codebook CODEBOOK", "what is publicly known about the data, in a .toml file")
    add_budget(parser, required=True)
    return parser


def add_budget(parser: Parser, *, required: bool) -> None:
    """Add the options that ``advise`` and ``train --auto`` share."""
    also = "" if required else " (with --auto)"
    parser.takes("--epsilon", f"the budget{also}", type=float, required=required)
    parser.takes("--delta", f"its failure probability{also}", type=float, required=required)
    parser.takes("--records", f"training records, as far as their number may be known{also}", type=whole)
    parser.takes("--minutes", f"time for training on one core (5){also}", type=float)


def advice_of(codebook: str, options: argparse.Namespace) -> Advice:
    """The advice for the given options."""
    from hushgrad.advice import advise, read_codebook

    minutes = 5.0 if options.minutes is None else options.minutes
    budget = {"epsilon": options.epsilon, "delta": options.delta}
    return advise(read_codebook(codebook), **budget, records=options.records, minutes=minutes)


def run(words: list[str]) -> int:
    """Advise; see ``hushgrad advise --help``."""
    options = _parser().parse(words)
    advice = advice_of(options.codebook, options)
    return say(options, advice.to_json(), advice, f"Train so:  {_command(options)}")


def _command(options: argparse.Namespace) -> str:
    """The command that trains as advised, with FILE for the data; it contains every option that the advice depends on."""
    asked = {name: vars(options)[name] for name in ("records", "epsilon", "delta", "minutes")}
    budget = " ".join(f"--{name} {value!r}" for name, value in asked.items() if value is not None)
    return f"hushgrad train {shlex.quote(options.codebook)} --auto --data FILE {budget} --out DIR"

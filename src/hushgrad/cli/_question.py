"""Shared by ``epsilon`` and ``calibrate``: the options that describe an event, and a few formats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.cli._parser import Parser, UsageError, whole

if TYPE_CHECKING:
    from hushgrad.events import Event


def add_question(parser: Parser, *, accountants: bool = True) -> None:
    """Add the options common to all privacy questions; ``--accountant`` only if the command offers a choice."""
    parser.takes("--delta D", "the delta of the guarantee, e.g. 1e-5", type=float, required=True)
    parser.takes("--noise-multiplier S", "noise standard deviation / clip norm", type=float)
    parser.takes("--rate Q", "Poisson sampling rate (default 1: full batches)", type=float)
    parser.takes("--steps T", "number of steps (default 1)", type=whole)
    if accountants:
        parser.takes("--accountant A,B", "pld (default), the word of another accountant, several of them, or all", default="pld")
    parser.takes("--relation R", "add_remove (default), replace_one or zero_out: who is a neighbour", default="add_remove")


def add_description(parser: Parser) -> None:
    """Add the options that describe an arbitrary run, instead of three numbers."""
    parser.takes("--event JSON", "any event tree as JSON, or @FILE; instead of noise, rate and steps")
    parser.takes(
        "--from FILE",
        "a file instead: the JSON of an event, a saved plan, the ledger.json of a run, or an Opacus history [[sigma, rate, steps], ...]",
        dest="file",
    )


def event_from(options: argparse.Namespace) -> Event:
    """The event that the options describe: ``--from`` or ``--event`` (JSON text, or @FILE), or a sampled Gaussian repeated."""
    from hushgrad.events import Gaussian

    words = [word for word in (options.event, options.file and f"@{options.file}") if word is not None]
    if words:
        if len(words) > 1 or any(x is not None for x in (options.noise_multiplier, options.rate, options.steps)):
            raise UsageError("Give either --event or --from, or --noise-multiplier with --rate and --steps, not both.")
        return described(words[0])
    if options.noise_multiplier is None:
        raise UsageError("Give --noise-multiplier (with --rate and --steps), or --event. Try hushgrad epsilon --help.")
    step: Event = Gaussian(options.noise_multiplier)
    if options.rate is not None and options.rate != 1.0:
        step = step.sampled(rate=options.rate)
    return step * (1 if options.steps is None else _check.integer(0, steps=options.steps))


def described(word: str) -> Event:
    """The event that JSON text, or @FILE with it, describes: an event, an Opacus history, a plan, or the ledger of a run."""
    from hushgrad.events import Event
    from hushgrad.guarantee import Ledger

    try:
        text = Path(word[1:]).read_text(encoding="utf-8") if word.startswith("@") else word
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the event from {word[1:]}: {reason(error)}.") from None
    content = _check.parsed(text) if '"plan"' in text or '"ledger"' in text else None
    if isinstance(content, dict) and "ledger" in content:
        return Ledger.from_json(content).event()
    if isinstance(content, dict) and content.get("plan") == "Plan":
        from hushgrad.train.plan import Plan

        return Plan.from_json(content).event()
    return Event.read(text)


def accountant_names(words: str) -> list[str]:
    """``a,b,c`` as a list of known accountants; ``all`` is all of them."""
    from hushgrad.accounting.api import accountants

    if words == "all":
        return sorted(accountants())
    return [str(_check.one_of(tuple(accountants()), accountant=word.strip())) for word in words.split(",")]

"""``hushgrad reproduce``: repeats a published result and reports which of its claims hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad.cli._parser import Parser, UsageError, print_json, table, whole

if TYPE_CHECKING:
    from hushgrad.experiments import Context, Experiment, Outcome


def _parser() -> Parser:
    parser = Parser(
        "reproduce",
        "Repeat a published result: its claims with verdicts, a picture and tables.\n"
        "DIR/NAME then holds results.json, NAME.png and NAME.md. Exit code 1: a claim was not reproduced (undecided ones do not count).",
        example="hushgrad reproduce mean-estimation --out runs/results",
    )
    parser.takes("name NAME", "an experiment; --list shows them", nargs="?")
    parser.flag("--list", "the experiments, their sources and claims")
    parser.flag("--all", "all experiments, one after the other")
    parser.flag("--quick", "a small form of it, on embedded data")
    parser.takes("--out DIR", "folder for the results (without it nothing is written)")
    parser.takes("--docs DIR", "also write the documentation's pages: DIR/results.md, results/, images/")
    parser.takes("--data PATH", "folder of the real data sets, for the experiments that train on them")
    parser.takes("--seed N", "of all randomness (default 0)", type=whole, default=0)
    parser.flag("--no-picture", "numbers only; matplotlib is then not needed")
    return parser


def run(words: list[str]) -> int:
    """Reproduce; see ``hushgrad reproduce --help``."""
    options = _parser().parse(words)
    from hushgrad.experiments import EXPERIMENTS

    if options.list:
        return _list(EXPERIMENTS, as_json=options.json)
    outcomes = [_one(experiment, options) for experiment in _chosen(EXPERIMENTS, options)]
    if options.json:
        reports = [outcome.to_json() for outcome in outcomes]
        print_json({"experiments": reports} if options.all else reports[0])
    return 0 if all(outcome.reproduced for outcome in outcomes) else 1


def _chosen(experiments: Sequence[Experiment], options: argparse.Namespace) -> Sequence[Experiment]:
    from hushgrad.experiments import find

    if options.all == (options.name is not None):
        raise UsageError("Name one experiment, or say --all. Try hushgrad reproduce --list.")
    return experiments if options.all else [find(options.name)]


def _list(experiments: Sequence[Experiment], *, as_json: bool) -> int:
    if as_json:
        print_json(
            {"experiments": [{"name": e.name, "source": e.source, "claim": e.claim, "heavy": e.heavy} for e in experiments]}
        )
    else:
        print(table([("name", "source", "claim"), *((e.name, e.source, e.claim) for e in experiments)]))
    return 0


def _one(experiment: Experiment, options: argparse.Namespace) -> Outcome:
    from hushgrad.experiments import Context, reproduce
    from hushgrad.experiments.runner import write_pages

    with _progress(quiet=options.json) as bars:
        context = Context(
            quick=options.quick,
            seed=options.seed,
            data=None if options.data is None else Path(options.data),
            **({} if bars is None else {"track": _tracker(bars, experiment.name)}),
        )
        out = None if options.out is None else Path(options.out)
        outcome = reproduce(experiment, context, out, picture=not options.no_picture)
    if options.docs is not None:
        write_pages(outcome, Path(options.docs))
    if not options.json:
        _show(outcome, context, out)
    return outcome


def _progress(*, quiet: bool) -> AbstractContextManager[Any]:
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)


def _tracker(bars: Any, name: str) -> Any:
    def track(items: Sequence[Any], about: str) -> Iterable[Any]:
        return bars.track(items, description=f"{name}: {about}")  # type: ignore[no-any-return]

    return track


def _show(outcome: Outcome, context: Context, out: Path | None) -> None:
    experiment = outcome.experiment
    print(
        f"{experiment.name} (source {experiment.source}, seed {context.seed}, {outcome.wall_seconds:.1f} s): {experiment.claim}"
    )
    signs = {"equal": "", "at most": "<= ", "at least": ">= "}
    rows = [
        (claim.verdict, signs[claim.relation] + f"{claim.expected:.4g}", f"{claim.found:.4g}", claim.says)
        for claim in outcome.findings.claims
    ]
    print(table([("verdict", "expected", "found", "claim"), *rows]))
    if out is not None:
        print(f"Results, picture and page: {out / experiment.name}")
    print()

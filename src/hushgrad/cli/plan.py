"""``hushgrad plan``: which mechanism, noise and sampling are best for a budget, with reasons."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hushgrad import _check
from hushgrad._printed import at_most, size
from hushgrad.cli._parser import Parser, UsageError, ask, say, table, whole, wrapped
from hushgrad.cli._paths import require_place
from hushgrad.cli._waiting import waiting
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.planner import Comparison

_OTHERS = {"--model": "hushgrad.cli.plan_model", "--compute": "hushgrad.cli.plan_compute"}  # other questions, by their options
# Options that are arguments of the planner, too.
_ASKED = "epsilon delta dataset_size batch_size epochs steps parameters memory max_grad_norm relation tune_bands".split()
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Compare mechanisms under a privacy budget, best first: DP-SGD with amplification, banded noise with cyclic sampling,\n"
        "BLT, trees and others over a fixed order. Uses public numbers only and costs no privacy.\n"
        "Memory and time of a language model: hushgrad plan --model NAME --help.\n"
        "Its size, batches and steps under a budget of compute: hushgrad plan --compute FLOP --help.",
        example="hushgrad plan --epsilon 2 --delta 1e-6 --dataset-size 60000 --batch-size 600 --epochs 20 --parameters 1e6",
        also=_OTHERS,
    )
    parser.takes("--epsilon", "the budget", type=float, required=True)
    parser.takes("--delta", "the probability that is left out of the promise", type=float, required=True)
    parser.takes("--dataset-size N", "public number of records", type=whole, required=True)
    parser.takes("--batch-size B", "default: the power of two nearest to sqrt(N)", type=whole)
    parser.takes("--epochs", "passes over the data; or --steps", type=float)
    parser.takes("--steps", "steps instead of epochs", type=whole)
    parser.takes("--parameters P", "parameters of the model, to say what noise state takes", type=whole)
    parser.takes("--memory BYTES", "limit of the noise state; 500M and 2Gi are understood", type=_bytes)
    parser.flag("--no-sampling", "batches cannot be random and secret")
    parser.takes("--relation", "add_remove, replace_one or zero_out", default="add_remove")
    parser.takes("--max-grad-norm C", "clip norm (default 1)", type=float, default=1.0)
    parser.takes("--momentum", "judge by SGD with this momentum", type=float, default=0.0)
    parser.flag("--tune-bands", "optimise banded noise for SGD's iterates: up to 12 %% less error")
    parser.takes("--save PATH", "write the best plan as JSON")
    return parser


def run(words: list[str]) -> int:
    """Answer; see ``hushgrad plan --help``."""
    for option, module in _OTHERS.items():
        if any(word == option or word.startswith(f"{option}=") for word in words):
            answer: Callable[[list[str]], int] = vars(importlib.import_module(module))["run"]
            return answer(words)
    options = _parser().parse(words)
    if options.memory is not None and options.parameters is None:
        _check.fail(
            "--parameters", None, "to be given with --memory", "Noise state is kept per parameter: say how many there are."
        )
    _check_early(options)
    ask(questions(options.epsilon, options.delta, records=options.dataset_size))
    with waiting("Ranking the mechanisms"):
        from hushgrad.noise.workload import SGDWorkload
        from hushgrad.planner import compare

        workload = SGDWorkload(momentum=options.momentum) if options.momentum else None
        asked = {name: vars(options)[name] for name in _ASKED}
        found = compare(**asked, sampling_allowed=not options.no_sampling, workload=workload)
    if options.save:
        _save(options.save, found[0].plan.to_json())
    return say(options, found.to_json(), _text(found, options))


def _check_early(options: argparse.Namespace) -> None:
    """Check for the likeliest mistakes before torch is imported."""
    _check.positive(epsilon=options.epsilon)
    _check.delta(delta=options.delta)
    if (options.epochs is None) == (options.steps is None):
        raise UsageError("Expected exactly one of epochs and steps. The other one follows from it.")
    if options.batch_size is not None and options.batch_size > options.dataset_size:
        _check.fail("--batch-size", options.batch_size, f"to be at most --dataset-size {options.dataset_size}")
    require_place(options.save)


def _text(found: Comparison, options: argparse.Namespace) -> str:
    question = found.question
    budget = f"epsilon {at_most(question.epsilon, 6)}, delta {at_most(question.delta, 6)}"
    rows = [("plan", "noise", "rmse", "error", "state", "work")]
    for place, one in enumerate(found, 1):
        state = f"{one.state}/param" if one.state_bytes is None else size(one.state_bytes)
        cells = (f"{one.noise_multiplier:.4g}", f"{one.rmse:.4g}", f"x{one.relative:.3f}", state, f"{one.work:.4g}")
        rows.append((f"{place}. {one.name}", *cells))
    lines = [wrapped(f"{budget}, {question.dataset_size} records, batches of {question.size}"), "", table(rows), ""]
    lines += [wrapped("noise: multiplier of the clip norm; rmse: of the optimizer's sums; work: rows of noise per step."), ""]
    lines += [wrapped(f"{place}. {one.name}: {one.reason}") for place, one in enumerate(found, 1)]
    lines += ["", "Not ranked:"] if found.dropped else []
    lines += [wrapped(f"- {dropped.name}: {dropped.reason}") for dropped in found.dropped]
    if options.save:
        train = f"hushgrad train RECIPE --plan {shlex.quote(options.save)} --out DIR"
        lines += ["", f"The best plan is in {options.save}. Train with it:\n  {train}"]
    return "\n".join(lines)


def _save(path: str, plan: dict[str, Any]) -> None:
    import json

    from hushgrad.release.atomic import written

    written(path, json.dumps(plan, indent=2) + "\n")


def _bytes(text: str) -> float:
    """A number of bytes, with a unit or without."""
    body = text.strip().lower().removesuffix("b")
    digits = body.rstrip("kmgi")
    try:
        value = float(digits) * _UNITS.get(body[len(digits) :], 0 if body != digits else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value == 0 and float(digits or 1) != 0):
        raise argparse.ArgumentTypeError(f"expected bytes such as 1000000, 500M or 2Gi, got {text!r}")
    return value

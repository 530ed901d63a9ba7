"""``hushgrad crosscheck``: the epsilons of other libraries for the same run, next to the certified interval."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hushgrad._printed import at_least, at_most
from hushgrad.cli._parser import Parser, say, table
from hushgrad.cli._question import add_description, add_question, event_from
from hushgrad.cli._waiting import waiting

if TYPE_CHECKING:
    from hushgrad.events import Event

_RELATIONS = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE", "zero_out": "REPLACE_SPECIAL"}
_BELOW = 1e-3  # relative; a claim by so much below the certified lower end cannot be true


def _parser() -> Parser:
    parser = Parser(
        "crosscheck",
        "What dp-accounting and Opacus, where they are installed, say about the same run, beside the certified interval.",
        example="hushgrad crosscheck --noise-multiplier 1.1 --rate 0.01 --steps 1000 --delta 1e-5",
    )
    add_question(parser, accountants=False)
    add_description(parser)
    return parser


def run(words: list[str]) -> int:
    """Ask all libraries; the exit code is 1 if a claim lies below the certified interval."""
    options = _parser().parse(words)
    event = event_from(options)
    with waiting("Asking every accountant"):
        ours = _timed(lambda: _certified(event, options.delta, options.relation))
        answers = [{"accountant": "hushgrad pld", **ours}]
        for name, peer in _PEERS.items():
            answers.append({"accountant": name, **_timed(partial(_asked, peer, event, options))})
    for answer in answers[1:]:
        if "epsilon" in answer and "lower" in ours:
            answer["verdict"] = _verdict(answer["epsilon"], ours["lower"], ours["epsilon"])
    question = f"{event}, delta = {at_most(options.delta, 6)}, {options.relation}"
    content = {"event": event.to_json(), "delta": options.delta, "relation": options.relation, "answers": answers}
    say(options, content, question, table([("accountant", "epsilon", "seconds", ""), *map(_row, answers)]))
    return int(any(answer.get("verdict", "").startswith("below") for answer in answers))


def _asked(peer: Callable[..., float], event: Event, options: argparse.Namespace) -> dict[str, Any]:
    return {"epsilon": peer(event, options.delta, options.relation)}


def _verdict(claimed: float, lower: float, upper: float) -> str:
    if max(claimed, 0.0) < lower * (1 - _BELOW):  # below 0 is what a formula says where 0 suffices
        return f"below the truth: at least {at_least(lower, 6)} is needed"
    if claimed <= upper * (1 + _BELOW):
        return "inside the interval"
    return f"{100 * (claimed / upper - 1):.1f} % above" if upper > 0 else "above: 0 suffices"


def _row(answer: dict[str, Any]) -> tuple[str, str, str, str]:
    if "refused" in answer:
        return (answer["accountant"], "-", "", answer["refused"])
    note = f"at least {at_least(answer['lower'], 6)}" if "lower" in answer else answer.get("verdict", "")
    return (answer["accountant"], at_most(answer["epsilon"], 6), f"{answer['seconds']:.2f}", note)


def _timed(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer with its time, or the reason why there is none: another library may fail in any way."""
    start = time.perf_counter()
    try:
        return {**ask(), "seconds": time.perf_counter() - start}
    except ImportError as error:
        return {"refused": f"not installed ({error.name})"}
    except Exception as error:  # noqa: BLE001
        return {"refused": " ".join(str(error).split())[:160] or type(error).__name__}


def _certified(event: Event, delta: float, relation: str) -> dict[str, Any]:
    from hushgrad.accounting import epsilon_interval

    lower, upper = epsilon_interval(event, delta=delta, relation=relation)
    return {"lower": lower, "epsilon": upper}


def _dp_accounting(kind: str, event: Event, delta: float, relation: str) -> float:
    import dp_accounting as dp

    from hushgrad.errors import ArgumentError
    from hushgrad.events import to_dp_accounting

    if kind == "rdp" and relation == "replace_one":
        raise ArgumentError(
            "Another question: its noise multiplier is for the distance of a replacement, ours for one contribution."
        )
    between = getattr(dp.NeighboringRelation, _RELATIONS[relation])
    if kind == "pld":
        from dp_accounting.pld import PLDAccountant as accountant
    else:
        from dp_accounting.rdp import RdpAccountant as accountant
    return float(accountant(neighboring_relation=between).compose(to_dp_accounting(event)).get_epsilon(delta))


def _opacus(kind: str, event: Event, delta: float, relation: str) -> float:
    from opacus import accountants

    accountant = getattr(accountants, kind)()
    accountant.history = _history(event, relation)
    return float(accountant.get_epsilon(delta=delta))


def _history(event: Event, relation: str) -> list[tuple[float, float, int]]:
    """The run as Opacus counts it: Gaussian noise on Poisson samples, add/remove."""
    from hushgrad.accounting.base import count_leaves
    from hushgrad.errors import ArgumentError
    from hushgrad.events import Gaussian, Poisson, Sampled

    steps: dict[Event, int] = {}
    count_leaves(event, 1, steps)
    history = []
    for step, times in steps.items():
        rate, noise = (step.how.rate, step.of) if isinstance(step, Sampled) and isinstance(step.how, Poisson) else (1.0, step)
        if not isinstance(noise, Gaussian) or relation != "add_remove":
            raise ArgumentError("Opacus counts Gaussian noise on Poisson samples under add/remove only.")
        history.append((noise.noise_multiplier, rate, times))
    return history


_PEERS: dict[str, Callable[[Event, float, str], float]] = {
    "dp-accounting PLD": partial(_dp_accounting, "pld"),
    "dp-accounting RDP": partial(_dp_accounting, "rdp"),
    "Opacus PRV": partial(_opacus, "PRVAccountant"),
    "Opacus RDP": partial(_opacus, "RDPAccountant"),
}

"""``hushgrad ledger``: budgets of data sets, and who spent what of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad import _check
from hushgrad.cli._parser import Parser, UsageError, ask, print_json, suggestion, table, whole
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.budget import Ledger, Reservation, Status
    from hushgrad.events import Event

__all__ = ["run"]

_EXCEEDED = _UNVERIFIED = 3


def run(words: list[str]) -> int:
    """One action of the ledger; see ``hushgrad ledger --help``."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] not in _ACTIONS:
        raise UsageError(f"hushgrad ledger has no action {words[0]}.{suggestion(words[0], _ACTIONS)} Try hushgrad ledger --help.")
    about, example, add_options, act = _ACTIONS[words[0]]
    parser = Parser(f"ledger {words[0]}", about, example=f"hushgrad ledger {words[0]} {example}")
    parser.add_argument("ledger", metavar="LEDGER", help="a path (SQLite) or postgresql://user@host/name")
    add_options(parser)
    options = parser.parse(words[1:])
    from hushgrad.budget import BrokenChain
    from hushgrad.errors import BudgetExceeded

    try:
        return act(options)
    except (BudgetExceeded, BrokenChain) as error:
        print(f"hushgrad: {error}", file=sys.stderr)
        return _EXCEEDED


def _overview() -> str:
    lines = [f"  {name:8} {about.splitlines()[0]}" for name, (about, *_) in _ACTIONS.items()]
    return "\n".join(
        [
            "usage: hushgrad ledger ACTION LEDGER [options]",
            "",
            "Budgets of data sets: reserve before a run, commit after it, verify that no row was changed.",
            "",
            "actions:",
            *lines,
            "",
            "Each has --help and --json. Exit codes: 2 a mistake, 3 the budget would be exceeded or the ledger does not verify.",
            "",
            "example:",
            "  hushgrad ledger init budget.db",
            "  hushgrad ledger add budget.db patients --epsilon 3 --delta 1e-6",
            "  hushgrad train recipe.toml --out runs/one --ledger budget.db --dataset patients",
            "  hushgrad ledger status budget.db",
        ]
    )


# The options of each action ---------------------------------------------------------------------------------------------


def _no_options(parser: Parser) -> None:
    """The ledger alone."""


def _add_options(parser: Parser) -> None:
    parser.add_argument("dataset", metavar="NAME")
    parser.add_argument("--epsilon", type=float, required=True, help="of everything that is ever released about it")
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument("--unit", default="example", help="what is protected: example, user, ...")
    parser.add_argument("--relation", default="add_remove", help="add_remove, replace_one or zero_out")
    parser.add_argument(
        "--composition",
        default="adaptive",
        help="adaptive, rdp, zcdp or gdp: runs may be planned after looking; pld: tight, for runs fixed beforehand",
    )
    parser.add_argument("--records", type=whole, metavar="N", help="public number of records, for the policy's rule about delta")
    parser.add_argument("--policy", metavar="FILE", help="a policy that must allow it (default: the variable HUSHGRAD_POLICY)")
    parser.add_argument(
        "--plan", metavar="JSON", help="the event of all that is meant to happen: then adaptivity is free (or @FILE)"
    )


def _reserve_options(parser: Parser) -> None:
    parser.add_argument("dataset", metavar="NAME")
    _event_option(parser)
    parser.add_argument("--run", default="", metavar="NAME", help="what to call the run")
    parser.add_argument("--hold", action="store_true", help="may be cancelled until hushgrad ledger begin")


def _event_option(parser: Parser) -> None:
    parser.add_argument(
        "--event", metavar="JSON", help="the event's JSON, or @FILE with it (an event, a plan, or the ledger.json of a run)"
    )
    parser.add_argument("--noise-multiplier", type=float, help="with --rate and --steps: DP-SGD")
    parser.add_argument("--rate", type=float, default=1.0, help="sampling rate")
    parser.add_argument("--steps", type=whole, default=1)


def _commit_options(parser: Parser) -> None:
    _reservation_option(parser)
    _event_option(parser)
    parser.add_argument("--overrun", action="store_true", help="more happened than was reserved, and you know")
    parser.add_argument("--note", default="")


def _reservation_option(parser: Parser) -> None:
    parser.add_argument("reservation", metavar="ID", help="the reservation's id")


def _settle_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of the run")


def _approve_options(parser: Parser) -> None:
    _reservation_option(parser)
    parser.add_argument("--by", required=True, metavar="NAME", help="who approves")


def _dataset_option(parser: Parser) -> None:
    parser.add_argument("dataset", metavar="NAME", nargs="?", help="one data set; all by default")


def _verify_options(parser: Parser) -> None:
    parser.add_argument("--head", metavar="HASH", help="a head that was noted before: finds a cut-off or rewritten chain")
    parser.add_argument("--noted", metavar="FILE", help="the same with the last head that hushgrad ledger head --watch noted")


def _head_options(parser: Parser) -> None:
    parser.add_argument("--watch", metavar="FILE", help="append the head to FILE whenever it moves, until Ctrl-C")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="between two looks")
    parser.add_argument("--once", action="store_true", help="with --watch: one look, for a timer of your own")


# What each action does --------------------------------------------------------------------------------------------------


def _opened(options: argparse.Namespace) -> Ledger:
    from hushgrad.budget import Ledger

    return Ledger(options.ledger)


def _init(options: argparse.Namespace) -> int:
    from hushgrad.budget import Ledger

    ledger = Ledger.create(options.ledger)
    _say(options, {"ledger": options.ledger, "head": ledger.head}, f"Ledger ready: {options.ledger}\nHead: {ledger.head}")
    return 0


def _add(options: argparse.Namespace) -> int:
    names = ("epsilon", "delta", "unit", "relation", "composition")
    plan = None if options.plan is None else _event_of(options.plan)
    from hushgrad.budget import read_policy

    ask(questions(options.epsilon, options.delta, records=options.records))
    more = {"plan": plan, "policy": read_policy(options.policy), "records": options.records}
    dataset = _opened(options).add(options.dataset, **more, **{name: vars(options)[name] for name in names})
    _say(options, dataset.to_json(), str(dataset))
    return 0


def _reserve(options: argparse.Namespace) -> int:
    reservation = _opened(options).reserve(options.dataset, _event(options), run=options.run, hold=options.hold)
    _say_reservation(options, reservation)
    return 0


def _begin(options: argparse.Namespace) -> int:
    _say_reservation(options, _opened(options).begin(options.reservation))
    return 0


def _commit(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    event = _event(options) if _names_an_event(options) else ledger.reservation(options.reservation).reserved
    _say_reservation(options, ledger.commit(options.reservation, event, overrun=options.overrun, note=options.note))
    return 0


def _settle(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    ledger = _opened(options)
    identifier = ledger.of_folder(folder)
    if not identifier:
        raise UsageError(f"{options.run} holds no reservation.json: it was not made with --ledger.")
    reservation = ledger.settle(identifier, folder)
    why = next((row.note for row in reversed(ledger.entries()) if row.reservation == identifier), "")
    _say_reservation(options, reservation, f"Why: {why or 'its run had not begun'}.")
    return 0


def _approve(options: argparse.Namespace) -> int:
    approved = _opened(options).approve(options.reservation, by=options.by)
    _say_reservation(options, approved, f"Approved by {', '.join(approved.approved)}.")
    return 0


def _cancel(options: argparse.Namespace) -> int:
    _say_reservation(options, _opened(options).cancel(options.reservation))
    return 0


def _status(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    names = [options.dataset] if options.dataset else [dataset.name for dataset in ledger.datasets()]
    found = [ledger.status(name) for name in names]
    content = {"datasets": [_status_json(status) for status in found], "head": ledger.head}
    _say(options, content, "\n".join([*map(str, found), f"Head: {ledger.head}"]))
    return 0


def _status_json(status: Status) -> dict[str, Any]:
    derived = {"left": status.left, "used": status.used, "exceeded": status.exceeded, "open": len(status.open)}
    return {**status.to_json(), "epsilon": status.epsilon, **derived}


def _list(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    found = ledger.reservations(options.dataset)
    rows = [
        ("id", "data set", "state", "run", "charged for"),
        *((r.id, r.dataset, _state(r), r.run, str(r.charged)) for r in found),
    ]
    _say(options, {"reservations": [r.to_json() for r in found]}, table(rows) if found else "No runs yet.")
    return 0


def _state(reservation: Reservation) -> str:
    return f"{reservation.state}, OVERRUN" if reservation.overrun else reservation.state


def _head(options: argparse.Namespace) -> int:
    """Print the head, or keep it elsewhere; a chain that has lost what was noted ends the watch as a failed verification."""
    from hushgrad.budget.watch import watched

    ledger = _opened(options)
    if options.watch is None:
        _say(options, {"ledger": options.ledger, "head": ledger.head}, ledger.head)
        return 0
    told, ok = None, True
    try:
        for verdict in watched(ledger, options.watch, every=options.every):
            ok = verdict.ok
            if not ok or verdict.head != told:
                _say(options, verdict.to_json(), str(verdict))
                sys.stdout.flush()
            told = verdict.head
            if options.once:
                break
    except KeyboardInterrupt:
        print("Ended.", file=sys.stderr)
    return 0 if ok else _UNVERIFIED


def _verify(options: argparse.Namespace) -> int:
    from hushgrad.budget.watch import noted_heads

    if options.head is not None and options.noted is not None:
        raise UsageError("--head and --noted say the same thing: give one of them.")
    head = options.head if options.noted is None else next(reversed(noted_heads(options.noted)), "")
    if head == "":
        raise UsageError(f"{options.noted} holds no noted head.")
    verdict = _opened(options).verify(head=head)
    _say(options, verdict.to_json(), str(verdict))
    return 0 if verdict.ok else _UNVERIFIED


def _export(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    rows = [{**row.to_json(), "hash": row.hash} for row in ledger.entries()]
    if options.json:
        print_json({"rows": rows, "head": ledger.head})
    else:
        print("\n".join(json.dumps(row, sort_keys=True) for row in rows))
    return 0


# Words ------------------------------------------------------------------------------------------------------------------


def _names_an_event(options: argparse.Namespace) -> bool:
    return options.event is not None or options.noise_multiplier is not None


def _event(options: argparse.Namespace) -> Event:
    from hushgrad.events import Gaussian

    if (options.event is None) == (options.noise_multiplier is None):
        raise UsageError("Say what the run does: either --event, or --noise-multiplier with --rate and --steps.")
    if options.event is None:
        return Gaussian(options.noise_multiplier).sampled(rate=options.rate) * options.steps
    return _event_of(options.event)


def _event_of(word: str) -> Event:
    from hushgrad.events import Event

    content = _json(word)
    if isinstance(content, dict) and "ledger" in content:  # the ledger.json of a run: what it did
        from hushgrad.guarantee import Ledger as RunLedger

        return RunLedger.from_json(content).event()
    if isinstance(content, dict) and content.get("plan") == "Plan":  # what hushgrad plan --save wrote, or a run's plan.json
        from hushgrad.train.plan import Plan

        return Plan.from_json(content).event()
    return Event.from_json(content)


def _json(word: str) -> Any:
    try:
        return _check.parsed(Path(word[1:]).read_text(encoding="utf-8") if word.startswith("@") else word)
    except (OSError, ValueError) as error:
        raise UsageError(f"--event must be JSON, or @FILE with JSON in it: {error}.") from None


def _say(options: argparse.Namespace, content: dict[str, Any], text: str) -> None:
    if options.json:
        print_json(content)
    else:
        print(text)


def _say_reservation(options: argparse.Namespace, reservation: Reservation, *more: str) -> None:
    lines = [f"Reservation {reservation.id}: run {reservation.run!r} on {reservation.dataset!r} is {_state(reservation)}."]
    lines.append(f"Charged for {reservation.charged}.")
    _say(options, reservation.to_json(), "\n".join([*lines, *more]))


_Action = tuple[str, str, Callable[[Parser], None], Callable[[argparse.Namespace], int]]
_ACTIONS: dict[str, _Action] = {
    "init": ("Make an empty ledger, or open the one that is there.", "budget.db", _no_options, _init),
    "add": (
        "Add a data set with its budget; it never changes.",
        "budget.db patients --epsilon 3 --delta 1e-6",
        _add_options,
        _add,
    ),
    "reserve": (
        "Reserve room for a run before it begins; refused (exit code 3) where there is none.",
        "budget.db patients --noise-multiplier 1.1 --rate 0.01 --steps 1000 --run first",
        _reserve_options,
        _reserve,
    ),
    "begin": ("The run of a held reservation begins.", "budget.db 0123456789abcdef", _reservation_option, _begin),
    "commit": (
        "Say what a run did. Without an event: exactly what it had reserved.",
        "budget.db 0123456789abcdef --event @runs/one/ledger.json",
        _commit_options,
        _commit,
    ),
    "settle": (
        "Close the reservation of a killed run by its folder.\n"
        "It is charged for the steps up to the checkpoint that it would have saved next, and cannot go on: its key is erased.",
        "budget.db runs/one",
        _settle_options,
        _settle,
    ),
    "approve": (
        "Approve a run; a policy may ask for it before hushgrad release.",
        "budget.db 0123456789abcdef --by 'A. Officer'",
        _approve_options,
        _approve,
    ),
    "cancel": (
        "Give back a held reservation whose run has not begun.",
        "budget.db 0123456789abcdef",
        _reservation_option,
        _cancel,
    ),
    "status": ("How much of each budget is spent, open reservations included.", "budget.db patients", _dataset_option, _status),
    "list": ("All runs and what each is charged for.", "budget.db patients", _dataset_option, _list),
    "verify": (
        "Check every row and the chain.\nWithout --head, rows that were cut off at the end and a rewritten chain are not found.",
        "budget.db --head HASH",
        _verify_options,
        _verify,
    ),
    "head": (
        "The hash of the last row; --watch keeps it elsewhere.\n"
        "A ledger that was put back to an earlier copy of itself is found by a noted head only, so let FILE be out of reach of "
        "whoever can write the ledger.",
        "budget.db --watch /elsewhere/heads.txt",
        _head_options,
        _head,
    ),
    "export": ("All rows, one JSON object per line.", "budget.db > ledger.jsonl", _no_options, _export),
}

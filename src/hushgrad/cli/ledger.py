"""``hushgrad ledger``: budgets of data sets, and who spent how much of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hushgrad.cli._parser import Parser, UsageError, ask, say, suggestion, table, whole
from hushgrad.cli._question import described
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.budget import Ledger, Reservation, Status
    from hushgrad.events import Event

_REFUSED = 3  # the budget would be exceeded, or the ledger does not verify


def run(words: list[str]) -> int:
    """One action of the ledger; see ``hushgrad ledger --help``."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] not in _ACTIONS:
        raise UsageError(f"hushgrad ledger has no action {words[0]}.{suggestion(words[0], _ACTIONS)} Try hushgrad ledger --help.")
    options = _parser(words[0]).parse(words[1:])
    from hushgrad.budget import BrokenChain
    from hushgrad.errors import BudgetExceeded

    try:
        return _ACTIONS[words[0]].answer(options)
    except (BudgetExceeded, BrokenChain) as error:
        print(f"hushgrad: {error}", file=sys.stderr)
        return _REFUSED


def _parser(name: str) -> Parser:
    action = _ACTIONS[name]
    parser = Parser(f"ledger {name}", action.about, example=f"hushgrad ledger {name} {action.example}")
    parser.takes("ledger LEDGER", "a path (SQLite) or postgresql://user@host/name")
    for add in action.options:
        add(parser)
    return parser


def _overview() -> str:
    lines = [f"  {name:8} {action.about.splitlines()[0]}" for name, action in _ACTIONS.items()]
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


class _Action(NamedTuple):
    about: str
    example: str
    options: tuple[Callable[[Parser], None], ...]
    answer: Callable[[argparse.Namespace], int]


_ACTIONS: dict[str, _Action] = {}


def _action(name: str, about: str, example: str, *options: Callable[[Parser], None]) -> Callable[..., Any]:
    """Register the function that does ``hushgrad ledger NAME``: what its help says, and the options that it takes."""

    def register(answer: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
        _ACTIONS[name] = _Action(about, example, options, answer)
        return answer

    return register


def _takes(words: str, about: str | None = None, **how: Any) -> Callable[[Parser], None]:
    return lambda parser: parser.takes(words, about, **how)


def _flag(name: str, about: str) -> Callable[[Parser], None]:
    return lambda parser: parser.flag(name, about)


_DATASET = _takes("dataset NAME")
_ANY_DATASET = _takes("dataset NAME", "one data set; all by default", nargs="?")
_RESERVATION = _takes("reservation ID", "the reservation's id")
_EVENT = (
    _takes("--event JSON", "the event's JSON, or @FILE with it (an event, a plan, or the ledger.json of a run)"),
    _takes("--noise-multiplier", "with --rate and --steps: DP-SGD", type=float),
    _takes("--rate", "sampling rate", type=float, default=1.0),
    _takes("--steps", type=whole, default=1),
)


def _opened(options: argparse.Namespace) -> Ledger:
    from hushgrad.budget import Ledger

    return Ledger(options.ledger)


# The actions, in the order of the overview ------------------------------------------------------------------------------


@_action("init", "Make an empty ledger, or open the one that is there.", "budget.db")
def _init(options: argparse.Namespace) -> int:
    from hushgrad.budget import Ledger

    ledger = Ledger.create(options.ledger)
    content = {"ledger": options.ledger, "head": ledger.head}
    return say(options, content, f"Ledger ready: {options.ledger}", f"Head: {ledger.head}")


@_action(
    "add",
    "Add a data set with its budget; it never changes.",
    "budget.db patients --epsilon 3 --delta 1e-6",
    _DATASET,
    _takes("--epsilon", "of everything that is ever released about it", type=float, required=True),
    _takes("--delta", type=float, required=True),
    _takes("--unit", "what is protected: example, user, ...", default="example"),
    _takes("--relation", "add_remove, replace_one or zero_out", default="add_remove"),
    _takes(
        "--composition",
        "adaptive, rdp, zcdp or gdp: runs may be planned after looking; pld: tight, for runs fixed beforehand",
        default="adaptive",
    ),
    _takes("--records N", "public number of records, for the policy's rule about delta", type=whole),
    _takes("--policy FILE", "a policy that must allow it (default: the variable HUSHGRAD_POLICY)"),
    _takes("--plan JSON", "the event of all that is meant to happen: then adaptivity is free (or @FILE)"),
)
def _add(options: argparse.Namespace) -> int:
    plan = None if options.plan is None else described(options.plan)
    from hushgrad.budget import read_policy

    ask(questions(options.epsilon, options.delta, records=options.records))
    budget = {name: vars(options)[name] for name in ("epsilon", "delta", "unit", "relation", "composition", "records")}
    dataset = _opened(options).add(options.dataset, plan=plan, policy=read_policy(options.policy), **budget)
    return say(options, dataset.to_json(), dataset)


@_action(
    "reserve",
    "Reserve room for a run before it begins; refused (exit code 3) where there is none.",
    "budget.db patients --noise-multiplier 1.1 --rate 0.01 --steps 1000 --run first",
    _DATASET,
    *_EVENT,
    _takes("--run NAME", "what to call the run", default=""),
    _flag("--hold", "may be cancelled until hushgrad ledger begin"),
)
def _reserve(options: argparse.Namespace) -> int:
    reservation = _opened(options).reserve(options.dataset, _event(options), run=options.run, hold=options.hold)
    return _say_reservation(options, reservation)


@_action("begin", "The run of a held reservation begins.", "budget.db 0123456789abcdef", _RESERVATION)
def _begin(options: argparse.Namespace) -> int:
    return _say_reservation(options, _opened(options).begin(options.reservation))


@_action(
    "commit",
    "Say what a run did. Without an event: exactly what it had reserved.",
    "budget.db 0123456789abcdef --event @runs/one/ledger.json",
    _RESERVATION,
    *_EVENT,
    _flag("--overrun", "more happened than was reserved, and you know"),
    _takes("--note", default=""),
)
def _commit(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    named = options.event is not None or options.noise_multiplier is not None
    event = _event(options) if named else ledger.reservation(options.reservation).reserved
    return _say_reservation(options, ledger.commit(options.reservation, event, overrun=options.overrun, note=options.note))


@_action(
    "settle",
    "Close the reservation of a killed run by its folder.\n"
    "It is charged for the steps up to the checkpoint that it would have saved next, and cannot go on: its key is erased.",
    "budget.db runs/one",
    _takes("run RUN", "the folder of the run"),
)
def _settle(options: argparse.Namespace) -> int:
    folder, ledger = Path(options.run), _opened(options)
    identifier = ledger.of_folder(folder)
    if not identifier:
        raise UsageError(f"{options.run} holds no reservation.json: it was not made with --ledger.")
    reservation = ledger.settle(identifier, folder)
    why = next((row.note for row in reversed(ledger.entries()) if row.reservation == identifier), "")
    return _say_reservation(options, reservation, f"Why: {why or 'its run had not begun'}.")


@_action(
    "approve",
    "Approve a run; a policy may ask for it before hushgrad release.",
    "budget.db 0123456789abcdef --by 'A. Officer'",
    _RESERVATION,
    _takes("--by NAME", "who approves", required=True),
)
def _approve(options: argparse.Namespace) -> int:
    approved = _opened(options).approve(options.reservation, by=options.by)
    return _say_reservation(options, approved, f"Approved by {', '.join(approved.approved)}.")


@_action("cancel", "Give back a held reservation whose run has not begun.", "budget.db 0123456789abcdef", _RESERVATION)
def _cancel(options: argparse.Namespace) -> int:
    return _say_reservation(options, _opened(options).cancel(options.reservation))


@_action("status", "How much of each budget is spent, open reservations included.", "budget.db patients", _ANY_DATASET)
def _status(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    names = [options.dataset] if options.dataset else [dataset.name for dataset in ledger.datasets()]
    found = [ledger.status(name) for name in names]
    content = {"datasets": [_status_json(status) for status in found], "head": ledger.head}
    return say(options, content, *found, f"Head: {ledger.head}")


def _status_json(status: Status) -> dict[str, Any]:
    derived = {"left": status.left, "used": status.used, "exceeded": status.exceeded, "open": len(status.open)}
    return {**status.to_json(), "epsilon": status.epsilon, **derived}


@_action("list", "All runs and what each is charged for.", "budget.db patients", _ANY_DATASET)
def _list(options: argparse.Namespace) -> int:
    found = _opened(options).reservations(options.dataset)
    rows = [("id", "data set", "state", "run", "charged for")]
    rows += [(r.id, r.dataset, _state(r), r.run, str(r.charged)) for r in found]
    return say(options, {"reservations": [r.to_json() for r in found]}, table(rows) if found else "No runs yet.")


@_action(
    "verify",
    "Check every row and the chain.\nWithout --head, rows that were cut off at the end and a rewritten chain are not found.",
    "budget.db --head HASH",
    _takes("--head HASH", "a head that was noted before: finds a cut-off or rewritten chain"),
    _takes("--noted FILE", "the same with the last head that hushgrad ledger head --watch noted"),
)
def _verify(options: argparse.Namespace) -> int:
    from hushgrad.budget.watch import noted_heads

    if options.head is not None and options.noted is not None:
        raise UsageError("--head and --noted say the same thing: give one of them.")
    head = options.head if options.noted is None else next(reversed(noted_heads(options.noted)), "")
    if head == "":
        raise UsageError(f"{options.noted} holds no noted head.")
    verdict = _opened(options).verify(head=head)
    say(options, verdict.to_json(), verdict)
    return 0 if verdict.ok else _REFUSED


@_action(
    "head",
    "The hash of the last row; --watch keeps it elsewhere.\n"
    "A ledger that was put back to an earlier copy of itself is found by a noted head only, so let FILE be out of reach of "
    "whoever can write the ledger.",
    "budget.db --watch /elsewhere/heads.txt",
    _takes("--watch FILE", "append the head to FILE whenever it moves, until Ctrl-C"),
    _takes("--every SECONDS", "between two looks", type=float, default=10.0),
    _flag("--once", "with --watch: one look, for a timer of your own"),
)
def _head(options: argparse.Namespace) -> int:
    """If the chain has lost a recorded row, the watch ends like a failed verification."""
    from hushgrad.budget.watch import watched

    ledger = _opened(options)
    if options.watch is None:
        return say(options, {"ledger": options.ledger, "head": ledger.head}, ledger.head)
    told, ok = None, True
    try:
        for verdict in watched(ledger, options.watch, every=options.every):
            ok = verdict.ok
            if not ok or verdict.head != told:
                say(options, verdict.to_json(), verdict)
                sys.stdout.flush()
            told = verdict.head
            if options.once:
                break
    except KeyboardInterrupt:
        print("Ended.", file=sys.stderr)
    return 0 if ok else _REFUSED


@_action("export", "All rows, one JSON object per line.", "budget.db > ledger.jsonl")
def _export(options: argparse.Namespace) -> int:
    ledger = _opened(options)
    rows = [{**row.to_json(), "hash": row.hash} for row in ledger.entries()]
    return say(options, {"rows": rows, "head": ledger.head}, "\n".join(json.dumps(row, sort_keys=True) for row in rows))


# What they share --------------------------------------------------------------------------------------------------------


def _event(options: argparse.Namespace) -> Event:
    from hushgrad.events import Gaussian

    if (options.event is None) == (options.noise_multiplier is None):
        raise UsageError("Say what the run does: either --event, or --noise-multiplier with --rate and --steps.")
    if options.event is None:
        return Gaussian(options.noise_multiplier).sampled(rate=options.rate) * options.steps
    return described(options.event)


def _state(reservation: Reservation) -> str:
    return f"{reservation.state}, OVERRUN" if reservation.overrun else reservation.state


def _say_reservation(options: argparse.Namespace, reservation: Reservation, *more: str) -> int:
    state = f"Reservation {reservation.id}: run {reservation.run!r} on {reservation.dataset!r} is {_state(reservation)}."
    return say(options, reservation.to_json(), state, f"Charged for {reservation.charged}.", *more)

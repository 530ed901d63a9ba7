"""``hushgrad ledger``: budgets of data sets, and who spent how much of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from hushgrad.cli import ledger_actions as actions
from hushgrad.cli._parser import Parser, UsageError, suggestion, whole

_EXCEEDED = 3


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
        return _ACTIONS[words[0]][-1](options)
    except (BudgetExceeded, BrokenChain) as error:
        print(f"hushgrad: {error}", file=sys.stderr)
        return _EXCEEDED


def _parser(action: str) -> Parser:
    about, example, add_options, _ = _ACTIONS[action]
    parser = Parser(f"ledger {action}", about, example=f"hushgrad ledger {action} {example}")
    parser.takes("ledger LEDGER", "a path (SQLite) or postgresql://user@host/name")
    add_options(parser)
    return parser


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
    parser.takes("dataset NAME")
    parser.takes("--epsilon", "of everything that is ever released about it", type=float, required=True)
    parser.takes("--delta", type=float, required=True)
    parser.takes("--unit", "what is protected: example, user, ...", default="example")
    parser.takes("--relation", "add_remove, replace_one or zero_out", default="add_remove")
    parser.takes(
        "--composition",
        "adaptive, rdp, zcdp or gdp: runs may be planned after looking; pld: tight, for runs fixed beforehand",
        default="adaptive",
    )
    parser.takes("--records N", "public number of records, for the policy's rule about delta", type=whole)
    parser.takes("--policy FILE", "a policy that must allow it (default: the variable HUSHGRAD_POLICY)")
    parser.takes("--plan JSON", "the event of all that is meant to happen: then adaptivity is free (or @FILE)")


def _reserve_options(parser: Parser) -> None:
    parser.takes("dataset NAME")
    _event_option(parser)
    parser.takes("--run NAME", "what to call the run", default="")
    parser.flag("--hold", "may be cancelled until hushgrad ledger begin")


def _event_option(parser: Parser) -> None:
    parser.takes("--event JSON", "the event's JSON, or @FILE with it (an event, a plan, or the ledger.json of a run)")
    parser.takes("--noise-multiplier", "with --rate and --steps: DP-SGD", type=float)
    parser.takes("--rate", "sampling rate", type=float, default=1.0)
    parser.takes("--steps", type=whole, default=1)


def _commit_options(parser: Parser) -> None:
    _reservation_option(parser)
    _event_option(parser)
    parser.flag("--overrun", "more happened than was reserved, and you know")
    parser.takes("--note", default="")


def _reservation_option(parser: Parser) -> None:
    parser.takes("reservation ID", "the reservation's id")


def _settle_options(parser: Parser) -> None:
    parser.takes("run RUN", "the folder of the run")


def _approve_options(parser: Parser) -> None:
    _reservation_option(parser)
    parser.takes("--by NAME", "who approves", required=True)


def _dataset_option(parser: Parser) -> None:
    parser.takes("dataset NAME", "one data set; all by default", nargs="?")


def _verify_options(parser: Parser) -> None:
    parser.takes("--head HASH", "a head that was noted before: finds a cut-off or rewritten chain")
    parser.takes("--noted FILE", "the same with the last head that hushgrad ledger head --watch noted")


def _head_options(parser: Parser) -> None:
    parser.takes("--watch FILE", "append the head to FILE whenever it moves, until Ctrl-C")
    parser.takes("--every SECONDS", "between two looks", type=float, default=10.0)
    parser.flag("--once", "with --watch: one look, for a timer of your own")


_Action = tuple[str, str, Callable[[Parser], None], Callable[[argparse.Namespace], int]]
_ACTIONS: dict[str, _Action] = {
    "init": ("Make an empty ledger, or open the one that is there.", "budget.db", _no_options, actions.init),
    "add": (
        "Add a data set with its budget; it never changes.",
        "budget.db patients --epsilon 3 --delta 1e-6",
        _add_options,
        actions.add,
    ),
    "reserve": (
        "Reserve room for a run before it begins; refused (exit code 3) where there is none.",
        "budget.db patients --noise-multiplier 1.1 --rate 0.01 --steps 1000 --run first",
        _reserve_options,
        actions.reserve,
    ),
    "begin": ("The run of a held reservation begins.", "budget.db 0123456789abcdef", _reservation_option, actions.begin),
    "commit": (
        "Say what a run did. Without an event: exactly what it had reserved.",
        "budget.db 0123456789abcdef --event @runs/one/ledger.json",
        _commit_options,
        actions.commit,
    ),
    "settle": (
        "Close the reservation of a killed run by its folder.\n"
        "It is charged for the steps up to the checkpoint that it would have saved next, and cannot go on: its key is erased.",
        "budget.db runs/one",
        _settle_options,
        actions.settle,
    ),
    "approve": (
        "Approve a run; a policy may ask for it before hushgrad release.",
        "budget.db 0123456789abcdef --by 'A. Officer'",
        _approve_options,
        actions.approve,
    ),
    "cancel": (
        "Give back a held reservation whose run has not begun.",
        "budget.db 0123456789abcdef",
        _reservation_option,
        actions.cancel,
    ),
    "status": (
        "How much of each budget is spent, open reservations included.",
        "budget.db patients",
        _dataset_option,
        actions.status,
    ),
    "list": ("All runs and what each is charged for.", "budget.db patients", _dataset_option, actions.list_),
    "verify": (
        "Check every row and the chain.\nWithout --head, rows that were cut off at the end and a rewritten chain are not found.",
        "budget.db --head HASH",
        _verify_options,
        actions.verify,
    ),
    "head": (
        "The hash of the last row; --watch keeps it elsewhere.\n"
        "A ledger that was put back to an earlier copy of itself is found by a noted head only, so let FILE be out of reach of "
        "whoever can write the ledger.",
        "budget.db --watch /elsewhere/heads.txt",
        _head_options,
        actions.head,
    ),
    "export": ("All rows, one JSON object per line.", "budget.db > ledger.jsonl", _no_options, actions.export),
}

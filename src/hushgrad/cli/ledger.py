"""``hushgrad ledger``: budgets of data sets, and who spent what of them."""

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
    parser.add_argument("ledger", metavar="LEDGER", help="a path (SQLite) or postgresql://user@host/name")
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

"""The actions of ``hushgrad ledger``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad.cli._parser import UsageError, ask, say, table
from hushgrad.cli._question import described
from hushgrad.guarantee import questions

if TYPE_CHECKING:
    from hushgrad.budget import Ledger, Reservation, Status
    from hushgrad.events import Event

UNVERIFIED = 3


def _opened(options: argparse.Namespace) -> Ledger:
    from hushgrad.budget import Ledger

    return Ledger(options.ledger)


def init(options: argparse.Namespace) -> int:
    """Make an empty ledger."""
    from hushgrad.budget import Ledger

    ledger = Ledger.create(options.ledger)
    return say(
        options, {"ledger": options.ledger, "head": ledger.head}, f"Ledger ready: {options.ledger}", f"Head: {ledger.head}"
    )


def add(options: argparse.Namespace) -> int:
    """Add a data set with its budget."""
    names = ("epsilon", "delta", "unit", "relation", "composition")
    plan = None if options.plan is None else described(options.plan)
    from hushgrad.budget import read_policy

    ask(questions(options.epsilon, options.delta, records=options.records))
    more = {"plan": plan, "policy": read_policy(options.policy), "records": options.records}
    dataset = _opened(options).add(options.dataset, **more, **{name: vars(options)[name] for name in names})
    return say(options, dataset.to_json(), dataset)


def reserve(options: argparse.Namespace) -> int:
    """Reserve room for a run."""
    reservation = _opened(options).reserve(options.dataset, _event(options), run=options.run, hold=options.hold)
    return _say_reservation(options, reservation)


def begin(options: argparse.Namespace) -> int:
    """Begin a held run."""
    return _say_reservation(options, _opened(options).begin(options.reservation))


def commit(options: argparse.Namespace) -> int:
    """Record what a run did."""
    ledger = _opened(options)
    event = _event(options) if _names_an_event(options) else ledger.reservation(options.reservation).reserved
    return _say_reservation(options, ledger.commit(options.reservation, event, overrun=options.overrun, note=options.note))


def settle(options: argparse.Namespace) -> int:
    """Close a killed run by its folder."""
    folder = Path(options.run)
    ledger = _opened(options)
    identifier = ledger.of_folder(folder)
    if not identifier:
        raise UsageError(f"{options.run} holds no reservation.json: it was not made with --ledger.")
    reservation = ledger.settle(identifier, folder)
    why = next((row.note for row in reversed(ledger.entries()) if row.reservation == identifier), "")
    return _say_reservation(options, reservation, f"Why: {why or 'its run had not begun'}.")


def approve(options: argparse.Namespace) -> int:
    """Approve a run."""
    approved = _opened(options).approve(options.reservation, by=options.by)
    return _say_reservation(options, approved, f"Approved by {', '.join(approved.approved)}.")


def cancel(options: argparse.Namespace) -> int:
    """Cancel the reservation of a run that has not begun."""
    return _say_reservation(options, _opened(options).cancel(options.reservation))


def status(options: argparse.Namespace) -> int:
    """How much of each budget is spent."""
    ledger = _opened(options)
    names = [options.dataset] if options.dataset else [dataset.name for dataset in ledger.datasets()]
    found = [ledger.status(name) for name in names]
    content = {"datasets": [_status_json(status) for status in found], "head": ledger.head}
    return say(options, content, *found, f"Head: {ledger.head}")


def _status_json(status: Status) -> dict[str, Any]:
    derived = {"left": status.left, "used": status.used, "exceeded": status.exceeded, "open": len(status.open)}
    return {**status.to_json(), "epsilon": status.epsilon, **derived}


def list_(options: argparse.Namespace) -> int:
    """All runs."""
    ledger = _opened(options)
    found = ledger.reservations(options.dataset)
    rows = [
        ("id", "data set", "state", "run", "charged for"),
        *((r.id, r.dataset, _state(r), r.run, str(r.charged)) for r in found),
    ]
    return say(options, {"reservations": [r.to_json() for r in found]}, table(rows) if found else "No runs yet.")


def _state(reservation: Reservation) -> str:
    return f"{reservation.state}, OVERRUN" if reservation.overrun else reservation.state


def head(options: argparse.Namespace) -> int:
    """Print the head, or record it elsewhere; if the chain has lost a recorded row, the watch ends like a failed verification."""
    from hushgrad.budget.watch import watched

    ledger = _opened(options)
    if options.watch is None:
        say(options, {"ledger": options.ledger, "head": ledger.head}, ledger.head)
        return 0
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
    return 0 if ok else UNVERIFIED


def verify(options: argparse.Namespace) -> int:
    """Check every row."""
    from hushgrad.budget.watch import noted_heads

    if options.head is not None and options.noted is not None:
        raise UsageError("--head and --noted say the same thing: give one of them.")
    head = options.head if options.noted is None else next(reversed(noted_heads(options.noted)), "")
    if head == "":
        raise UsageError(f"{options.noted} holds no noted head.")
    verdict = _opened(options).verify(head=head)
    say(options, verdict.to_json(), verdict)
    return 0 if verdict.ok else UNVERIFIED


def export(options: argparse.Namespace) -> int:
    """All rows as JSON."""
    ledger = _opened(options)
    rows = [{**row.to_json(), "hash": row.hash} for row in ledger.entries()]
    return say(options, {"rows": rows, "head": ledger.head}, "\n".join(json.dumps(row, sort_keys=True) for row in rows))


def _names_an_event(options: argparse.Namespace) -> bool:
    return options.event is not None or options.noise_multiplier is not None


def _event(options: argparse.Namespace) -> Event:
    from hushgrad.events import Gaussian

    if (options.event is None) == (options.noise_multiplier is None):
        raise UsageError("Say what the run does: either --event, or --noise-multiplier with --rate and --steps.")
    if options.event is None:
        return Gaussian(options.noise_multiplier).sampled(rate=options.rate) * options.steps
    return described(options.event)


def _say_reservation(options: argparse.Namespace, reservation: Reservation, *more: str) -> int:
    state = f"Reservation {reservation.id}: run {reservation.run!r} on {reservation.dataset!r} is {_state(reservation)}."
    return say(options, reservation.to_json(), state, f"Charged for {reservation.charged}.", *more)

"""A session's dealings with the budget ledger: reserve before, begin with the first step, commit after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.budget import Ledger, Reservation
from hushgrad.budget.folder import RESERVATION, SETTLED, reservation_of
from hushgrad.errors import ArgumentError
from hushgrad.events import Event
from hushgrad.recipes.recipe import Recipe
from hushgrad.release.atomic import replacing
from hushgrad.release.owner import Owner
from hushgrad.train.plan import Plan

__all__ = ["Spending", "alone_in"]


@contextmanager
def alone_in(out: Path, *, take_over: bool = False) -> Iterator[Owner]:
    """Own the folder: nobody else runs or settles in it meanwhile, and a run that was settled never goes on.

    Raises:
        ArgumentError: where another process owns the folder, or its run was settled.
    """
    owner = Owner(out, take_over=take_over)
    try:
        if (out / SETTLED).exists():
            _check.fail("--out", str(out), "to hold a run that may go on; this one was settled", "Start a new run elsewhere.")
        yield owner
    finally:
        owner.release()


class Spending:
    """The place of one session in a ledger, or nothing at all where the recipe names none.

    The id of the reservation is in the run folder, as ``reservation.json``, before the first step. A session that is killed
    before it is there leaves a *held* reservation, which has not begun and can be cancelled.
    """

    def __init__(self, recipe: Recipe, plan: Plan, out: Path, *, event: Event | None = None) -> None:
        self._out, self._place = out, recipe.ledger.get("place", "")
        self._ledger = Ledger(recipe.ledger["place"]) if recipe.ledger else None
        self._reservation = None if self._ledger is None else self._reserved(self._ledger, recipe, plan, event or plan.event())

    def _reserved(self, ledger: Ledger, recipe: Recipe, plan: Plan, event: Event) -> Reservation:
        dataset = recipe.ledger["dataset"]
        identifier = reservation_of(self._out)
        if not identifier:
            run = f"{self._out.name} ({plan.digest[:12]})"
            found = ledger.reserve(dataset, event, run=run, hold=True, unit=plan.unit, relation=plan.relation)
            self._note(found)
            return found
        found = ledger.reservation(identifier)
        if not found.is_open or found.reserved != event or found.dataset != dataset:
            raise ArgumentError(
                f"Expected reservation {identifier} to be open and to be for this plan; it is {found.state}. Start a new run."
            )
        return found

    def begin(self) -> None:
        """The first step comes next."""
        if self._ledger is not None and self._reservation is not None:
            self._ledger.begin(self._reservation)

    def commit(self, event: Event) -> None:
        """The run is finished, and this is what it did."""
        if self._ledger is None or self._reservation is None:
            return
        done = self._ledger.commit(self._reservation, event)
        status = self._ledger.status(done.dataset)
        budget = {"budget_epsilon": status.dataset.epsilon, "budget_delta": status.dataset.delta}
        self._note(done, head=self._ledger.head, spent_epsilon=status.epsilon, **budget)

    def _note(self, reservation: Reservation, **more: Any) -> None:
        """Write ``reservation.json``, all of it or nothing: it is what ties the folder to the ledger."""
        about = {"reservation": reservation.id, "dataset": reservation.dataset, "state": reservation.state, "ledger": self._place}
        with replacing(self._out / RESERVATION, mode=0o644) as new:
            new.write_text(json.dumps({**about, **more}, indent=2), encoding="utf-8")

"""A session's use of the budget ledger: reserve before, begin with the first step, commit after."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad import _check
from hushgrad.budget import Ledger, Policy, Reservation
from hushgrad.budget.file_digests import file_sha256
from hushgrad.budget.folder import RESERVATION, SETTLED, owners_of, reservation_of
from hushgrad.errors import ArgumentError
from hushgrad.events import Event
from hushgrad.guarantee import Guarantee
from hushgrad.release.atomic import replacing
from hushgrad.release.keys import KEY
from hushgrad.release.owner import LOCK, Owner
from hushgrad.train.plan import Plan

if TYPE_CHECKING:
    from hushgrad.recipes.recipe import Recipe


def public_size(plan: Plan) -> float | None:
    """The public number of records of a plan: stated by its sampler, or implied by its batches."""
    return plan.sampler.meant_for(plan.batch_size)


def require_allowed(policy: Policy | None, plan: Plan, *, paid: bool, guarantee: Guarantee | None = None) -> None:
    """Refuse a run that the policy does not allow, before it begins.

    Args:
        policy: what is allowed; None allows everything.
        plan: what is to be run.
        paid: whether a ledger pays for it.
        guarantee: what is claimed, if that is not the plan's own (a search).
    """
    if policy is None:
        return
    policy.require_plan(certified=plan.certified, secure=plan.secure, paid=paid)
    claim = plan.guarantee() if guarantee is None else guarantee
    same = {"delta": claim.delta, "relation": claim.relation, "unit": claim.unit, "accountant": claim.accountant}
    policy.require(epsilon=claim.epsilon, records=public_size(plan), **same)  # type: ignore[arg-type]


@contextmanager
def alone_in(out: Path, *, take_over: bool = False) -> Iterator[Owner]:
    """Own the folder: nobody else runs or settles in it meanwhile, and a settled run never continues.

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


@contextmanager
def new_folder(out: Path, *, take_over: bool = False, undo: Collection[str] = ()) -> Iterator[Owner]:
    """The folder, created if necessary and owned; if the run is refused before it begins, the folder is left as it was found.

    Args:
        out: the folder.
        take_over: take it from a dead owner if the file system cannot tell.
        undo: paths of files below it that begin nothing yet; removed again if there is nothing else.
    """
    there = out.exists()
    empty = not there or not any(out.iterdir())
    out.mkdir(parents=True, exist_ok=True)
    try:
        with alone_in(out, take_over=take_over) as owner:
            try:
                yield owner
            except BaseException:
                if empty:  # and it is ours: nobody else's files are in it
                    _undo(out, undo)
                raise
    except BaseException:
        if not there:
            with suppress(OSError):  # what has begun stays
                out.rmdir()
        raise


def _undo(out: Path, names: Collection[str]) -> None:
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    for name in names if files <= {LOCK, *names} else ():
        (out / name).unlink(missing_ok=True)
        with suppress(OSError):
            (out / name).parent.rmdir()


class Spending:
    """One session's reservation in a ledger, or nothing if the recipe names none.

    The id of the reservation is in the run folder, as ``reservation.json``, before the first step. A session that is killed
    before it is there leaves a *held* reservation, which has not begun and can be cancelled. The file also holds a token that
    each start of the run replaces, there and in the ledger: of two copies of a folder only the first to continue knows the latest one.
    """

    def __init__(self, recipe: Recipe, plan: Plan, out: Path, *, event: Event | None = None) -> None:
        self._out, self._place = out, recipe.ledger.get("place", "")
        self._ledger = Ledger(recipe.ledger["place"]) if recipe.ledger else None
        self._owner = secrets.token_hex(16)
        self._reservation = None if self._ledger is None else self._reserved(self._ledger, recipe, plan, event or plan.event())

    def _reserved(self, ledger: Ledger, recipe: Recipe, plan: Plan, event: Event) -> Reservation:
        dataset = recipe.ledger["dataset"]
        identifier = reservation_of(self._out)
        if not identifier:
            self._require_new()
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

    def _require_new(self) -> None:
        """Refuse a run that has a key: it has reserved before, and a second reservation would charge it twice."""
        if any((self._out / home / KEY).exists() for home in ("checkpoint", "search")):
            raise ArgumentError(
                f"Expected {RESERVATION} beside this run's checkpoint: it was lost, and with it which reservation pays. Put it back, or "
                f"close the run with: hushgrad ledger settle {self._place} {self._out}"
            )

    @property
    def begun(self) -> bool:
        """Whether the ledger says that an earlier start has reached its first step."""
        return self._reservation is not None and self._reservation.state == "begun"

    def begin(self, identity: str) -> None:
        """Record that this start's first step comes next. ``identity`` is the run's name."""
        if self._ledger is None or self._reservation is None:
            return
        before = self._ledger.known_owner(self._reservation, owners_of(self._out))
        if before or not self._ledger.reservation(self._reservation.id).owner:  # else it is a copy, and refused as it is
            # Written first: whoever dies between the two has the token of the life that began, and that of the one before it.
            self._note(self._reservation, owner=before, next=self._owner)
        self._reservation = self._ledger.begin(self._reservation, owner=self._owner, before=[before], identity=identity)
        self._note(self._reservation, owner=self._owner)

    def commit(self, event: Event) -> None:
        """Record what the finished run did, with the digest of its model file."""
        if self._ledger is None or self._reservation is None:
            return
        file = self._out / "model.safetensors"
        model = file_sha256(file) if file.is_file() else ""
        done = self._ledger.commit(self._reservation, event, model=model, owner=self._owner)
        status = self._ledger.status(done.dataset)
        budget = {"budget_epsilon": status.dataset.epsilon, "budget_delta": status.dataset.delta}
        self._note(done, head=self._ledger.head, spent_epsilon=status.epsilon, **budget)

    def _note(self, reservation: Reservation, **more: Any) -> None:
        """Write ``reservation.json`` atomically: it ties the folder to the ledger."""
        about = {"reservation": reservation.id, "dataset": reservation.dataset, "state": reservation.state, "ledger": self._place}
        with replacing(self._out / RESERVATION, mode=0o644) as new:
            new.write_text(json.dumps({**about, **more}, indent=2), encoding="utf-8")

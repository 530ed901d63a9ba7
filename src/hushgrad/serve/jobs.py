"""The expensive requests of the page. They run in a child process (``worker``), with JSON in and out."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad.errors import ArgumentError, HushgradError, NoTheorem, PolicyRefused

if TYPE_CHECKING:
    from hushgrad.budget import Ledger, Policy, Status
    from hushgrad.planner import Candidate, Question
    from hushgrad.report import Card
    from hushgrad.train.plan import Plan

_FACTORS = tuple(3 ** (k / 5) for k in range(-5, 6))  # of the noise multiplier
_BATCHES = tuple(4 ** (k / 5) for k in range(-5, 6))  # of the batch size
_PARTS = 16  # of the run
_SETS, _RUNS = 50, 100  # data sets, and runs of one, that a page shows


# The planner -----------------------------------------------------------------------------------------------------------


def plan(*, question: dict[str, Any]) -> dict[str, Any]:
    """All mechanisms under a budget, best first."""
    from hushgrad.planner import ranking

    found = ranking.answer(_question(question))
    return {
        "candidates": [_candidate(one) for one in found],
        "dropped": [{"name": one.name, "reason": one.reason} for one in found.dropped],
    }


def _question(asked: dict[str, Any]) -> Question:
    from hushgrad.events import Relation
    from hushgrad.planner import Question

    rest = {name: value for name, value in asked.items() if name not in ("sampling", "relation")}
    return Question(**rest, sampling_allowed=asked["sampling"] == "random", relation=Relation.of(asked["relation"]))


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        **one.to_json(),
        "steps": one.plan.steps,
        "sampling": str(one.plan.participation),
        "digest": one.plan.digest,
        "claim": str(one.plan.guarantee()),
    }


def curves(*, question: dict[str, Any], name: str, noise_multiplier: float) -> dict[str, Any]:
    """Epsilon of one candidate against its noise, its batch size and its steps, and what one more epoch costs."""
    from hushgrad.planner import one_more_epoch

    asked = _question(question)
    made = _made(asked, name)
    if made is None:
        raise ArgumentError("Expected the name of a ranked plan.")
    plan = dataclasses.replace(made, noise_multiplier=noise_multiplier)
    try:
        longer = str(one_more_epoch(plan, dataset_size=asked.dataset_size))
    except (ArgumentError, NoTheorem) as error:
        longer = str(error)
    return {
        "noise": [[noise_multiplier * factor, _epsilon(plan, noise_multiplier * factor)] for factor in _FACTORS],
        "batch": list(_over_batches(asked, name, noise_multiplier)),
        "steps": [[steps, _epsilon(plan, noise_multiplier, steps)] for steps in _marks(plan.steps)],
        "one_more_epoch": longer,
    }


def _made(question: Question, name: str) -> Plan | None:
    from hushgrad.planner.candidates import Proposal, proposals

    for proposal in proposals(question):
        if isinstance(proposal, Proposal) and proposal.name == name:
            return proposal.make()
    return None


def _over_batches(question: Question, name: str, noise_multiplier: float) -> Iterator[list[float]]:
    sizes = {max(1, min(question.dataset_size, round(question.size * factor))) for factor in _BATCHES}
    for size in sorted(sizes):
        try:
            made = _made(dataclasses.replace(question, batch_size=size), name)
            if made is not None:
                yield [size, _epsilon(made, noise_multiplier)]
        except NoTheorem:  # this mechanism has no analysis at that size: no point there
            continue


def _marks(steps: int) -> list[int]:
    return sorted({max(1, round(steps * k / _PARTS)) for k in range(1, _PARTS + 1)})


def _epsilon(plan: Plan, noise_multiplier: float, steps: int | None = None) -> float:
    from hushgrad.accounting import epsilon

    noisy = dataclasses.replace(plan, noise_multiplier=noise_multiplier)
    return epsilon(noisy.event() if steps is None else noisy.event(steps), delta=plan.delta, relation=plan.relation)


# Cards -----------------------------------------------------------------------------------------------------------------


def card(
    *, root: str, parts: list[str], raw: bool, policy: dict[str, Any] | None = None, ledger: str | None = None
) -> dict[str, Any]:
    """The privacy card of a run in all its forms, made from a private copy of the necessary files.

    The copy is checked like all other files here, so nothing outside the folder can enter a card.
    """
    from hushgrad.budget import Ledger, Policy

    rules = None if policy is None else Policy.from_json(policy)
    found = _card(root, parts, raw, policy=rules, ledger=None if ledger is None else Ledger(ledger))
    return {"html": found.to_html(), "markdown": found.to_markdown(), "json": found.to_json()}


def compare(*, root: str, first: list[str], second: list[str]) -> dict[str, Any]:
    """Two runs side by side."""
    from hushgrad.report.compare import ANYTHING, compare_runs

    return compare_runs(*(_card(root, parts, False, policy=ANYTHING) for parts in (first, second))).to_json()


def _card(root: str, parts: list[str], raw: bool, *, policy: Policy | None, ledger: Ledger | None = None) -> Card:
    from hushgrad.budget.file_digests import ForeignFile
    from hushgrad.report import privacy_card
    from hushgrad.serve.files import LIMITS, RunFolder

    run = RunFolder(Path(root), tuple(parts))
    with tempfile.TemporaryDirectory(prefix="hushgrad-card-") as place:
        copy = Path(place) / parts[-1]
        copy.mkdir()
        for name in LIMITS:
            if run.stat(name) is not None:
                (copy / name).write_text(run.text(name), encoding="utf-8")
        try:
            return privacy_card(copy, raw=raw, policy=policy, ledger=ledger)
        except (PolicyRefused, ForeignFile):
            raise  # the one's sentence quotes the policy and the claim, the other's the name of a file that every run has
        except (HushgradError, ValueError, TypeError, KeyError):
            # The reason may quote the file, and nothing of a file that we do not understand is shown.
            raise ArgumentError(
                "The files of this run contradict each other, or are not what hushgrad train writes. `hushgrad report` says more."
            ) from None


# The ledger ------------------------------------------------------------------------------------------------------------


def ledger(*, place: str) -> dict[str, Any]:
    """The budgets, who spent them, and whether the chain is whole. Nothing is written."""
    from hushgrad.budget import Ledger

    try:
        books = Ledger(place)
        try:
            checked = books.verify()
            sets = books.datasets()
            shown = [_status(books.status(dataset.name)) for dataset in sets[:_SETS]] if checked.ok else []
        finally:
            books.close()
    except HushgradError as error:
        raise ArgumentError(re.sub(r"://[^@/\s]*@", "://…@", str(error))) from None  # a URL may hold a password
    verified = {"ok": checked.ok, "rows": checked.rows, "head": checked.head, "problem": checked.problem}
    return {"verified": verified, "datasets": shown, "more": max(0, len(sets) - _SETS)}


def _status(status: Status) -> dict[str, Any]:
    dataset, runs = status.dataset, status.reservations[::-1]
    return {
        "name": dataset.name,
        "budget": dataset.epsilon,
        "delta": dataset.delta,
        "unit": dataset.unit,
        "relation": str(dataset.relation),
        "composition": dataset.composition,
        "spent": status.epsilon,
        "committed": status.committed_epsilon,
        "left": status.left,
        "exceeded": status.exceeded,
        "more": max(0, len(runs) - _RUNS),
        "runs": [
            {
                "run": one.run,
                "state": one.state,
                "since": one.since,
                "overrun": one.overrun,
                "reserved": str(one.reserved),
                "charged": str(one.charged),
                "approved": list(one.approved),
            }
            for one in runs[:_RUNS]
        ],
    }


JOBS: dict[str, Callable[..., dict[str, Any]]] = {job.__name__: job for job in (plan, curves, card, compare, ledger)}
"""What a worker can be asked."""

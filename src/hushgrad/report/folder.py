"""Reads a run folder for a card: checked for consistency, and never its checkpoint or key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_most, reason
from hushgrad.budget.file_digests import ForeignFile, require_belonging, require_own_model
from hushgrad.budget.folder import reservation_of
from hushgrad.errors import ArgumentError
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.train.plan import Plan

_LARGEST = 256 << 20  # bytes of one file: a report reads what a run wrote, not whatever lies there


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The content of a finished run's folder, and what else is known about the run."""

    name: str
    plan: Plan
    guarantee: Guarantee
    ledger: Ledger
    report: dict[str, Any]
    recipe: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    audit: dict[str, Any] | None
    tuning: dict[str, Any] | None
    reservation: dict[str, Any] | None = None
    named: bool = False  # whether the report names the other files by their digests


def read_folder(path: str | Path) -> Folder:
    """Read the folder of a finished ``hushgrad train`` run.

    Raises:
        ArgumentError: where a file is missing or broken, or the files do not belong to each other.
    """
    folder = Path(path)
    if not (folder / "plan.json").is_file():
        _check.fail("run", str(path), "to be the folder of a run, with plan.json in it", "Give the --out of hushgrad train.")
    if not (folder / "guarantee.json").is_file():
        if (folder / "report.json").is_file() and not (folder / "checkpoint").is_dir():  # nothing is left to be resumed
            raise ForeignFile("Expected guarantee.json beside report.json: the run was finished, and it is gone. Put it back.")
        remedy = "Finish it with hushgrad train --resume; a card states what a finished run promises."
        _check.fail("run", str(path), "to be a finished run", remedy)
    if not (folder / "report.json").is_file():
        raise ForeignFile("Expected report.json in the run's folder: it says which files are the run's own. Put it back.")
    report = read_object(folder / "report.json")
    named = require_belonging(folder, report)
    plan = Plan.from_json(read_object(folder / "plan.json"))
    guarantee = Guarantee.from_json(read_object(folder / "guarantee.json"))
    ledger = Ledger.from_json(read_object(folder / "ledger.json"))
    found = Folder(
        name=folder.resolve().name,
        plan=plan,
        guarantee=guarantee,
        ledger=ledger,
        report=report,
        recipe=_tables(folder / "recipe.json") if (folder / "recipe.json").is_file() else {},
        metrics=_lines(folder / "metrics.jsonl"),
        audit=read_object(folder / "audit.json") if (folder / "audit.json").is_file() else None,
        tuning=read_object(folder / "tuning.json") if (folder / "tuning.json").is_file() else None,
        reservation=read_object(folder / "reservation.json") if (folder / "reservation.json").is_file() else None,
        named=named,
    )
    if named and report.get("reservation") != reservation_of(folder):
        raise ArgumentError(
            "Expected reservation.json to name the reservation in report.json. It was changed, or is another run's."
        )
    _require_consistent(found)
    _require_audited(found)
    if (model := folder / "model.safetensors").is_file():  # whoever signs a card signs for it; else the card's hash stands alone
        require_own_model(model, report)
    return found


def _require_consistent(found: Folder) -> None:
    """Recompute the guarantee from the ledger: a card must not repeat a number that somebody has edited."""
    if found.guarantee.event != found.ledger.event():
        raise ArgumentError("Expected guarantee.json to be about the steps in ledger.json. One of them was changed.")
    require_earned(found.guarantee, found.plan, "guarantee.json", "plan.json")
    _require_report(found)


def require_earned(claim: Guarantee, plan: Plan, where: str, planned: str) -> None:
    """Refuse a guarantee that is not about its plan, or whose epsilon is smaller than what its event costs.

    Args:
        claim: what is promised.
        plan: of the run that it is promised for.
        where: what the guarantee is called.
        planned: what the plan is called.
    """
    from hushgrad.accounting import epsilon

    if (claim.delta, claim.relation, claim.unit) != (plan.delta, plan.relation, plan.unit):
        raise ArgumentError(f"Expected {where} to have the delta, relation and unit of {planned}. One of them was changed.")
    spent = epsilon(claim.event, delta=claim.delta, accountant=claim.accountant, relation=claim.relation)
    if claim.epsilon < spent * (1 - 1e-6):  # the accountant of another version may differ in the last digits
        raise ArgumentError(
            f"Expected epsilon={at_most(claim.epsilon, 6)} in {where} to be at least {at_most(spent, 6)}, its event's cost."
        )


def _require_report(found: Folder) -> None:
    """Check the report, which was written last, against the other files: notes, seed and data must agree."""
    outcome = found.report.get("outcome")
    said = outcome.get("guarantee") if isinstance(outcome, dict) else None
    if said is not None and Guarantee.from_json(said) != found.guarantee:
        raise ArgumentError(
            "Expected guarantee.json to be the guarantee in report.json, notes included. One of them was changed."
        )
    if found.report.get("recipe", found.recipe) != found.recipe:
        raise ArgumentError("Expected recipe.json to be the recipe in report.json. One of them was changed.")
    digest = found.report.get("plan_digest", found.plan.digest)
    if digest != found.plan.digest:
        raise ArgumentError("Expected report.json to be about plan.json: the plan's hash differs. One of them was changed.")


def _require_audited(found: Folder) -> None:
    """Refuse an audit of another plan, which says nothing about this run."""
    digest = (found.audit or {}).get("plan_digest", found.plan.digest)
    if digest != found.plan.digest:
        raise ArgumentError("Expected audit.json to be an audit of plan.json: it names another plan. Audit this run.")


def read_object(path: Path) -> dict[str, Any]:
    """The single JSON object in an untrusted file.

    Raises:
        ArgumentError: where the file is too large, cannot be read or holds something else.
    """
    text = _text(path)
    try:
        content = _check.parsed(text)
    except ValueError as error:
        why = str(error).partition(": ")[2].rstrip(".")
        raise ArgumentError(f"Expected {path.name} to be JSON ({why}). Was it cut short or changed?") from None
    if not isinstance(content, dict):
        raise ArgumentError(f"Expected {path.name} to hold one JSON object.")
    return content


def _tables(path: Path) -> dict[str, Any]:
    tables = read_object(path)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ArgumentError(f"Expected {path.name} to hold tables; {name[:40]!r} is none.")
    return tables


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST:
            raise ArgumentError(f"Expected {path.name} to have at most {_LARGEST} bytes.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"Expected a readable {path.name}: {reason(error)}.") from None


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The metrics of all steps, without lines that a killed run cut short."""
    lines = _text(path).splitlines() if path.is_file() else ()
    return tuple(item for line in lines if (item := _check.parsed_object(line)))

"""The provenance of a card: which data, how many records, who ran it and when, which model file, under which policy."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from hushgrad.budget import Ledger, Policy
from hushgrad.errors import ArgumentError, PolicyRefused
from hushgrad.recipes.spending import public_size
from hushgrad.report.folder import Folder


def provenance(folder: Folder, policy: Policy | None) -> dict[str, str]:
    """The known facts by name. There is no hash of the records: it would confirm a guessed data set.

    Args:
        folder: of a finished run.
        policy: which has allowed the claim.
    """
    data, report = folder.recipe.get("data", {}), folder.report
    facts = {
        "data": data.get("name"),
        "file": PurePath(str(data["path"])).name if data.get("path") else None,
        "identity": data.get("identity"),
        "records": _records(folder),
        "by": report.get("by") or None,
        "finished": report.get("finished"),
        "model_sha256": report.get("model_sha256"),
        "policy_sha256": None if policy is None else policy.digest,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def budget_of(folder: Folder, ledger: Ledger | None, policy: Policy | None) -> dict[str, Any] | None:
    """The run's entry in a budget ledger, without the ledger's location.

    Args:
        folder: of a finished run. Anybody can write into it that the run is booked.
        ledger: which is asked whether that is so.
        policy: which may want it asked.
    """
    if ledger is None:
        if policy is not None and policy.ledger:
            raise PolicyRefused(
                "The policy wants runs that a ledger pays for: give the ledger to look it up in (--ledger PLACE)."
            )
        return None if folder.reservation is None else {**_said(folder.reservation), "looked_up": False}
    named, booked = (folder.reservation or {}).get("reservation"), ledger.booked(str(folder.report.get("model_sha256")))
    if booked is None or booked.id != named or booked.charged != folder.guarantee.event:
        raise ArgumentError("Expected the ledger to have booked this run with this model and this event: it has not.")
    status = ledger.status(booked.dataset)
    facts = {"dataset": booked.dataset, "reservation": booked.id, "state": booked.state, "head": ledger.head, "looked_up": True}
    budget = {"budget_epsilon": status.dataset.epsilon, "budget_delta": status.dataset.delta}
    return {**facts, "spent_epsilon": status.epsilon, **budget}


def _said(reservation: dict[str, Any]) -> dict[str, Any]:
    keep = ("dataset", "reservation", "state", "spent_epsilon", "budget_epsilon", "budget_delta", "head")
    return {key: reservation[key] for key in keep if key in reservation}


def provenance_words(known: dict[str, str]) -> list[tuple[str, str]]:
    """The rows of a card, as (name, words)."""
    file, identity, records = (known.get(name) for name in ("file", "identity", "records"))
    data = known.get("data", "not recorded") + (f" ({file})" if file else "")
    rows = [
        ("data", data + (f", {records} records" if records else "")),
        ("identity of the data", identity or "not stated ([data] identity of the recipe)"),
        ("run by", known.get("by", "not recorded")),
        ("finished", known.get("finished", "not recorded")),
        ("model file (SHA-256)", known.get("model_sha256", "not recorded")),
    ]
    return [*rows, ("policy (SHA-256)", known["policy_sha256"])] if "policy_sha256" in known else rows


def _records(folder: Folder) -> str | None:
    """As the recipe states it; else what the plan is meant for, to two digits."""
    stated: Any = folder.recipe.get("plan", {}).get("dataset_size")
    if stated is not None:
        return str(stated)
    size = public_size(folder.plan)
    return None if size is None else f"about {float(f'{size:.2g}'):.0f}"

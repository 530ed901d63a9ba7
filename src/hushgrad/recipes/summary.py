"""The short report of a session: what was trained, how privately, and what the numbers do not cover."""

from __future__ import annotations

import getpass
import inspect
import json
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hushgrad import __version__
from hushgrad.budget.file_digests import file_sha256, with_digests
from hushgrad.budget.folder import reservation_of
from hushgrad.guarantee import Guarantee, questions
from hushgrad.recipes.data import DATA
from hushgrad.release.atomic import written
from hushgrad.train.plan import Plan

if TYPE_CHECKING:
    from hushgrad.recipes.recipe import Recipe


def write_report(
    out: Path, recipe: Recipe, plan: Plan, outcome: dict[str, Any], guarantee: Guarantee, *, tuning: dict[str, Any] | None = None
) -> None:
    """Write ``report.json``, which names every file of the run by its digest, ``report.md`` and, last, ``guarantee.json``, which marks
    a finished run; ``tuning`` is the record of a search that the guarantee counts: ``tuning.json``, which marks a finished search.
    """
    tuned = tuning is not None
    versions = {"hushgrad": __version__, "torch": torch.__version__, "python": platform.python_version()}
    doubts = [*questions(guarantee.epsilon, guarantee.delta), *caveats(recipe, plan, tuned=tuned)]
    content = {
        "outcome": outcome,
        "plan_digest": plan.digest,
        "by": recipe.run.by or _login(),
        "finished": datetime.now(timezone.utc).date().isoformat(),
        "model_sha256": file_sha256(out / "model.safetensors"),
        "reservation": reservation_of(out),
        "recipe": recipe.tables(),
        "versions": versions,
        "caveats": doubts,
    }
    texts = {"guarantee.json": _text(guarantee.to_json())} | ({} if tuning is None else {"tuning.json": _text(tuning)})
    written(out / "report.json", _text(with_digests(out, content, texts)))
    written(out / "report.md", _markdown(recipe, plan, outcome, guarantee, versions, doubts))
    for name, text in texts.items():
        written(out / name, text)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _login() -> str:
    """The login name; empty if the machine cannot tell."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an account without a name, or a system without accounts
        return ""


def caveats(recipe: Recipe, plan: Plan, *, tuned: bool = False) -> list[str]:
    """What the guarantee does not cover in this run."""
    trying = "Choosing a recipe by trying several on the same data spends privacy that is not counted here."
    if tuned:
        trying = "The search among the candidates is counted; recipes that were tried before it, or beside it, are not."
    found = [
        "The guarantee covers the parameters after every step. It does not cover the test set, nor any metric whose name "
        "begins with raw_.",
        trying,
        f"The rate of the batches follows from dataset_size; the number of training {plan.unit}s that it states is public.",
    ]
    if _splits(recipe):
        found.append(
            "The test records are a part of the data file: nothing protects them, and what is told of them is exact. "
            "Records that are public go to test_path; then all of the file is protected."
        )
    if not plan.certified:
        found.append("Float32 sums: that no record moves one by more than its clip norm is measured, not proved.")
    if recipe.run.seed is not None:
        found.append("The run was seeded: it is reproducible, and not private against whoever knows the seed.")
    return found


def _splits(recipe: Recipe) -> bool:
    """Whether the test records are split off the private file."""
    make = DATA.get(str(recipe.data["name"]))
    return make is not None and "placed" in inspect.signature(make).parameters and "test_path" not in recipe.data


def _compared(outcome: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures to compare the accuracy with."""
    words = {
        "test_majority": "always the most frequent class",
        "test_balanced_accuracy": "mean over the classes",
        "test_auc": "AUC",
    }
    shown = {name: f"{outcome[name]:.4f}" if name == "test_auc" else f"{outcome[name]:.2%}" for name in words if name in outcome}
    return [(words[name], value) for name, value in shown.items()]


def _confusion(counts: list[list[int]] | None, recipe: Recipe) -> list[str]:
    """The matrix as a table, for at most twelve classes."""
    if counts is None or len(counts) > 12:
        return []
    given = recipe.data.get("classes", [])
    names = [str(name) for name in given] if len(given) == len(counts) else [str(k) for k in range(len(counts))]
    head = ["", "## Test records by class (rows) and by what the model says (columns)", ""]
    head += [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    return [*head, *(f"| {name} | {' | '.join(str(n) for n in row)} |" for name, row in zip(names, counts, strict=True))]


def _markdown(
    recipe: Recipe, plan: Plan, outcome: dict[str, Any], guarantee: Guarantee, versions: dict[str, str], doubts: list[str]
) -> str:
    rows = [
        ("model", recipe.model["name"]),
        ("data", recipe.data["name"]),
        ("test accuracy", f"{outcome['test_accuracy']:.2%}"),
        *_compared(outcome),
        ("test loss", f"{outcome['test_loss']:.4f}"),
        ("steps", outcome["steps"]),
        ("time", f"{outcome['seconds']:.1f} s"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    lines = ["# A private training run", "", f"**{guarantee}**", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += ["", f"**{outcome['verdict']}**"] if outcome.get("verdict") else []
    lines += _confusion(outcome.get("confusion"), recipe)
    lines += ["", "## Plan", "", "```", str(plan), "```", "", "## What the guarantee does not say", ""]
    lines += [f"- {caveat}" for caveat in doubts]
    lines += ["", "Files: `model.safetensors`, `plan.json`, `ledger.json`, `guarantee.json`, `metrics.jsonl`, `recipe.json`.", ""]
    return "\n".join(lines)

"""Runs an experiment and writes its findings as JSON, as a picture and as Markdown."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hushgrad import __version__, _check
from hushgrad._printed import plain
from hushgrad.experiments.base import (
    EXPERIMENTS,
    MISPRINT,
    NOISE,
    REFUTED,
    SOURCES,
    UNDECIDED,
    Context,
    Experiment,
    Findings,
    tables,
)
from hushgrad.experiments.picture import save

_SIGNS = {"equal": "", "at most": "≤ ", "at least": "≥ "}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An experiment that was run: its findings, time and settings."""

    experiment: Experiment
    context: Context
    findings: Findings
    wall_seconds: float
    cpu_seconds: float

    @property
    def reproduced(self) -> bool:
        """Whether no claim is refuted: each holds, as printed or as corrected, or is undecided."""
        return all(claim.verdict != REFUTED for claim in self.findings.claims)

    @property
    def command(self) -> str:
        """The command that repeats it."""
        words = ["hushgrad reproduce", self.experiment.name, *(["--quick"] if self.context.quick else [])]
        words += [] if self.context.data is None else ["--data data"]  # wherever they lie on this machine
        return " ".join([*words, *([f"--seed {self.context.seed}"] if self.context.seed else [])])

    def to_json(self) -> dict[str, Any]:
        """The content of ``results.json``."""
        content = {
            "experiment": self.experiment.name,
            "claim": self.experiment.claim,
            "source": self.experiment.source,
            "command": self.command,
            "quick": self.context.quick,
            "seed": self.context.seed,
            "hushgrad": __version__,
            "wall_seconds": round(self.wall_seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2),
            "reproduced": self.reproduced,
            "caption": self.findings.caption,
            "claims": [claim.to_json() for claim in self.findings.claims],
            "tables": [{"title": t.title, "columns": t.columns, "rows": t.rows} for t in self.findings.tables],
            "data": self.findings.data,
        }
        return dict(plain(content))


def reproduce(experiment: Experiment, context: Context, out: Path | None = None, *, picture: bool = True) -> Outcome:
    """Run an experiment; with ``out``, write ``results.json``, ``NAME.md`` and ``NAME.png`` into ``out/NAME``.

    Args:
        experiment: one of ``EXPERIMENTS``.
        context: quick or full, seed, where the data are.
        out: folder for the results; nothing is written without it.
        picture: draw the picture too (needs matplotlib).
    """
    wall, cpu = time.perf_counter(), time.process_time()
    findings = experiment.run(context)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    outcome = Outcome(experiment=experiment, context=context, findings=findings, wall_seconds=wall, cpu_seconds=cpu)
    if out is not None:
        folder = out / experiment.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(outcome.to_json(), indent=1) + "\n")
        (folder / f"{experiment.name}.md").write_text(page(outcome, picture=f"{experiment.name}.png" if picture else None))
        if picture:
            save(folder / f"{experiment.name}.png", findings.draw)
    return outcome


def page(outcome: Outcome, *, picture: str | None) -> str:
    """The Markdown page of an outcome: claim by claim, the picture, the tables, and how it was made."""
    experiment, findings = outcome.experiment, outcome.findings
    sources = "; ".join(f"{key} ({SOURCES[key]})" for key in experiment.source.split(", "))
    parts = [f"# {experiment.name}", f"{experiment.claim[0].upper()}{experiment.claim[1:]}. Source: {sources}."]
    parts.append(_claims_table([claim.to_json() for claim in findings.claims]))
    if picture is not None:
        parts.append(f"![{experiment.name}]({picture})\n\n*{findings.caption}*")
    parts += [f"**{table.title}**\n\n{_rows(table.columns, table.rows)}" for table in findings.tables]
    parts.append(
        f"Written by `{outcome.command}` (hushgrad {__version__}, seed {outcome.context.seed}) "
        f"in {outcome.wall_seconds:.1f} s of wall time, {outcome.cpu_seconds:.1f} s of processor time."
    )
    return "\n\n".join(parts) + "\n"


def write_pages(outcome: Outcome, docs: Path) -> None:
    """Write an outcome into the documentation: its page, its picture, its numbers; then the overview of all."""
    name = outcome.experiment.name
    for folder in (docs / "results", docs / "images"):
        folder.mkdir(parents=True, exist_ok=True)
    save(docs / "images" / f"results-{name}.png", outcome.findings.draw)
    (docs / "results" / f"{name}.md").write_text(page(outcome, picture=f"../images/results-{name}.png"))
    (docs / "results" / f"{name}.json").write_text(json.dumps(outcome.to_json(), indent=1) + "\n")
    (docs / "results.md").write_text(summary(docs / "results"))


def summary(folder: Path) -> str:
    """The overview page: every claim of every experiment whose numbers are in ``folder``, with errors of the sources listed separately."""
    files = [folder / f"{experiment.name}.json" for experiment in EXPERIMENTS]
    results = [_check.parsed(file.read_text()) for file in files if file.exists()]
    claims = _latest([(result["experiment"], claim) for result in results for claim in result["claims"]])
    counts = {verdict: sum(c["verdict"] == verdict for _, c in claims) for verdict in {c["verdict"] for _, c in claims}}
    words, said = tables("results_page.toml"), "; ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts))
    parts = [
        "# Results: the sources, claim by claim",
        f"{words['verdicts']} {said}.",
        "\n".join(f"* {key}: {title}" for key, title in SOURCES.items()),
        words["commands"],
        "## Errors and omissions in the sources",
        _listed(claims, MISPRINT),
    ]
    if REFUTED in counts:
        parts += ["## Not reproduced", _listed(claims, REFUTED)]
    if UNDECIDED in counts:
        parts += ["## Undecided", _listed(claims, UNDECIDED)]
    for result in results:
        name = result["experiment"]
        parts += [
            f"## [{name}](results/{name}.md)",
            f"{result['claim'][0].upper()}{result['claim'][1:]}. `{result['command']}`, seed {result['seed']}, "
            f"{result['wall_seconds']:.1f} s of wall time, {result['cpu_seconds']:.1f} s of processor time.",
            _claims_table(result["claims"]),
        ]
    return "\n\n".join(parts) + "\n"


def _latest(claims: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """All claims except undecided ones that were evaluated again."""
    again = {experiment.name: experiment.again for experiment in EXPERIMENTS if experiment.again}
    looked = {(again[name], claim["says"]) for name, claim in claims if name in again}
    return [(name, claim) for name, claim in claims if claim["verdict"] != UNDECIDED or (name, claim["says"]) not in looked]


def _listed(claims: list[tuple[str, dict[str, Any]]], verdict: str) -> str:
    found = [(name, claim) for name, claim in claims if claim["verdict"] == verdict]
    return "\n".join(f"* [{name}](results/{name}.md), {claim['source']}: {_sentence(name, claim)}" for name, claim in found)


def _sentence(experiment: str, claim: dict[str, Any]) -> str:
    why = " ".join(filter(None, (claim["note"], reason(experiment, claim))))
    return f"{claim['says']}: printed {_number(claim['expected'])}, found {_found(claim)}. {why}".rstrip()


def _claims_table(claims: list[dict[str, Any]]) -> str:
    rows = [
        (c["source"], c["says"], _SIGNS[c["relation"]] + _number(c["expected"]), _found(c), f"**{c['verdict']}**", c["note"])
        for c in claims
    ]
    return _rows(("source", "claim", "expected", "found", "verdict", "note"), rows)


def _found(claim: dict[str, Any]) -> str:
    spread = "" if claim["stderr"] is None else f" ± {_number(claim['stderr'])}"
    return _number(claim["found"]) + spread


def _rows(columns: tuple[str, ...], rows: Any) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(entry) for entry in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(entry: Any) -> str:
    text = _number(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else str(entry)
    return text.replace("|", "\\|")


def _number(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.4g}"


def reason(experiment: str, claim: dict[str, Any]) -> str:
    """A sentence for a claim that does not hold, from ``results_page.toml``; for an undecided one also what would decide it."""
    if claim["verdict"] not in (REFUTED, UNDECIDED):
        return ""
    known = [(one["why"], *of) for one in tables("results_page.toml")[claim["verdict"]] for of in one["claims"]]
    why = next((why for why, name, begins in known if name == experiment and claim["says"].startswith(begins)), "")
    if claim["verdict"] == REFUTED:
        return why
    gap = abs(claim["found"] - claim["expected"])
    times = math.inf if gap == 0 else (NOISE * claim["stderr"] / gap) ** 2
    if times > 50:
        return "The two are alike: no number of seeds that anybody would run tells them apart."
    many = "twice" if times <= 2 else f"{math.ceil(times)} times"
    return f"If the difference is what it seems, {many} as many seeds would decide it. {why}".rstrip()

"""The runs, their progress and their curves, from files that a run writes for its readers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.serve.files import LIMITS, RunFolder, Unreadable, folders
from hushgrad.serve.rules import Rules

_FRESH = 1.0  # seconds that a scan is good for
_ALIVE = 120.0  # seconds without a new line after which a run is called silent
_PER_PAGE = 200
NOT_VERIFIED, VERIFIED, CONTRADICTED, NOT_ALLOWED = "not verified", "verified", "contradicted", "not allowed"
_POINTS, _FEW = 240, 24  # of a curve: more cannot be seen; and in the list of runs
# What is shown, in this order, and how it is called. Nothing else in the file reaches a reader.
SHOWN = {
    "epsilon": "epsilon spent",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "signal_to_noise": "signal to noise",
    "learning_rate": "learning rate",
    "raw_loss": "training loss",
    "raw_accuracy": "training accuracy",
    "raw_clipped_fraction": "clipped gradients",
}


@dataclass(frozen=True, kw_only=True)
class Series:
    """Curves over the steps. ``steps`` is how many steps are planned, 0 where no line says so; ``has_raw``: some were hidden."""

    step: int
    steps: int
    curves: dict[str, tuple[tuple[int, float], ...]]
    has_raw: bool

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.curves[name][-1][1] if name in self.curves else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder, as far as it can be told without an accountant.

    | state | meaning |
    |---|---|
    | finished | there is a guarantee |
    | running | a step was written within two minutes |
    | starting | begun within two minutes, no step yet |
    | silent | no step for two minutes: interrupted, or the steps are long |
    | unreadable | a file is damaged or missing; ``problem`` says which |

    ``check`` says whether the claim of a finished run was computed again from its ledger since its files last changed: "verified",
    "contradicted", "not allowed" (by the policy), or "not verified" (the files say so, and nobody has looked; the card is what looks).
    """

    name: str
    state: str
    epsilon: float | None
    budget: float | None
    delta: float | None
    series: Series
    model: str
    data: str
    seeded: bool
    changed: float
    version: str
    problem: str = ""
    check: str = NOT_VERIFIED
    results: dict[str, float] = field(default_factory=dict)

    def result(self, name: str) -> float | None:
        """A test result: of the finished model if there is one, else the newest."""
        return self.results.get(name, self.series.last(name))

    @property
    def is_live(self) -> bool:
        """Whether more steps are expected."""
        return self.state in ("running", "starting", "silent")

    def to_json(self, *, curves: bool = True) -> dict[str, Any]:
        """As a JSON object."""
        content: dict[str, Any] = {
            "name": self.name,
            "state": self.state,
            "epsilon": _finite(self.epsilon),
            "epsilon_budget": _finite(self.budget),
            "delta": self.delta,
            "step": self.series.step,
            "steps": self.series.steps,
            "model": self.model,
            "data": self.data,
            "seeded": self.seeded,
            "changed": self.changed,
            "latest": {**{name: points[-1][1] for name, points in self.series.curves.items()}, **self.results},
            "raw_metrics_hidden": self.series.has_raw,
            "problem": self.problem,
            "check": None if self.is_live else self.check,
        }
        return {**content, "series": {k: list(v) for k, v in self.series.curves.items()}} if curves else content


class Shelf:
    """All runs below one folder; a requested name is looked up among them and never made into a path."""

    def __init__(self, root: Path | None, *, raw: bool, rules: Rules) -> None:
        self.root, self.raw, self._rules = root, raw, rules
        self._scanned, self._complete = -math.inf, True
        self._folders: dict[str, RunFolder] = {}
        # By name: which files were looked at, under which rules, and what was found.
        self._checked: dict[str, tuple[str, str, str]] = {}

    def folders(self) -> dict[str, RunFolder]:
        """The run folders by name."""
        if self.root is not None and time.monotonic() - self._scanned > _FRESH:
            found, cut = folders(self.root)
            self._folders, self._complete = {folder.name: folder for folder in found}, not cut
            self._scanned = time.monotonic()
        return self._folders

    def all(self) -> tuple[list[Run], int]:
        """The runs that were changed last, newest first, and how many more there are."""
        known = [(max(s.st_mtime for s in stats), f) for f in self.folders().values() if (stats := _stats(f))]
        known.sort(key=lambda pair: pair[0], reverse=True)
        rules = self._rules.version()
        return [self._run(folder, rules, points=_FEW) for _, folder in known[:_PER_PAGE]], max(0, len(known) - _PER_PAGE)

    def get(self, name: str) -> Run | None:
        """The run of that name, if there is one."""
        folder = self.folders().get(name)
        return None if folder is None else self._run(folder, self._rules.version())

    def note(self, run: Run, check: str) -> None:
        """Record the result of checking a card of this run, for its present files and policy."""
        self._checked[run.name] = run.version, self._rules.version(), check

    def _run(self, folder: RunFolder, rules: str, points: int = _POINTS) -> Run:
        series = read_series(folder, raw=self.raw, points=points)
        facts, problem = _facts(folder)
        stats = _stats(folder)
        changed = max((s.st_mtime for s in stats), default=0.0)
        version = "-".join(f"{s.st_size:x}.{s.st_mtime_ns:x}" for s in stats)
        return Run(
            name=folder.name,
            state="unreadable" if problem else _state(folder, series, changed),
            series=series,
            changed=changed,
            version=version,
            problem=problem,
            check=self._check(folder.name, version, rules),
            **{**facts, "epsilon": facts["epsilon"] if facts["epsilon"] is not None else series.last("epsilon")},
        )

    def _check(self, name: str, version: str, rules: str) -> str:
        *seen, found = self._checked.get(name, ("", "", NOT_VERIFIED))
        return found if seen == [version, rules] else NOT_VERIFIED


# What its files say -----------------------------------------------------------------------------------------------------


def read_series(folder: RunFolder, *, raw: bool, points: int = _POINTS) -> Series:
    """The curves of a run in about ``points`` points; un-noised ones only with ``raw=True``. Without metrics they are empty."""
    try:
        lines = folder.lines("metrics.jsonl", about=points)
    except Unreadable:
        lines = []
    step, steps, has_raw = 0, 0, False
    found: dict[str, dict[int, float]] = {}
    for line in _thinned(lines, points):
        metrics = _check.parsed_object(line)
        at = _count(metrics.get("step"))
        if at is None:
            continue
        step, steps = max(step, at), _count(metrics.get("steps")) or steps
        for name in SHOWN:
            value = _number(metrics.get(name))
            hidden = name.startswith("raw_") and not raw
            has_raw |= hidden and value is not None
            if value is not None and not hidden:
                found.setdefault(name, {})[at] = value
    curves = {name: tuple(sorted(found[name].items())) for name in SHOWN if name in found}
    return Series(step=step, steps=steps, curves=curves, has_raw=has_raw)


def _thinned(lines: list[str], points: int) -> list[str]:
    """Some of many lines: the last one, and every one with a test result, which few lines have."""
    every = max(1, len(lines) // points)
    last = len(lines) - 1
    return [line for k, line in enumerate(lines) if k % every == 0 or k == last or '"test_' in line]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of a thousand digits
        return None


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < 1 << 53 else None


def _stats(folder: RunFolder) -> list[Any]:
    return [found for name in LIMITS if (found := folder.stat(name)) is not None]


def _state(folder: RunFolder, series: Series, changed: float) -> str:
    if folder.stat("guarantee.json") is not None:
        return "finished"
    if time.time() - changed > _ALIVE:
        return "silent"
    return "running" if series.step else "starting"


def _facts(folder: RunFolder) -> tuple[dict[str, Any], str]:
    """The facts in the small files, and what is wrong with them."""
    facts: dict[str, Any] = {"epsilon": None, "budget": None, "delta": None, "model": "", "data": "", "seeded": False}
    try:
        if folder.stat("recipe.json") is not None:
            recipe = folder.object("recipe.json")
            plan = _table(recipe, "plan")
            facts |= {"model": _word(_table(recipe, "model")), "data": _word(_table(recipe, "data"))}
            facts |= {"budget": _real(plan.get("epsilon")), "delta": _real(plan.get("delta"))}
            facts["seeded"] = _table(recipe, "run").get("seed") is not None
        if folder.stat("guarantee.json") is not None:
            claim = folder.object("guarantee.json")
            facts |= {"epsilon": _real(claim.get("epsilon")), "delta": _real(claim.get("delta")) or facts["delta"]}
            facts["results"] = _results(folder)
            if facts["epsilon"] is None:
                return facts, "guarantee.json states no epsilon."
            for name in ("plan.json", "ledger.json"):  # a claim about nothing is none
                folder.object(name)
    except Unreadable as error:
        return facts, str(error)
    return facts, ""


def _results(folder: RunFolder) -> dict[str, float]:
    if folder.stat("report.json") is None:
        return {}
    outcome = _table(folder.object("report.json"), "outcome")
    return {name: value for name in ("test_accuracy", "test_loss") if (value := _real(outcome.get(name))) is not None}


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _word(table: dict[str, Any]) -> str:
    name = table.get("name")
    return name[:60] if isinstance(name, str) and name.isprintable() else ""


def _real(value: Any) -> float | None:
    if value == {"float": "inf"}:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < 0:
        return None
    return float(value) if value < 1e300 else math.inf  # an integer of a thousand digits, too


def _finite(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "inf" if value == math.inf else value

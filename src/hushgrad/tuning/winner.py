"""The output of a search: its winner with the guarantee of the whole search, or the statement that there is none."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.events import Compose
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.summary import write_report
from hushgrad.release.atomic import replacing
from hushgrad.release.erasure import destroy
from hushgrad.train.plan import Plan
from hushgrad.tuning.cost import ACCOUNTANT
from hushgrad.tuning.price import Priced, score_words
from hushgrad.tuning.space import edges

_COPIED = ("model.safetensors", "plan.json", "recipe.json")


@dataclass(frozen=True, order=True)
class Result:
    """The result of one trial, ordered by score and then by a random word, so that the best is unique."""

    score: float
    tie: str
    trial: int


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The outcome of a search. Without a winner (a Poisson number of trials can be 0) nothing was released, but all is paid."""

    guarantee: Guarantee
    naive_epsilon: float
    candidate: dict[str, Any] | None
    score: float | None
    test: dict[str, float]
    out: Path
    edges: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "out": str(self.out),
            **({"at_the_edge": list(self.edges)} if self.edges else {}),
            "guarantee": self.guarantee.to_json(),
            "claim": str(self.guarantee),
            "epsilon": self.guarantee.epsilon,
            "naive_epsilon": self.naive_epsilon,
            "candidate": self.candidate,
            "score": self.score,
            **self.test,
        }


def claim(search: Priced, vouched: tuple[str, ...] = ()) -> Guarantee:
    """The guarantee of the whole search; ``vouched`` lists what its journal could not check."""
    seeded = search.recipe.run.seed is not None
    return Guarantee(
        epsilon=search.cost.epsilon,
        delta=search.cost.delta,
        event=search.cost.event,
        accountant=ACCOUNTANT,
        relation=search.plan.relation,
        unit=search.plan.unit,
        notes=(*(("Reproducible: not private against whoever knows the seed",) if seeded else ()), *vouched),
    )


def released(search: Priced, best: Result | None, folder: Path, out: Path, run: dict[str, str], notes: tuple[str, ...]) -> Tuned:
    """Copy the winner out with the guarantee of the whole search; then erase everything else."""
    guarantee = _unbroken(claim(search, notes), folder)
    tuned = Tuned(guarantee=guarantee, naive_epsilon=search.cost.naive, candidate=None, score=None, test={}, out=out)
    if best is not None and (folder / f"{best.trial:05d}" / "guarantee.json").exists():  # else all trials were lost
        tuned = _copied(search, tuned, best, folder / f"{best.trial:05d}", run)
    else:
        write(out / "tuning.json", _record(search, tuned))  # marks a finished search
    destroy(out)  # the key, K, the losers and their scores
    return tuned


def _unbroken(guarantee: Guarantee, folder: Path) -> Guarantee:
    """Infinite where that of a trial is: the theorem is about trials that keep their own promise, losers too."""
    for file in sorted(folder.glob("[0-9]*/guarantee.json")):
        trial = found(file, Guarantee.from_json)
        if math.isinf(trial.epsilon):
            return replace(guarantee, epsilon=math.inf, event=Compose((guarantee.event, trial.event)))
    return guarantee


def _copied(search: Priced, tuned: Tuned, best: Result, winner: Path, run: dict[str, str]) -> Tuned:
    alone = found(winner / "guarantee.json", Guarantee.from_json)  # what its own run could not show, the search cannot either
    out, guarantee = tuned.out, replace(tuned.guarantee, notes=tuple(dict.fromkeys((*tuned.guarantee.notes, *alone.notes))))
    for name in _COPIED:
        shutil.copyfile(winner / name, out / name)
    _copy_metrics(winner / "metrics.jsonl", out / "metrics.jsonl")
    recipe, plan = found(winner / "recipe.json", Recipe.from_tables), found(winner / "plan.json", Plan.from_json)
    outcome = outcome_of(winner)
    outcome |= {"out": str(out), "guarantee": guarantee.to_json(), "claim": str(guarantee)}
    ledger = Ledger()
    # One charge for everything, however many trials.
    ledger.record(guarantee.event, times=int(outcome["steps"]), stream="search", **run)
    write(out / "ledger.json", ledger.to_json())
    tables = recipe.tables()
    chosen = {place: tables[place.partition(".")[0]][place.partition(".")[2]] for place in search.settings.over}
    test = {name: float(value) for name, value in outcome.items() if name.startswith("test_")}
    naive, at_ends = plan.guarantee().epsilon, tuple(edges(search.settings.over, chosen))
    told = {"naive_epsilon": naive, "candidate": chosen, "score": best.score, "test": test, "edges": at_ends}
    done = replace(tuned, guarantee=guarantee, **told)
    write_report(out, recipe, plan, outcome, guarantee, tuning=_record(search, done))
    return done


def _copy_metrics(source: Path, target: Path) -> None:
    """Copy the winner's metrics without the epsilon of its steps, which is the naive one and would contradict the claim."""
    if source.exists():
        lines = found(source, list, each_line=True)
        kept = [{name: value for name, value in line.items() if name != "epsilon"} for line in lines]
        target.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def _record(search: Priced, tuned: Tuned) -> dict[str, Any]:
    """The public record of the search, without K."""
    stopping = search.settings.stopping
    return {
        "method": f"random stopping, {stopping.name} (Papernot and Steinke 2022)",
        "mean_trials": stopping.mean,
        "candidates": len(search.settings.candidates),
        "over": sorted(search.settings.over),
        "score": score_words(search.settings),
        "chosen": tuned.candidate,
        "at_the_edge": list(tuned.edges),
        "naive_epsilon": tuned.naive_epsilon,
        "epsilon": tuned.guarantee.epsilon,
        "delta": tuned.guarantee.delta,
    }


def found(path: Path, read: Callable[[Any], Any], *, each_line: bool = False) -> Any:
    """The content of a file of the search. Errors never quote it, because it may be the key."""
    try:
        text = path.read_text(encoding="utf-8")
        return read([_check.parsed(line) for line in text.splitlines()] if each_line else _check.parsed(text))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
        raise ArgumentError(f"Expected {path.name} to be as it was written; it was damaged. Start a new search.") from None


def write(path: Path, content: Any) -> None:
    """Write atomically: half a file would be a search that cannot continue, or one that seems complete."""
    with replacing(path, mode=0o644) as new:
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def outcome_of(folder: Path) -> dict[str, Any]:
    """The outcome of a finished trial, from its report."""
    told: dict[str, Any] = found(folder / "report.json", lambda content: dict(content["outcome"]))
    return told

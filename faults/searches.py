"""Searches and fits that are killed: no row of noise is released with two results; see :mod:`chaos`, which runs them.

Here every life notes what leaves the release core, whoever called it, so that the trials of a search are seen as well. A search of
scikit-learn's kind keeps nothing on the disk: a later life is another search, and none of its random words may be an earlier one's.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lives
import numpy as np
import torch
from table import Trial
from torch.nn import functional as F

import hushgrad.estimators.randomness as randomness
from hushgrad.budget import Ledger
from hushgrad.estimators import DPGridSearch, DPLogisticRegression
from hushgrad.recipes import Recipe
from hushgrad.release.core import Noised, Release
from hushgrad.train import fit
from hushgrad.tuning import tune

_TABLES: dict[str, Any] = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 4.0, "delta": 1e-5, "batch_size": 64, "steps": 6},
    "optimizer": {"lr": 1.0},
    "run": {"threads": 1, "checkpoint_every": 2},
    "tune": {"over": {"optimizer.lr": [0.1, 0.3, 1.0]}, "mean": 3.0},
}


def _noted(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)


def _note_releases(path: Path) -> None:
    """From now on in this process: the row of noise and the result of every release, before anybody has it."""
    finished = Release.finished

    def noting(self: Release, noised: Noised, learning_rate: float | None) -> Any:
        row = self.source.z(noised.step, 0, torch.empty(8)).numpy().tobytes()
        sums = b"".join(total.detach().numpy().tobytes() for total in noised.sums.values())
        _noted(path, f"{hashlib.sha256(row).hexdigest()[:16]} {hashlib.sha256(sums).hexdigest()[:16]}\n")
        return finished(self, noised, learning_rate)

    Release.finished = noting  # type: ignore[method-assign]


def _tuned(folder: Path, kill_at: int | None) -> dict[str, Any]:
    _note_releases(folder / "releases")
    if kill_at is not None:
        lives.die_at(kill_at)
    out = folder / "run"
    begun = (out / "search" / "recipe.json").exists()
    if not (out / "tuning.json").exists():  # else an earlier life died behind its end, while it erased the search
        tune(None if begun else Recipe.from_tables(_TABLES), out, resume=begun)
    return {"released": (out / "tuning.json").exists() or (out / "report.json").exists()}


def _fitted(folder: Path, kill_at: int | None) -> dict[str, Any]:
    _note_releases(folder / "releases")
    if kill_at is not None:
        lives.die_at(kill_at)
    data, model, optimizer = lives.parts(lazy=False)
    fit(model, F.cross_entropy, optimizer, data, lives.PLANS["dpsgd"](), progress=False, checkpoint=folder / "run", save_every=4)
    return {"released": True}


def killed(life: Callable[[Path, int | None], dict[str, Any]], touches: int) -> Callable[[Path], Trial]:
    """Killed at random touches of the disk until it ends: it goes on each time, and no row has two results."""

    def dies(folder: Path) -> Trial:
        deaths, last = 0, None
        for _ in range(random.randint(6, 10)):
            last = lives.outcome(*lives.fork(partial(life, folder, random.randint(1, touches))))
            if last is not None:
                break
            deaths += 1
        if last is None:
            last = lives.outcome(*lives.fork(partial(life, folder, None)))
        fine = last is not None and last.get("released") is True and lives.rows_released_twice(folder) == 0
        return Trial(fine, "no row twice" if fine else str(last), deaths)

    return dies


def _paid(folder: Path, kill_at: int | None) -> dict[str, Any]:
    """A search by a public seed that a ledger pays: its end follows from the seed, so that two searches can be compared."""
    if kill_at is not None:
        lives.die_at(kill_at)
    out, ledger = folder / "run", Ledger(folder / "budget.db")
    begun = (out / "search" / "recipe.json").exists()
    recipe = Recipe.from_tables({**_TABLES, "run": {**_TABLES["run"], "seed": 27}}).paid_by(ledger.place, "digits")
    if begun or not (out / "tuning.json").exists():  # else an earlier life died after its end
        tune(None if begun else recipe, out, resume=begun)
    model = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    epsilon = json.loads((out / "guarantee.json").read_text())["epsilon"]
    status = ledger.status("digits")
    return {"model": model, "epsilon": epsilon, "spent": status.epsilon, "runs": len(ledger.reservations())}


def paid(folder: Path) -> Trial:
    """Killed at random touches of the disk and at random instants: the end of a search that nothing disturbed, and its price once."""
    for name in ("calm", "killed"):
        (folder / name).mkdir()
        Ledger.create(folder / name / "budget.db").add("digits", epsilon=1.0, delta=1e-4)
    calm = lives.outcome(*lives.fork(partial(_paid, folder / "calm", None)))
    deaths, last = 0, None
    for life in range(random.randint(4, 8)):
        pid, pipe = lives.fork(partial(_paid, folder / "killed", random.randint(1, 150) if life % 2 else None))
        if not life % 2:
            time.sleep(random.uniform(0.0, 3.0))
            os.kill(pid, signal.SIGKILL)
        last = lives.outcome(pid, pipe)
        if last is not None:
            break
        deaths += 1
    last = last or lives.outcome(*lives.fork(partial(_paid, folder / "killed", None)))
    fine = calm is not None and "model" in calm and last == calm
    return Trial(fine, "the same end, paid once" if fine else f"{last}, undisturbed {calm}", deaths)


def _searched(words: Path) -> dict[str, Any]:
    bits = randomness._System.bits

    def noting(self: Any, count: int) -> np.ndarray:
        drawn = bits(self, count)
        _noted(words, "".join(f"{word:016x}\n" for word in drawn.tolist()))
        return drawn

    randomness._System.bits = noting  # type: ignore[method-assign]
    X = np.random.default_rng(0).normal(size=(400, 5)) / 4
    base = DPLogisticRegression(data_norm=2.0, out_of_bounds="clip", classes=[0, 1])
    DPGridSearch(base, {"l2": [1.0, 10.0]}, epsilon=3.0, delta=1e-6, mean_trials=20.0).fit(X, (X[:, 0] > 0).astype(int))
    return {}


def grid_search(folder: Path) -> Trial:
    """Forked from one process and killed at any instant: no random word of one life is another's, and nothing is left on the disk."""
    deaths, words, there = 0, folder / "words", folder / "there"
    there.mkdir()
    before = Path.cwd()
    os.chdir(there)
    try:
        for _ in range(random.randint(6, 10)):
            pid, pipe = lives.fork(partial(_searched, words))
            time.sleep(random.uniform(0.0, 0.5))
            os.kill(pid, signal.SIGKILL)
            deaths += lives.outcome(pid, pipe) is None
        last = lives.outcome(*lives.fork(partial(_searched, words)))
    finally:
        os.chdir(before)
    drawn = words.read_text().split()
    fine = last == {} and len(set(drawn)) == len(drawn) > 0 and not list(there.iterdir())
    return Trial(fine, f"{len(drawn):,} random words, none twice" if fine else f"{last}, {len(drawn)}, {len(set(drawn))}", deaths)


FAULTS: list[tuple[str, Callable[[Path], Trial]]] = [
    ("hushgrad tune, SIGKILL at random touches of the disk", killed(_tuned, 120)),
    ("hushgrad tune with a ledger, SIGKILL at random touches and instants", paid),
    ("fit with a folder, SIGKILL at random touches of the disk", killed(_fitted, 60)),
    ("DPGridSearch, SIGKILL at random instants", grid_search),
]

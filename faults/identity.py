"""Faults that would release a row of noise twice, or spend a budget twice; see :mod:`chaos`, which runs them.

Every life notes each release before the optimizer has it: the row of noise, and the result. Afterwards all releases of all lives
are compared in pairs: one row with two results is a failure, whatever else happened.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lives
from table import Trial

from hushgrad.budget import Ledger
from hushgrad.errors import BudgetExceeded, HushgradError
from hushgrad.recipes import Recipe, train

Fault = Callable[[Path], Trial]


def _fine(result: dict[str, Any] | None, *errors: str) -> bool:
    return result is not None and ("error" not in result or result["error"] in errors)


def every_write(plan: str) -> Fault:
    """Killed at each write from the first one on, and started again from other first weights."""

    def killed(folder: Path) -> Trial:
        deaths, start = 0, random.randrange(1000)
        for write in range(1, 46):
            home = f"{folder}/{write}/run"
            first = lives.life(home, plan, kill_at=write, start=start, key=None)
            deaths += first == [None]
            last = lives.outcome(*lives.fork(partial(lives.train, home, plan, start=start + 1, key=None, on_step=_leave)))
            if not _fine(last, "KeyboardInterrupt"):
                return Trial(False, f"write {write}: {last}")
        return Trial(lives.rows_released_twice(folder) == 0, "no row twice", deaths)

    return killed


def _leave(metrics: dict[str, Any]) -> None:
    if metrics["step"] == 9:  # further than any of these deaths
        raise KeyboardInterrupt


def mixed_files(folder: Path) -> Trial:
    """Key, journal and state, each of the run, of an earlier time, of another run, or lost: all 64 folders."""
    names = ("key.json", "journal", "state.safetensors")
    deaths = 0
    for home, end in (("old", 5), ("run", 14), ("other", 14)):
        if home == "run":  # moved, it is the run itself; what stays is the copy
            (folder / "old").rename(folder / "run")
            shutil.copytree(folder / "run", folder / "old")
        else:
            (folder / home).mkdir()
        train = partial(lives.train, f"{folder}/{home}/run", "dpsgd", on_step=partial(_die_after, end))
        run = partial(train, key=bytes(32)) if home == "other" else train
        deaths += lives.outcome(*lives.fork(run)) is None
    (away := folder / "away").mkdir()
    for home in ("old", "run", "other"):  # beside its original no copy goes on
        (folder / home).rename(away / home)
    refused, choices = 0, list(itertools.product(("run", "old", "other", None), repeat=3))
    for number, choice in enumerate(choices):
        mixed = folder / f"mix{number}" / "run"
        mixed.mkdir(parents=True)
        for name, source in zip(names, choice, strict=True):
            if source is not None:
                shutil.copy2(away / source / "run" / name, mixed / name)
        (last,) = lives.life(str(mixed), "dpsgd", key=None)
        if not _fine(last, "ArgumentError"):
            return Trial(False, f"{choice}: {last}", deaths)
        refused += last is not None and "error" in last
    return Trial(lives.rows_released_twice(folder) == 0, f"{refused} of {len(choices)} refused", deaths)


def _die_after(step: int, metrics: dict[str, Any]) -> None:
    if metrics["step"] == step:
        os.kill(os.getpid(), signal.SIGKILL)


def two_owners(folder: Path) -> Trial:
    """A second process in the folder is refused by name while the first lives, and goes on when it is killed."""
    slow = partial(lives.train, f"{folder}/run", "dpsgd", on_step=lambda _: time.sleep(0.05))
    pid, pipe = lives.fork(slow)
    while not (folder / "releases").exists():
        time.sleep(0.01)
    (second,) = lives.life(f"{folder}/run", "dpsgd")
    os.kill(pid, signal.SIGKILL)
    first = lives.outcome(pid, pipe)
    (third,) = lives.life(f"{folder}/run", "dpsgd")
    told = "" if second is None else second.get("message", "")
    refused = f"process {pid} " in told or first is not None  # unless the first had finished
    fine = refused and _fine(third) and lives.rows_released_twice(folder) == 0
    return Trial(fine, told[:110], int(first is None))


def changed(what: str) -> Fault:
    """Killed, then resumed with something changed: stopped before a second value is released; unchanged it goes on."""

    def resumed(folder: Path) -> Trial:
        plan = random.choice(["dpsgd", "blt"])
        reference = lives.life(f"{folder}/reference/run", plan)[0]
        death = partial(_die_after, random.choice([5, 8, 11, 14]))  # two steps after a checkpoint
        dead = lives.outcome(*lives.fork(partial(lives.train, f"{folder}/run", plan, on_step=death))) is None
        (other,) = lives.life(f"{folder}/run", plan, changed=what)
        (last,) = lives.life(f"{folder}/run", plan)
        stopped = other is not None and other.get("error") == "ArgumentError"
        fine = dead and stopped and last is not None and "error" not in last and lives.rows_released_twice(folder) == 0
        same = bool(fine and lives.end_of(last) == lives.end_of(reference))
        return Trial(same, (other or {}).get("message", "")[:110], 1)

    return resumed


def augmented(folder: Path) -> Trial:
    """Random examples in worker processes: killed at any instant and loaded by another number of workers, the same end."""
    reference = lives.life(f"{folder}/reference/run", "dpsgd", augmented=True)[0]
    deaths = 0
    for _ in range(6):
        options = {"augmented": True, "workers": random.choice([0, 1, 2])}
        deaths += lives.life(f"{folder}/run", "dpsgd", patience=random.uniform(0.1, 0.6), **options) == [None]
    last = lives.life(f"{folder}/run", "dpsgd", augmented=True, workers=1)[0]
    same = _fine(last) and last is not None and lives.end_of(last) == lives.end_of(reference)
    return Trial(same and lives.rows_released_twice(folder) == 0, "the same end", deaths)


# Budgets ----------------------------------------------------------------------------------------------------------------------


def _recipe(place: str) -> Recipe:
    tables = {
        "model": {"name": "logistic"},
        "data": {"name": "digits"},
        "plan": {"noise_multiplier": 2.0, "delta": 1e-5, "batch_size": 64, "steps": 30},
        "run": {"threads": 1, "checkpoint_every": 5},
    }
    return Recipe.from_tables(tables).paid_by(place, "patients")


def _paid(place: str, out: Path, resume: bool) -> int:
    try:
        train(_recipe(place), out, resume=resume, progress=False)
    except BudgetExceeded:
        return 0
    return 1


def paid_by(place: str, folder: Path) -> Trial:
    """Five runs at once on a budget for three and a half, some killed; resumed or settled. Never more than the budget."""
    plan = _recipe("x").make_plan(_recipe("x").make_data())
    ledger = Ledger.create(place)
    one = plan.guarantee().epsilon
    ledger.add("patients", epsilon=2.1 * one, delta=5e-5, composition="pld")
    outs = [folder / str(number) for number in range(5)]
    children = [lives.fork(partial(_paid, place, out, False)) for out in outs]
    time.sleep(random.uniform(0.5, 3.0))
    for pid, _ in random.sample(children, 3):
        os.kill(pid, signal.SIGKILL)
    deaths = sum(lives.outcome(*child) is None for child in children)
    for out in outs:
        _go_on_or_settle(ledger, place, out)
    status = ledger.status("patients")
    whole = Ledger(place).verify().ok and status.epsilon <= status.dataset.epsilon
    covered = all(_covered(ledger, out) for out in outs)
    return Trial(whole and covered, f"epsilon {status.epsilon:.3f} of {status.dataset.epsilon:.3f}", deaths)


def _go_on_or_settle(ledger: Ledger, place: str, out: Path) -> None:
    if (out / "guarantee.json").exists() or not (out / "reservation.json").exists():
        return
    if random.random() < 0.5 and (out / "recipe.json").exists():
        lives.outcome(*lives.fork(partial(_paid, place, out, True)))
    if not (out / "guarantee.json").exists():
        try:
            ledger.settle(_reservation(out), out)
        except HushgradError as error:
            raise SystemExit(f"settle: {error}") from None


def _reservation(out: Path) -> str:
    import json

    return str(json.loads((out / "reservation.json").read_text())["reservation"])


def _covered(ledger: Ledger, out: Path) -> bool:
    """The charge covers every step whose metrics were written."""
    if not (out / "reservation.json").exists():
        return True
    taken = len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0
    booked = ledger.reservation(_reservation(out))
    charged = booked.charged if booked.charged is not None else booked.reserved
    return taken == 0 or getattr(charged, "times", 1) >= taken


def on_sqlite(folder: Path) -> Trial:
    """The ledger is a file."""
    return paid_by(str(folder / "budget.db"), folder)


def on_postgresql(folder: Path) -> Trial:
    """The ledger is on a real server, started here where one is installed."""
    tools = _programs()
    if tools is None:
        return Trial(True, "not tried: no PostgreSQL server is installed here")
    with _server(tools) as place:
        return paid_by(place, folder)


def _programs() -> Path | None:
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    usable = next((folder for folder in folders if (folder / "initdb").exists()), None)
    if usable is None or (os.getuid() == 0 and subprocess.run(["id", "postgres"], capture_output=True, check=False).returncode):
        return None
    return usable


@contextmanager
def _server(tools: Path) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="hushgrad-chaos-pg-"))
    as_user = []
    if os.getuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    make = [*as_user, str(tools / "initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", "postgres"]
    subprocess.run(make, check=True, capture_output=True)
    control = [*as_user, str(tools / "pg_ctl"), "-D", str(folder / "data"), "-l", str(folder / "log"), "-w"]
    options = f"-c listen_addresses='' -c unix_socket_directories={folder}"  # a port may be taken by the time it is asked for
    subprocess.run([*control, "-o", options, "start"], check=True, stdout=subprocess.DEVNULL)
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder)


FAULTS: list[tuple[str, Fault]] = [
    ("SIGKILL at every write from the start to the first save, other first weights", every_write("dpsgd")),
    ("the same with correlated noise", every_write("blt")),
    ("key, journal, state: lost, old, another run's", mixed_files),
    ("two owners of one folder", two_owners),
    ("one record changed before a resume", changed("record")),
    ("learning rate changed before a resume", changed("rate")),
    ("augmentation in workers, killed", augmented),
    ("5 runs on a nearly full ledger, SQLite", on_sqlite),
    ("5 runs on a nearly full ledger, PostgreSQL", on_postgresql),
]

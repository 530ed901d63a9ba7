"""Everything that can go wrong around a run, made to go wrong: ``make chaos``.

Each fault is a function that disturbs real runs in child processes and counts how many ended as they must: the resumed run
bit-identical to the undisturbed one, the ledger complete, the error one clear sentence. The seed is printed; the same seed
draws the same instants (though not the same microseconds). Exit code 1 if anything did not survive.

    python faults/chaos.py --seconds 300 --seed 7 --docs docs/reliability.md
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import command
import identity
import lives
import searches
from table import Row, Trial

from hushgrad.budget import Ledger
from hushgrad.cli.main import main as hushgrad
from hushgrad.errors import BudgetExceeded
from hushgrad.events import Gaussian

_NOBODY = 65534
_FAULTS: list[tuple[str, Callable[[Path], Trial]]] = []


def fault(name: str) -> Callable[[Callable[[Path], Trial]], Callable[[Path], Trial]]:
    """Register a fault: it is given an empty folder, and says whether the house survived and what was seen."""

    def register(function: Callable[[Path], Trial]) -> Callable[[Path], Trial]:
        _FAULTS.append((name, function))
        return function

    return register


def _same_end(folder: Path, plan: str, disturbed: Callable[[str], dict[str, Any] | None], *errors: str, deaths: int = 0) -> Trial:
    """Disturb a run, which must end with one of ``errors``; resume it; compare with the run that nobody disturbed."""
    reference = lives.life(f"{folder}/reference", plan)[0]
    seen = disturbed(f"{folder}/disturbed")
    final = lives.life(f"{folder}/disturbed", plan)[0]
    told = "" if seen is None else f"{seen.get('error', 'no error')}: {seen.get('message', '')}"
    expected = seen is not None and told.startswith(errors)
    same = expected and final and "error" not in final and lives.end_of(final) == lives.end_of(reference)
    return Trial(bool(same), told, deaths)


def _instant() -> int | str:
    some: list[int | str] = ["any", random.randint(1, 40)]
    return random.choice(some)


def _kills(plan: str, **options: Any) -> Callable[[Path], Trial]:
    def killed(folder: Path) -> Trial:
        instants = ["any" if options else _instant() for _ in range(random.randint(6, 10))]
        result = lives.lives(str(folder), plan, instants, **options)
        final, end = result["final"], lives.end_of(result["reference"])
        if "error" in final:
            return Trial(False, f"after {instants}: {final['error']}: {final.get('message', '')}", result["deaths"])
        same = lives.end_of(final) == end
        return Trial(same, "the same end" if same else f"after {instants}: another end than {end}", result["deaths"])

    return killed


for _plan, _name in (("dpsgd", "DP-SGD"), ("blt", "DP-FTRL (BLT)"), ("kalman", "Kalman")):
    fault(f"SIGKILL at random instants, {_name}")(_kills(_plan))
fault("SIGKILL of one or both of 2 ranks")(_kills("blt", ranks=2))


@fault("disk full while saving")
def disk_full(folder: Path) -> Trial:
    """The system lets no file grow beyond a size that the first checkpoint still has, and a later one has not."""
    full_at = random.randint(4, 20)

    def fill(metrics: dict[str, Any]) -> None:
        if metrics["step"] == full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))

    def disturbed(directory: str) -> dict[str, Any] | None:
        return lives.outcome(*lives.fork(partial(lives.train, directory, "blt", on_step=fill)))

    return _same_end(folder, "blt", disturbed, "StorageError")


@fault("folder turns read-only")
def read_only(folder: Path) -> Trial:
    """The process loses the right to write its folder in the middle of a run."""
    directory = folder / "disturbed"
    directory.mkdir()
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            return Trial(True, "not tried: another user cannot enter this temporary folder")

    def lock(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 7:
            directory.chmod(0o555)
            if os.geteuid() == 0:  # root may write anywhere: become nobody
                os.setuid(_NOBODY)

    def disturbed(path: str) -> dict[str, Any] | None:
        seen = lives.outcome(*lives.fork(partial(lives.train, path, "dpsgd", on_step=lock)))
        directory.chmod(0o755)
        return seen

    return _same_end(folder, "dpsgd", disturbed, "StorageError")


@fault("checkpoint with a flipped bit or cut short")
def damaged(folder: Path) -> Trial:
    """Any bit of any file: the run is refused, never resumed from something else; with the file put back it goes on."""
    directory = f"{folder}/disturbed"
    if lives.life(directory, "blt", kill_at=random.choice([19, 24, 29])) != [None]:
        return Trial(False, "the run was not killed")

    def disturbed(path: str) -> dict[str, Any] | None:
        file = Path(path) / random.choice(["state.safetensors", "key.json", "journal"])
        whole = file.read_bytes()
        place = random.randrange(len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ (1 << random.randrange(8))]) + whole[place + 1 :]
        file.write_bytes(flipped if file.name == "journal" else random.choice([flipped, whole[:place]]))
        seen = lives.life(path, "blt")[0]
        file.write_bytes(whole)
        return seen

    return _same_end(folder, "blt", disturbed, "ArgumentError", deaths=1)


@fault("clock jumps by days, both ways")
def clock(folder: Path) -> Trial:
    """Nothing that matters may depend on the time of day, nor on a clock that only goes forward."""

    def jump(_: dict[str, Any]) -> None:
        offset = random.uniform(-1e6, 1e6)
        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, lambda offset=offset: offset)

    reference = lives.life(f"{folder}/reference", "kalman")[0]
    seen = lives.outcome(*lives.fork(partial(lives.train, f"{folder}/disturbed", "kalman", on_step=jump)))
    same = seen is not None and "error" not in seen and lives.end_of(seen) == lives.end_of(reference)
    return Trial(same, "no effect")


@fault("a data-loading worker dies")
def worker(folder: Path) -> Trial:
    """The loader notices, or torch does, by a signal, wherever the program is then; the run resumes."""
    fatal = random.randint(2, lives.STEPS - 4)

    def kill_worker(metrics: dict[str, Any]) -> None:
        if metrics["step"] == fatal:
            for child in multiprocessing.active_children():
                child.kill()

    def disturbed(directory: str) -> dict[str, Any] | None:
        return lives.outcome(*lives.fork(partial(lives.train, directory, "dpsgd", on_step=kill_worker, workers=1)))

    return _same_end(folder, "dpsgd", disturbed, "WorkerLost", "RuntimeError: DataLoader worker", deaths=1)


@fault("a rank dies, the others notice")
def rank(folder: Path) -> Trial:
    """The surviving rank ends with an error in bounded time instead of waiting for ever."""
    began = time.monotonic()
    random_choice = random.choice
    random.choice = lambda seq: seq[-1]  # the last rank alone
    try:
        results = lives.life(f"{folder}/run", "dpsgd", ranks=2, patience=0.25)
    finally:
        random.choice = random_choice
    waited = time.monotonic() - began
    survivor = results[0]
    if survivor is None or "error" not in survivor:  # it had finished before the other died
        return Trial(waited < 60, "finished first")
    final = lives.life(f"{folder}/run", "dpsgd", ranks=2)[0]
    same = waited < 60 and final is not None and "error" not in final
    return Trial(same, f"{survivor['error']} after {waited:.0f} s", 1)


@fault("8 writers on one budget ledger, some killed")
def writers(folder: Path) -> Trial:
    """Whoever dies whenever: the budget is never exceeded, the chain is whole, and what was promised is recorded."""
    place, budget = folder / "budget.db", 6.0
    Ledger.create(place).add("patients", epsilon=budget, delta=1e-6, composition="pld")

    def spend() -> int:
        ledger, granted = Ledger(place), 0
        for turn in range(6):
            try:
                ledger.reserve("patients", Gaussian(4.0 + turn % 3))
                granted += 1
            except BudgetExceeded:
                break
        return granted

    children = [lives.fork(spend) for _ in range(8)]
    time.sleep(random.uniform(0.05, 1.0))
    for pid, _ in random.sample(children, 3):
        os.kill(pid, signal.SIGKILL)
    granted: list[Any] = [lives.outcome(*child) for child in children]
    ledger = Ledger(place)
    status, told = ledger.status("patients"), sum(count for count in granted if isinstance(count, int))
    fine = ledger.verify().ok and status.epsilon <= budget and len(status.reservations) >= told
    seen = f"{len(status.reservations)} reservations, epsilon {status.epsilon:.3f} of {budget:g}, chain whole"
    return Trial(fine, seen, granted.count(None))


@fault("Ctrl-C and SIGTERM of hushgrad train")
def interrupted(folder: Path) -> Trial:
    """The step is finished, a checkpoint saved, the way on printed; resumed, the run ends with the same weights.

    Before its first step and behind its last one a signal ends it as any program: it is resumed as well.
    """
    words = ["--quiet", "--set", "run.seed=1", "--set", "run.threads=1", "--set", "plan.steps=30"]
    ends = []
    for name in ("reference", "disturbed"):
        out = folder / name
        pid, pipe = _command(folder, *words, "--out", str(out))
        if name == "disturbed":
            while not (out / "metrics.jsonl").exists() and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.02)
            os.kill(pid, random.choice([signal.SIGINT, signal.SIGTERM]))
        code = lives.outcome(pid, pipe)
        told = (folder / "told").read_text()
        steps = len((out / "metrics.jsonl").read_bytes().splitlines())
        if code not in (0, 130, *([None] if steps in (0, 30) else [])) or "Traceback" in told:
            return Trial(False, f"exit code {code} after {steps} steps: {told[-300:]}")
        if code != 0:
            lives.outcome(*_command(folder, "--quiet", "--resume", "--out", str(out)))
        ends.append((out / "model.safetensors").read_bytes())
    return Trial(ends[0] == ends[1], "resumed as printed")


def _command(folder: Path, *words: str) -> tuple[int, int]:
    """``hushgrad train`` in a process of its own; what it says is in the file ``told``."""

    def task() -> int:
        told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(told, 1)
        os.dup2(told, 2)
        try:
            return hushgrad(["train", *words])
        except SystemExit as ended:
            return int(ended.code or 0)

    return lives.fork(task)


for _name, _function in (*identity.FAULTS, *searches.FAULTS):
    fault(_name)(_function)


# The command ---------------------------------------------------------------------------------------------------------------


def run(seconds: float, seed: int, *, only: str = "") -> list[Row]:
    """Every fault once, then again in turn until the time is over."""
    random.seed(seed)
    lives.warm_up()
    chosen = [(name, function) for name, function in _FAULTS if command.is_chosen(name, only)]
    rows = {name: Row(name) for name, _ in chosen}
    deadline, turn = time.monotonic() + seconds, 0
    while turn < len(chosen) or time.monotonic() < deadline:
        name, function = chosen[turn % len(chosen)]
        turn += 1
        with tempfile.TemporaryDirectory() as folder:
            trial = function(Path(folder))
        rows[name] = rows[name].counted(*trial)
        print(f"{'survived' if trial.survived else 'FAILED'}  {name}: {trial.seen[:160]}", flush=True)
    return list(rows.values())


def main() -> int:
    """See the module's docstring."""
    options = command.parser(__doc__, seconds=300.0).parse_args()
    return command.report("chaos", options, command.seed_of(options), run, good="all survived")


if __name__ == "__main__":
    sys.exit(main())

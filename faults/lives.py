"""Runs that die and rise again: a small training run, its processes forked, killed and resumed.

One process imports torch and then forks a child for every life of a run, so that dozens of deaths take seconds. A run of two
ranks is two children over gloo. ``end_of`` is what must not depend on how often a run has died.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import hushgrad.release.atomic as atomic
import hushgrad.release.journal_frames as frames
import hushgrad.train.checkpoint as checkpoints
from hushgrad.denoise import Kalman
from hushgrad.noise import BLT, Source
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.fitting import run_steps
from hushgrad.train.private import Private

STEPS = 24
_COMMON: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 8, "dataset_size": 64, "average": "ema"}
PLANS: dict[str, Callable[[], Plan]] = {
    "dpsgd": lambda: Plan.dpsgd(steps=STEPS, **_COMMON),
    "blt": lambda: Plan.dpftrl(epochs=3, noise=BLT(buffers=2), **_COMMON),
    "kalman": lambda: Plan.dpsgd(steps=STEPS, denoise=Kalman(kappa=0.7, gamma=0.5), **_COMMON),
    "lazy": lambda: Plan.dpsgd(steps=STEPS, **{**_COMMON, "average": None}),
}
_RANK_TIMEOUT = timedelta(seconds=20)


def train(
    directory: str,
    plan: str,
    *,
    key: bytes | None = bytes(range(32)),
    kill_at: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    workers: int = 0,
    start: int = 0,
    changed: str = "",
    augmented: bool = False,
) -> dict[str, Any]:
    """One life of the run in ``directory``; it dies at its ``kill_at``-th touch of the disk, if that is given.

    ``start`` draws other first weights, ``changed`` says what is not as before ("record" or "rate"). Every release is noted in the
    file ``releases`` beside the directory before the optimizer has it.
    """
    if kill_at is not None:
        die_at(kill_at)
    data, model, optimizer = parts(lazy=plan == "lazy", start=start)
    if changed == "record":
        data.tensors[0][7] += 1
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    private = make_private(model, optimizer, PLANS[plan](), key=key, lazy_tables=plan == "lazy")
    checkpoint = Checkpoint(directory, private, extras={"schedule": schedule})
    first = private.steps
    if changed == "rate":
        schedule.base_lrs = [2 * rate for rate in schedule.base_lrs]
        optimizer.param_groups[0]["lr"] *= 2
    optimizer.register_step_pre_hook(partial(_note, Path(directory).parent / "releases", private))

    def save(metrics: dict[str, Any]) -> None:
        if metrics["step"] % 3 == 0:
            checkpoint.save(notes={"step": metrics["step"]})

    callbacks = [save] if on_step is None else [on_step, save]
    records = Augmented(data) if augmented else data
    run_steps(private, F.cross_entropy, records, scheduler=schedule, callbacks=callbacks, num_workers=workers)
    with nullcontext() if private.plan.average is None else private.averaged():
        averaged = _hash(model)
    groups = json.dumps(optimizer.state_dict()["param_groups"])
    ledger = private.ledger.to_json()
    return {"weights": _hash(model), "averaged": averaged, "groups": groups, "ledger": ledger, "first": first}


class Augmented(Dataset[Any]):
    """Noise from torch, numpy and Python on every example."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + 0.1 * torch.randn(6) + float(np.random.rand()) + random.random(), y


def _note(path: Path, private: Private, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """One short line (it must fit where the disk is full): which row of which key's noise was released, and with which result."""
    grads = b"".join(p.grad.detach().numpy().tobytes() for p in private.model.parameters() if p.grad is not None)
    row = Source(key=private.key.secret).z(private.steps - 1, 0, torch.empty(8)).numpy().tobytes()
    line = f"{hashlib.sha256(row).hexdigest()[:16]} {hashlib.sha256(grads).hexdigest()[:16]}\n".encode()
    if not path.exists():
        path.touch()
        path.chmod(0o666)  # a process that has lost its rights still says what it released
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(file, line)
    os.close(file)


def rows_released_twice(folder: str | Path) -> int:
    """Of all pairs of releases under one row of noise, by whichever lives: how many rows gave different results."""
    results: dict[str, set[str]] = {}
    for path in Path(folder).rglob("releases"):
        for line in path.read_text().splitlines():
            row, result = line.split()
            results.setdefault(row, set()).add(result)
    return sum(len(found) > 1 for found in results.values())


def parts(*, lazy: bool, start: int = 0) -> tuple[TensorDataset, nn.Module, torch.optim.Optimizer]:
    """Data, model and optimizer: words in a table of which few rows are read at a time, or numbers."""
    torch.manual_seed(0)
    inputs = torch.randint(200, (64, 4)) if lazy else torch.randn(64, 6)
    targets = torch.randint(3, (64,))
    torch.manual_seed(start)
    first = nn.EmbeddingBag(200, 8) if lazy else nn.Linear(6, 8)
    model = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if lazy else torch.optim.AdamW(model.parameters(), lr=0.05)
    return TensorDataset(inputs, targets), model, optimizer


def end_of(result: dict[str, Any]) -> dict[str, Any]:
    """What the end of a run is compared by: weights, averaged weights, optimizer and ledger, bit for bit."""
    return {part: result[part] for part in ("weights", "averaged", "groups", "ledger")}


def _hash(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def die_at(call: int) -> None:
    """From now on the process counts its touches of the disk, and dies just before the given one or in the middle of it."""
    calls = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                if function is write_tree:
                    args[0].write_bytes(b"half a checkp")
                if function is write and random.random() < 0.5:  # a frame is aligned: the kernel writes all of it or nothing
                    function(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    write_tree, write = checkpoints.write_tree, frames.Frames._write
    frames.Frames._write = dying(write)  # type: ignore[method-assign]
    checkpoints.write_tree, atomic._flush, os.replace = dying(write_tree), dying(atomic._flush), dying(os.replace)  # type: ignore[assignment]


# Processes -----------------------------------------------------------------------------------------------------------------


def fork(task: Callable[[], Any]) -> tuple[int, int]:
    """A child that runs ``task`` and writes its result, or its error, as JSON into a pipe: (process, pipe)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    code = 0
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001  (whatever happens in a child is told to its parent)
        result, code = {"error": type(error).__name__, "message": str(error)}, 1
    os.write(writer, json.dumps(result).encode())
    os._exit(code)


def outcome(pid: int, reader: int) -> dict[str, Any] | None:
    """The result of a child; None if it was killed."""
    out = b""
    while chunk := os.read(reader, 1 << 16):
        out += chunk
    os.close(reader)
    os.waitpid(pid, 0)
    return json.loads(out) if out else None


def life(directory: str, plan: str, *, ranks: int = 1, kill_at: int | None = None, patience: float | None = None, **options: Any):
    """One life: the result of every rank. After ``patience`` seconds one rank chosen at random, or all, are killed."""
    with tempfile.NamedTemporaryFile() as meeting_point:
        tasks = [partial(train, directory, plan, kill_at=kill_at, **options)]
        if ranks > 1:
            tasks = [partial(_ranked, meeting_point.name, rank, ranks, directory, plan) for rank in range(ranks)]
        children = [fork(task) for task in tasks]
        if patience is not None:
            time.sleep(patience)
            victims = random.choice([children, *[[child] for child in children]])
            for pid, _ in victims:
                os.kill(pid, signal.SIGKILL)
        return [outcome(*child) for child in children]


def _ranked(meeting_point: str, rank: int, ranks: int, directory: str, plan: str) -> dict[str, Any]:
    store = torch.distributed.FileStore(meeting_point, ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_RANK_TIMEOUT)
    return train(directory, plan)


def lives(directory: str, plan: str, kills: list[int | str], **options: Any) -> dict[str, Any]:
    """The undisturbed run, and one that is killed at each of ``kills`` (a touch of the disk, or "any" instant)."""
    reference = life(f"{directory}/reference", plan, **options)[0]
    deaths, final = 0, None
    for kill in kills:
        when: dict[str, Any] = {"patience": random.uniform(0.0, 0.4)} if kill == "any" else {"kill_at": kill}
        results = life(f"{directory}/killed", plan, **when, **options)
        if None not in results:
            final = results[0]
            break
        deaths += 1
    if final is None:
        final = life(f"{directory}/killed", plan, **options)[0]
    return {"reference": reference, "final": final, "deaths": deaths}


@cache
def warm_up() -> None:
    """What torch imports on first use is imported once, not in every life, and is garbage in none."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for plan in PLANS:
            train(f"{directory}/{plan}", plan)
    gc.collect()
    gc.freeze()  # a life's proofs go through what is its own


def main(options: dict[str, Any]) -> dict[str, Any]:
    """What came of each of the ``scenarios``, one after the other; tests/stories/several_processes.py starts it."""
    random.seed(options["seed"])
    warm_up()
    return {
        name: lives(f"{options['folder']}/{name}", plan, kills, **more)
        for name, (plan, kills, more) in options["scenarios"].items()
    }

"""Run a test's program in several fresh processes that are joined by gloo, and read what each of them found.

Importing torch, and transformers even more, takes longer than most of these tests. So a *nursery*, one for each set of imports,
imports once and then forks: every process of every run is a new one, with nothing of an earlier run in it.

A program is a Python file with a function ``main(options) -> found``, both of them JSON.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from patience import HANGS, wait_until

__all__ = ["Child", "run", "start"]

USUAL = (
    "hushgrad.accounting",
    "hushgrad.denoise",
    "hushgrad.noise",
    "hushgrad.release.placement.lockstep",
    "hushgrad.train",
    "hushgrad.train.attached",
    "scipy.signal",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


class Child:
    """A process of a run, asked for and ended through its nursery."""

    def __init__(self, nursery: _Nursery, pid: int, errors: Path) -> None:
        self._nursery, self.pid, self._errors = nursery, pid, errors
        self.returncode: int | None = None

    def communicate(self) -> tuple[None, str]:
        """Wait for its end; what it wrote to its standard error."""
        wait_until(lambda: self.poll() is not None)
        return None, self._errors.read_text()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Nursery:
    """The parent of all processes that share these imports."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        # As for certified runs: the library is asked for products that do not depend on their place, before its first one.
        environment = {
            "MKL_CBWR": "AUTO,STRICT",
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, __file__, *imports]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        atexit.register(self._process.stdin.close)  # type: ignore[union-attr]

    def ask(self, question: dict) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the parent of all processes has ended by itself ({self._process.wait()}): see its standard error"
        return json.loads(answer)


_nursery = lru_cache(maxsize=None)(_Nursery)


def start(
    program: Path, directory: Path, world: int, options: dict, *, imports: tuple[str, ...] = USUAL, group: bool = True
) -> list[Child]:
    """``world`` processes of ``program``, each with ``options``; they write to ``directory/out.RANK``.

    Without ``group`` a single process is not told of any others. They find each other by a file: a port that is free now may be
    taken by the time that it is asked for.
    """
    common = {"WORLD_SIZE": str(world), "GROUP_FILE": tempfile.mktemp(prefix="group.", dir=directory)} if group else {}
    children = []
    for rank in range(world):
        own, errors = {**common, "RANK": str(rank)} if group else {}, directory / f"errors.{rank}"
        job = {"program": str(program), "out": str(directory / f"out.{rank}"), "errors": str(errors)}
        nursery = _nursery(imports)
        pid = nursery.ask({"start": {**job, "options": options, "environment": own}})
        assert pid is not None
        children.append(Child(nursery, pid, errors))
    return children


def run(program: Path, directory: Path, world: int, options: dict, **how: object) -> list[dict]:
    """The same to their end: what each has found."""
    children = start(program, directory, world, options, **how)  # type: ignore[arg-type]
    try:
        _wait(children)
        told = [child.communicate()[1][-2000:] for child in children]
        assert not any(child.returncode for child in children), "\n".join(told)
    finally:
        for child in children:
            child.kill()
    return [json.loads((directory / f"out.{rank}").read_text()) for rank in range(world)]


def _wait(children: list[Child]) -> None:
    """Until all have ended, or one has failed: then the others may have 5 seconds to say why."""
    until = time.monotonic() + HANGS
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        if any(child.poll() for child in children):
            until = min(until, time.monotonic() + 5)
        time.sleep(0.01)
    for child in children:
        child.kill()


# In the nursery ----------------------------------------------------------------------------------------------------------


def _nurse(imports: list[str]) -> None:
    """Fork a process for every job on the standard input, and say how it ended when asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that is imported or run may speak in between
    for name in imports:
        module = importlib.import_module(name)
        if name.startswith("hushgrad.") and hasattr(module, "__path__"):  # its packages import what they offer when asked for it
            for offered in module.__all__:
                getattr(module, offered)
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # which the first optimizer would import, in every child
    # Nothing of this is garbage: who collects it in a child, as every proof does, goes through what is the child's own.
    gc.collect()
    gc.freeze()
    running: set[int] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        else:
            answer = os.fork()
            if not answer:
                _live(asked["start"])
            running.add(answer)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def _group(job: dict) -> Iterator[None]:
    import torch.distributed as dist

    own, backend = job["environment"], job["options"].get("backend", "gloo")
    # Longer than a test waits: who ends soon after another one has been told so, and has not waited for an answer.
    rank, world, waits = int(own["RANK"]), int(own["WORLD_SIZE"]), datetime.timedelta(seconds=2 * HANGS)
    dist.init_process_group(backend, f"file://{own['GROUP_FILE']}", timeout=waits, world_size=world, rank=rank)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _live(job: dict) -> NoReturn:
    """The life of one process."""
    os.dup2(os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ |= job["environment"]
    if job["environment"] or "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
    with _group(job) if job["environment"] else nullcontext():
        found = runpy.run_path(job["program"])["main"](job["options"])
        Path(job["out"]).write_text(json.dumps(found))
    raise SystemExit(0)  # through the nursery's loop: a process ends as every other one does


if __name__ == "__main__":
    _nurse(sys.argv[1:])

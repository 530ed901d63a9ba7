"""Start a test's program in several processes that are joined by gloo, and read what each of them found: both sides of it."""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def start(program: Path, directory: Path, world: int, options: dict) -> list[subprocess.Popen]:
    """``world`` processes of ``program``, each with ``options`` as JSON; they write to ``directory/out.RANK``."""
    common, command = _environment(world), _command(program, directory, options)
    environments = [{**common, "RANK": str(rank)} for rank in range(world)]
    return [subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True) for own in environments]


def run(program: Path, directory: Path, world: int, options: dict) -> list[dict]:
    """The same to their end: what each has written. One process imports what all need, and forks."""
    forking = {"FORKED": "1"} if hasattr(os, "fork") else {}
    if not forking:
        children = start(program, directory, world, options)
    else:
        command = _command(program, directory, options)
        children = [subprocess.Popen(command, env=_environment(world) | forking, stderr=subprocess.PIPE, text=True)]
    try:
        for child in children:
            _, errors = child.communicate(timeout=600)
            assert child.returncode == 0, errors[-3000:]
    finally:
        for child in children:
            child.kill()
    return [json.loads((directory / f"out.{rank}").read_text()) for rank in range(world)]


def _environment(world: int) -> dict[str, str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}


def _command(program: Path, directory: Path, options: dict) -> list[str]:
    return [sys.executable, str(program), json.dumps({"out": str(directory / "out"), **options})]


def _fork_all() -> None:
    """One child for each rank, and only the children return. The parent waits for all of them, and stops the others if one fails."""
    waiting = set[int]()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            os.environ["RANK"] = str(rank)
            return
        waiting.add(pid)
    failed = 0
    while waiting:
        pid, status = os.wait()
        waiting.discard(pid)
        if status and not failed:
            failed = 1
            time.sleep(5)  # the others may have more to say
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)


def be_one_of_them(work: Callable[[dict], dict]) -> None:
    """In the program: join the others, do the work with the given options and write what it found."""
    if os.environ.pop("FORKED", ""):
        _fork_all()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group(options.get("backend", "gloo"), timeout=datetime.timedelta(seconds=120))
    found = work(options)
    Path(f"{options['out']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()

"""Start a test's program in several processes that are joined by gloo, and read what each of them found: both sides of it."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def start(program: Path, directory: Path, world: int, options: dict) -> list[subprocess.Popen]:
    """``world`` processes of ``program``, each with ``options`` as JSON; they write to ``directory/out.RANK``."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(program), json.dumps({"out": str(directory / "out"), **options})]
    environments = [{**common, "RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    return [subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True) for own in environments]


def run(program: Path, directory: Path, world: int, options: dict) -> list[dict]:
    """The same to their end: what each has written."""
    children = start(program, directory, world, options)
    try:
        for child in children:
            _, errors = child.communicate(timeout=600)
            assert child.returncode == 0, errors[-3000:]
    finally:
        for child in children:
            child.kill()
    return [json.loads((directory / f"out.{rank}").read_text()) for rank in range(world)]


def be_one_of_them(work: Callable[[dict], dict]) -> None:
    """In the program: join the others, do the work with the given options and write what it found."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group(options.get("backend", "gloo"), timeout=datetime.timedelta(seconds=120))
    found = work(options)
    Path(f"{options['out']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()

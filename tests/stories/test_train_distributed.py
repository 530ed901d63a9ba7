"""The same key gives the same weights for one process and for two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from hushgrad.release.placement.world import World

TRAIN = textwrap.dedent(
    """
    import json, os, sys
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from hushgrad.noise import BLT
    from hushgrad.denoise import Laplacian
    from hushgrad.errors import CaptureError
    from hushgrad.train import Plan, make_private

    torch.set_num_threads(1)
    out, defect = sys.argv[1], sys.argv[2] == "defect"
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
    common = dict(noise_multiplier=0.7, delta=1e-5, batch_size=6, dataset_size=60)
    plans = {
        "dpsgd": Plan.dpsgd(steps=12, denoise=Laplacian(1.0), **common),
        "dpftrl": Plan.dpftrl(epochs=2, noise=BLT(buffers=2), **common),
    }
    results = {}
    for mode, plan in plans.items():
        torch.manual_seed(rank)  # every process starts elsewhere: the run must bring them together
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        private = make_private(model, optimizer, plan, key=bytes(range(32)) if rank == 0 else None)
        if defect:  # planted: each process draws a whole row, so that two make twice the noise
            private._release._scale *= int(os.environ["WORLD_SIZE"])
        examples = 0
        for x, y in private.loader(data):
            examples += len(x)
            optimizer.zero_grad()
            if len(x):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        ledger = str(private.ledger.event())
        results[mode] = {"weights": weights, "ledger": ledger, "steps": private.steps, "examples": examples}
    if "RANK" in os.environ:  # process 1 runs its part of a batch twice; process 0 does nothing wrong
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = make_private(model, optimizer, plans["dpsgd"], key=bytes(32) if rank == 0 else None)
        x, y = next(iter(private.loader(data)))
        for _ in range(1 + rank):
            nn.functional.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except CaptureError as error:
            results["refusal"] = {"error": str(error), "steps": private.steps}
    with open(f"{out}.{rank}", "w") as file:
        json.dump(results, file)
    """
)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run(directory, world: int, *, defect: bool = False) -> list[dict]:
    script, out = directory / "train.py", directory / f"out{world}{defect}"
    script.write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    children = []
    for rank in range(world):
        own = {"RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
        command = [sys.executable, str(script), str(out), "defect" if defect else "honest"]
        children.append(subprocess.Popen(command, env={**environment, **own}, stderr=subprocess.PIPE, text=True))
    for child in children:
        _, errors = child.communicate(timeout=280)
        assert child.returncode == 0, errors
    return [json.loads((directory / f"{out.name}.{rank}").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("alone"), 1)[0]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("together"), 2)


@pytest.mark.parametrize("mode", ["dpsgd", "dpftrl"])
def test_one_and_two_processes_give_the_same_weights(alone, together, mode):
    one, first, second = alone[mode], together[0][mode], together[1][mode]
    assert first["weights"] == second["weights"]
    assert (torch.tensor(one["weights"]) - torch.tensor(first["weights"])).abs().max() < 1e-6
    assert one["ledger"] == first["ledger"] == second["ledger"] and first["steps"] == one["steps"]
    assert first["examples"] + second["examples"] == one["examples"] and first["examples"] and second["examples"]


def test_all_processes_refuse_a_step_that_one_refuses(together):
    first, second = (results["refusal"] for results in together)
    assert first["error"].startswith("Another process refused") and "exactly once per step" in second["error"]
    assert first["steps"] == second["steps"] == 0


@pytest.mark.slow
def test_twice_the_noise_is_noticed(tmp_path, alone):
    first, _ = _run(tmp_path, 2, defect=True)
    difference = torch.tensor(alone["dpsgd"]["weights"]) - torch.tensor(first["dpsgd"]["weights"])
    assert difference.abs().max() > 1e-3


def test_alone_nothing_is_sent():
    tensors = [torch.arange(3.0), torch.ones(2, 2).double()]
    World().add_up(tensors)
    assert tensors[0].tolist() == [0, 1, 2] and World().total(5) == 5 and World.here() == World(0, 1)

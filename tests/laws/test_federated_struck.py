"""A server whose round is interrupted anywhere (Ctrl-C) goes on, or is made again from its folder: no row of noise serves twice."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from struck import Strike

from hushgrad.errors import ArgumentError
from hushgrad.federated import DPFTRL, DPFedAvg, LocalGrid, MinSeparation, ServerSGD
from hushgrad.noise import BLT
from hushgrad.train import Plan

ROUNDS, CLIENTS = 40, 6
COMMON = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 3, "dataset_size": CLIENTS, "unit": "user"}
SAMPLER = MinSeparation(cohort=3, gap=1, times=ROUNDS, steps=ROUNDS)
KINDS = {
    "independent": (DPFedAvg, Plan.dpsgd(steps=ROUNDS, **COMMON)),
    "correlated": (DPFTRL, Plan.dpftrl(sampling=SAMPLER, noise=BLT(buffers=2), **COMMON)),
}


def _silent() -> LocalGrid:
    """Clients that send the model back as it came: a round releases its row of noise and nothing else."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    return LocalGrid(app, clients=CLIENTS)


def _round(server, grid, strike: Strike | None = None) -> np.ndarray:
    """What a round from zero weights releases."""
    zero = ArrayRecord({"w": Array(np.zeros(5))})
    messages = list(server.configure_train(server.rounds + 1, zero, ConfigRecord(), grid))
    replies, before = list(grid.send_and_receive(messages)), sys.getprofile()
    sys.setprofile(strike or before)
    try:
        arrays, _ = server.aggregate_train(server.rounds + 1, replies)
    finally:
        sys.setprofile(before)
    return arrays["w"].numpy()


def _server(name: str, directory):
    kind, plan = KINDS[name]
    everybody = range(1, CLIENTS + 1) if kind is DPFedAvg else None
    key = None if directory else bytes(32)
    return kind(FedAvg(), plan, server=ServerSGD(), key=key, directory=directory, population=everybody)


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in a folder"])
@pytest.mark.parametrize("name", KINDS)
def test_a_round_that_is_interrupted_anywhere_was_taken_or_was_not(name, kept, tmp_path, monkeypatch):
    monkeypatch.setattr("hushgrad.federated.base.log", lambda *_: None)
    grid, lot, folder = _silent(), random.Random(f"{name} {kept}"), tmp_path / "server" if kept else None
    server, struck, remade = _server(name, folder), 0, 0
    released: dict[int, np.ndarray] = {}
    while server.rounds < ROUNDS:
        step = server.rounds
        try:
            rows = _round(server, grid, Strike(lot.randint(1, 800)) if lot.random() < 0.6 else None)
        except KeyboardInterrupt:
            struck += 1
            continue
        except ArgumentError as refused:
            assert kept and "was not interrupted while" in str(refused)
            server, remade = _server(name, folder), remade + 1
            assert server.rounds >= step - 1
            continue
        assert step not in released
        released[step] = rows
    assert struck >= 5 and (remade > 0) is kept
    rows = np.array(list(released.values()))
    assert len(np.unique(rows.round(9), axis=0)) == len(rows) > 5
    if not kept:  # each round had the row of its number, as if nothing had happened to the others
        whole = _server(name, None)
        expected = [_round(whole, grid) for _ in range(ROUNDS)]
        assert all(np.array_equal(row, expected[step]) for step, row in released.items())

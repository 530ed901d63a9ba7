"""The same strategy on Flower's own simulation engine: messages travel, clients run in other processes."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from hushgrad import noise
from hushgrad.federated import DPFTRL, MinSeparation, ServerSGD, clip_update
from hushgrad.train import Plan

CLIENTS, ROUNDS = 6, 3


@pytest.mark.slow  # starting the engine takes longer than all other tests of the room
def test_dpftrl_runs_on_the_simulation_engine(monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    pytest.importorskip("ray")
    from flwr.simulation import run_simulation

    plan = Plan.dpftrl(
        noise_multiplier=1.0,
        delta=1e-5,
        batch_size=2,
        dataset_size=CLIENTS,
        sampling=MinSeparation(cohort=2, gap=3, times=1, steps=ROUNDS),
        noise=noise.BLT(buffers=2),
        unit="user",
    )
    client_app, server_app, outcome = ClientApp(mods=[clip_update]), ServerApp(), {}

    @client_app.train()
    def train(message, context):
        arrays = {name: Array(array.numpy() + 1) for name, array in message.content["arrays"].items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    @server_app.main()
    def main(grid, context):
        strategy = DPFTRL(FedAvg(min_available_nodes=CLIENTS), plan, server=ServerSGD(momentum=0.5), seed=0)
        result = strategy.start(grid, ArrayRecord({"w": Array(np.zeros(5, np.float32))}))
        outcome.update(strategy=strategy, weights=result.arrays["w"].numpy())

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 1, "include_dashboard": False}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=backend)
    strategy = outcome["strategy"]
    assert strategy.rounds == ROUNDS and strategy.raw_round.accepted == 2 and strategy.raw_round.rejected == ()
    assert len(strategy.check_ins) == CLIENTS  # everybody once: three cohorts of two, three rounds apart
    assert strategy.spent().epsilon == plan.guarantee().epsilon and np.isfinite(outcome["weights"]).all()

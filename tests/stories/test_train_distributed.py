"""The same key gives the same weights for one process and for two."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from several_processes import run

from hushgrad.release.placement.world import World

PROGRAM = Path(__file__).with_name("train_distributed_program.py")


@pytest.fixture(scope="module")
def alone():
    return runpy.run_path(str(PROGRAM))["main"]({})


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run(PROGRAM, tmp_path_factory.mktemp("together"), 2, {})


@pytest.mark.parametrize("mode", ["dpsgd", "padded", "dpftrl"])
def test_one_and_two_processes_give_the_same_weights(alone, together, mode):
    one, first, second = alone[mode], together[0][mode], together[1][mode]
    assert first["weights"] == second["weights"]
    assert (torch.tensor(one["weights"]) - torch.tensor(first["weights"])).abs().max() < 1e-6
    assert one["ledger"] == first["ledger"] == second["ledger"] and first["steps"] == one["steps"]
    assert first["examples"] + second["examples"] == one["examples"] and first["examples"] and second["examples"]


def test_padded_batches_have_one_public_size_in_every_process(alone, together):
    assert alone["padded"]["sizes"] == [15]
    assert [found["padded"]["sizes"] for found in together] == [[8], [8]]  # of 15, over two


def test_all_processes_refuse_a_step_that_one_refuses(together):
    first, second = (results["refusal"] for results in together)
    assert first["error"] == second["error"] and "exactly once per step" in second["error"]
    assert first["steps"] == second["steps"] == 0


@pytest.mark.slow
def test_twice_the_noise_is_noticed(tmp_path, alone):
    first, _ = run(PROGRAM, tmp_path, 2, {"defect": True})
    difference = torch.tensor(alone["dpsgd"]["weights"]) - torch.tensor(first["dpsgd"]["weights"])
    assert difference.abs().max() > 1e-3


def test_alone_nothing_is_sent():
    tensors = [torch.arange(3.0), torch.ones(2, 2).double()]
    World().add_up(tensors)
    assert tensors[0].tolist() == [0, 1, 2] and World().total(5) == 5 and World.here() == World(0, 1)

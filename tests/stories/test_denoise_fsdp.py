"""Denoisers over the shards of FSDP2: the weights of one process, and state that follows its parameter from 2 to 1 to 2."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from several_processes import run

from hushgrad.denoise import Chain, JamesStein, Kalman, Laplacian, LowPass
from hushgrad.denoise.base import Denoiser, NoiseInfo
from hushgrad.errors import ArgumentError
from hushgrad.release.placement.sharded import Shard, Sharded
from hushgrad.release.placement.world import World
from hushgrad.train import Plan

PROGRAM = Path(__file__).with_name("train_fsdp_denoise_program.py")
KINDS = [
    "low pass",
    "second moment",
    "soft threshold",
    "james-stein",
    "laplacian",
    "grid",
    "one probe",
    "two probes",
    "svrg",
    "chain",
]
INFO = NoiseInfo(std=0.3, step=0, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def alone():
    """One process, nothing sharded, nothing interrupted."""
    train = runpy.run_path(str(PROGRAM))["train"]
    return {name: train(name, {}) for name in [*KINDS, "torn"]}


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The same runs, sharded over 2, then 1, then 2 processes, from checkpoint to checkpoint."""
    directory = tmp_path_factory.mktemp("moved")
    common = {"denoisers": [*KINDS, "torn"], "sharded": True, "look": True, "directory": str(directory / "checkpoints")}
    phases = [({"stop": 5}, 2), ({"stop": 7}, 1), ({}, 2)]
    return [run(PROGRAM, directory, world, {**common, **options}) for options, world in phases]


def _off(a: dict, b: dict) -> float:
    return float((torch.tensor(a["weights"]) - torch.tensor(b["weights"])).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_one_process_after_moving_from_2_to_1_to_2(alone, moved, kind):
    last = moved[-1]
    assert alone[kind]["steps"] == last[0][kind]["steps"] == 10 and last[0][kind]["resumed"]
    assert _off(alone[kind], last[0][kind]) < 2e-6 and last[0][kind]["weights"] == last[1][kind]["weights"]


def test_a_denoiser_that_takes_a_shard_for_the_tensor_is_noticed(alone, moved):
    assert _off(alone["torn"], moved[-1][0]["torn"]) > 1e-3
    assert alone["torn"]["weights"] == alone["laplacian"]["weights"]  # in one process nothing is torn


def test_each_process_keeps_its_part_of_the_state(moved):
    two, one = moved[0], moved[1]
    for kind in ("low pass", "second moment", "one probe", "chain"):
        parts = [process[kind]["kept"] for process in two]
        assert sum(parts) == one[0][kind]["kept"] and 0 < min(parts) <= max(parts) < 0.7 * sum(parts)


@pytest.mark.parametrize(
    "denoiser", [Laplacian(1.0, scope="global"), JamesStein(per="global"), Chain([LowPass(), Laplacian(1.0, scope="global")])]
)
def test_one_that_needs_all_tensors_at_once_is_refused_with_the_remedy(denoiser, monkeypatch):
    monkeypatch.setattr("hushgrad.release.placement.sharded.is_sharded", lambda tensor: True)
    plan = Plan.dpsgd(steps=3, noise_multiplier=1.0, delta=1e-5, batch_size=2, dataset_size=20, denoise=denoiser)
    with pytest.raises(ArgumentError, match=r"all of a sharded model.s tensors at once.*tensor"):
        Sharded.checked({"w": torch.zeros(4, 2)}, World(), plan)


class _Halves:
    """Two processes in one: the part of the other is known."""

    def __init__(self, rank: int, others: dict[str, torch.Tensor]) -> None:
        self.rank, self.others = rank, others

    def join(self, name, part):
        return torch.cat([part, self.others[name]] if self.rank == 0 else [self.others[name], part])

    def cut(self, name, whole):
        shard = Shard.of(tuple(whole.shape), self.rank, 2)
        return whole[shard.first : shard.first + shard.rows].clone()


@pytest.mark.parametrize("denoiser", [Laplacian(1.0), JamesStein(), Kalman(0.5), LowPass(), Chain(), Chain([Laplacian(1.0)])])
def test_parts_give_the_parts_of_the_whole(denoiser):
    grads = {"a": torch.randn(5, 3), "b": torch.randn(1, 4)}
    halves = [{n: _Halves(rank, {}).cut(n, g) for n, g in grads.items()} for rank in (0, 1)]
    parts = [denoiser.on_shards(halves[rank], INFO, {}, _Halves(rank, halves[1 - rank])) for rank in (0, 1)]
    whole = denoiser(grads, INFO, {})
    for name in grads:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


class _Remembers(Denoiser):
    """Planted: keeps state for whole tensors."""

    needs_whole_tensor = True

    def __call__(self, grads, info, state):
        state.update({f"last.{name}": grad.clone() for name, grad in grads.items()})
        return {name: grad.clone() for name, grad in grads.items()}


def test_state_of_whole_tensors_is_refused():
    with pytest.raises(ArgumentError, match="keeps state for whole tensors"):
        _Remembers().on_shards({"a": torch.ones(2, 2)}, INFO, {}, _Halves(0, {"a": torch.ones(2, 2)}))


class _FirstOfTwo(Sharded):
    """Process 0 of 2, for one parameter of 5 rows, without any process group."""

    def __init__(self) -> None:
        self.shards, self.params = {"w": Shard.of((5, 2), 0, 2)}, {"w": torch.zeros(5, 2)}

    def here(self, name: str) -> torch.Tensor:
        return torch.zeros(3, 2)

    def wrap(self, rows: torch.Tensor, shape: object) -> torch.Tensor:
        return rows


@pytest.mark.parametrize("state", [{"mean/w": torch.zeros(3, 2)}, {"mean.w": torch.zeros(6)}, {"mean.v": torch.zeros(3, 2)}])
def test_state_that_cannot_be_cut_like_a_parameter_is_refused(state):
    assert _FirstOfTwo().saved({"seen": 3, "0/mean.w": torch.zeros(3, 2)})["seen"] == 3
    with pytest.raises(ArgumentError, match="shape of a parameter"):
        _FirstOfTwo().saved(state)


def test_whole_state_is_cut():
    whole = torch.arange(10.0).view(5, 2)
    local = _FirstOfTwo().loaded({"mean.w": whole, "seen": 1})
    assert torch.equal(local["mean.w"], whole[:3]) and local["seen"] == 1
    local["mean.w"].zero_()
    assert whole[0, 1] == 1  # memory of its own

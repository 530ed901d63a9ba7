"""Several processes, with fully_shard or without: the weights and the noise of one, and checkpoints that change their number."""

from __future__ import annotations

import runpy
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from several_processes import run, start

PROGRAM = Path(__file__).with_name("train_fsdp_program.py")
PLANS = ["independent", "blt", "banded"]
_start, _run = partial(start, PROGRAM), partial(run, PROGRAM)


def _whole_rows(results: list[dict], plan: str) -> dict[str, list[float]]:
    """Noise by step and tensor, joined from the processes' parts."""
    rows: dict[str, list[float]] = {}
    for key in results[0][plan]["noise"]:  # process 0 has a part of every tensor
        parts = sorted(r[plan]["noise"][key] for r in results if key in r[plan]["noise"])
        assert [offset for offset, _ in parts] == [sum(len(n) for _, n in parts[:i]) for i in range(len(parts))]
        rows[key] = [number for _, numbers in parts for number in numbers]
    return rows


def _close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) > 0 and float((torch.tensor(a) - torch.tensor(b)).abs().max()) < 1e-6


@pytest.fixture(scope="module")
def alone():
    """One process, nothing sharded, nothing interrupted."""
    train = runpy.run_path(str(PROGRAM))["train"]
    return {plan: train(plan, {}) for plan in PLANS}


@pytest.fixture(scope="module", params=[True, False], ids=["sharded", "data-parallel"])
def moved(request, tmp_path_factory):
    """The same runs on 2, then 1, then 2 processes, from checkpoint to checkpoint."""
    directory = tmp_path_factory.mktemp("train-moved")
    common = {"plans": [*PLANS, "secure"], "sharded": request.param, "directory": str(directory / "checkpoints"), "every": 2}
    phases = [({"stop": 6}, 2), ({"stop": 8}, 1), ({"micro": 2}, 2)]
    return [_run(directory, world, {**common, **options}) for options, world in phases]


@pytest.mark.parametrize("plan", PLANS)
def test_noise_is_bit_identical_and_weights_are_equal_after_moving_from_2_to_1_to_2_processes(alone, moved, plan):
    rows = {key: row for phase in moved for key, row in _whole_rows(phase, plan).items()}
    assert rows == {key: numbers for key, (_, numbers) in alone[plan]["noise"].items()}
    last = moved[-1]
    assert last[0][plan]["weights"] == last[1][plan]["weights"] and _close(alone[plan]["weights"], last[0][plan]["weights"])
    assert [phase[0][plan]["resumed"] for phase in moved] == [False, True, True]
    assert last[0][plan]["ledger"] == last[1][plan]["ledger"] == alone[plan]["ledger"]
    assert all(_close(alone[plan]["average"], r[plan]["average"]) for r in last if plan == "independent")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """One process; sums in double precision, each number rounded once, with its noise, to a public grid."""
    (found,) = _run(tmp_path_factory.mktemp("rounded"), 1, {"plans": ["secure"]})
    return found["secure"]


def test_weights_of_a_secure_run_are_bit_identical_after_moving_from_2_to_1_to_2_processes(rounded, moved):
    assert [phase[0]["secure"]["resumed"] for phase in moved] == [False, True, True]
    for found in moved[-1]:
        assert found["secure"]["weights"] == rounded["weights"] and found["secure"]["ledger"] == rounded["ledger"]


@pytest.mark.parametrize("sharded, micro", [(False, 1000), (True, 2)])
def test_weights_of_a_secure_run_are_bit_identical_on_three_processes(rounded, tmp_path, sharded, micro):
    results = _run(tmp_path, 3, {"plans": ["secure"], "sharded": sharded, "micro": micro})
    assert all(found["secure"]["weights"] == rounded["weights"] for found in results)
    assert sum(sum(found["secure"]["examples"]) for found in results) == sum(rounded["examples"])


def test_every_example_is_clipped_once_and_parts_may_be_empty(alone, moved):
    parts = [r["independent"] for phase in moved for r in phase]
    assert any(0 in r["independent"]["examples"] for r in moved[0])
    assert sorted(norm for part in parts for norm in part["norms"]) == pytest.approx(alone["independent"]["norms"], rel=1e-5)
    assert sum(sum(part["examples"]) for part in parts) == sum(alone["independent"]["examples"])


def test_no_pickle_and_no_leftovers(moved, tmp_path_factory):
    for place in tmp_path_factory.getbasetemp().glob("train-moved*"):
        directory = place / "checkpoints" / "blt"
        names = sorted(path.name for path in directory.iterdir())
        assert [name.split("-")[0] for name in names] == ["journal", "key.json", "shard", "shard", "state.safetensors"]
        assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_whole_tensors_are_not_taken_for_shards(tmp_path, world):
    options = {"plans": ["blt"], "directory": str(tmp_path / "checkpoints"), "every": 2}
    _run(tmp_path, world, {**options, "stop": 2})
    children = _start(tmp_path, world, {**options, "sharded": True})
    for child in children:
        _, errors = child.communicate()
        assert child.returncode == 1 and "Resume this one without fully_shard" in errors


@pytest.mark.slow
@pytest.mark.parametrize("world, sharded, micro", [(3, False, 2), (3, True, 2), (2, False, 2), (1, True, 1000)])
def test_any_number_of_processes_and_any_micro_batches_give_the_same_weights(alone, tmp_path, world, sharded, micro):
    results = _run(tmp_path, world, {"plans": PLANS, "sharded": sharded, "micro": micro})
    assert world == 1 or any(0 in r["independent"]["examples"] for r in results)  # a part of a batch was empty
    for plan in PLANS:
        assert all(_close(alone[plan]["weights"], r[plan]["weights"]) for r in results)
        assert sum(sum(r[plan]["examples"]) for r in results) == sum(alone[plan]["examples"])
        assert _whole_rows(results, plan) == {key: numbers for key, (_, numbers) in alone[plan]["noise"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("sharded, backend", [(False, "aot_eager"), (True, "aot_eager"), (False, "inductor"), (True, "inductor")])
def test_a_compiled_model_gives_the_same_weights(alone, tmp_path, sharded, backend):
    results = _run(tmp_path, 2, {"plans": ["blt"], "sharded": sharded, "compile": backend, "stop": 4})
    train = runpy.run_path(str(PROGRAM))["train"]
    expected = train("blt", {"stop": 4})
    assert all(_close(expected["weights"], r["blt"]["weights"]) for r in results)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_parts_that_all_get_the_same_noise_are_noticed(alone, tmp_path, sharded):
    """Planted: every process draws its part as if it were the first, which is what noise on a DTensor does on a CPU mesh."""
    results = _run(tmp_path, 2, {"plans": ["independent"], "sharded": sharded, "stop": 3, "defect": True})
    first, second = (result["independent"]["noise"]["0 0"][1] for result in results)
    assert first[: len(second)] == second  # the defect is there: two shards with one noise
    with pytest.raises(AssertionError):
        _whole_rows(results, "independent")


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_others_end_soon_when_a_process_is_killed_and_the_run_goes_on_bit_for_bit(alone, tmp_path, sharded):
    options = {"plans": ["blt"], "sharded": sharded, "directory": str(tmp_path / "checkpoints"), "every": 3, "micro": 2}
    survivor, victim = _start(tmp_path, 2, {**options, "die": [1, 4]})
    try:
        victim.communicate()
        _, errors = survivor.communicate()
    finally:
        survivor.kill()
    assert victim.returncode == -signal.SIGKILL and survivor.returncode == 1
    if not sharded:  # sharded parameters are gathered by FSDP, whose error is torch's own
        assert "ProcessLost: Another process ended or did not answer in time" in errors
    results = _run(tmp_path, 2, options)
    whole = _run(tmp_path, 2, {**options, "directory": str(tmp_path / "not killed")})
    assert all(found["blt"]["weights"] == whole[0]["blt"]["weights"] for found in (*results, *whole))
    assert results[0]["blt"]["resumed"] and results[0]["blt"]["steps"] == alone["blt"]["steps"]
    assert _close(alone["blt"]["weights"], results[0]["blt"]["weights"]) and results[0]["blt"]["ledger"] == alone["blt"]["ledger"]
    expected = {key: numbers for key, (_, numbers) in alone["blt"]["noise"].items()}
    assert all(expected[key] == row for key, row in _whole_rows(results, "blt").items())

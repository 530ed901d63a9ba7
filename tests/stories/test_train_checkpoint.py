"""Killed with SIGKILL at any instant and resumed, a run ends bit for bit where it would have ended, ledger included."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path

import pytest
import several_processes
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.release.keys import read_key
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.tree import read_tree

F = nn.functional

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

LIVES = Path(__file__).parents[2] / "faults" / "lives.py"


def _assert_same_end(lives: dict) -> None:
    reference, final = lives["reference"], lives["final"]
    assert "error" not in reference and "error" not in final, (reference, final)
    for part in ("weights", "averaged", "groups", "ledger"):
        assert final[part] == reference[part], part


# The first calls write the key; then each save writes, flushes, renames and flushes. Every kind of instant is met.
EVERY_CALL = [1, 2, 3, 4, 5, 6, 7, 8]


SCENARIOS = {
    "dpsgd": ("dpsgd", EVERY_CALL, {}),
    "blt": ("blt", EVERY_CALL, {}),
    "lazy": ("lazy", EVERY_CALL, {}),
    "random": ("kalman", ["any"] * 3, {}),
    "random lazy": ("lazy", ["any"] * 3, {}),
    "fresh": ("dpsgd", [40, 5], {"key": None}),
    "ranks": ("blt", ["any"], {"ranks": 2}),
}


def test_runs_that_are_killed_end_bit_for_bit_the_same(tmp_path):
    """Killed at each of the first touches of the disk, at random instants, one of two ranks: all in one process's children."""
    (results,) = several_processes.run(
        LIVES, tmp_path, 1, {"folder": str(tmp_path), "scenarios": SCENARIOS, "seed": 0}, group=False
    )
    for name in ("dpsgd", "blt", "lazy"):
        assert results[name]["deaths"] == len(EVERY_CALL)
    for name in set(SCENARIOS) - {"fresh"}:
        _assert_same_end(results[name])
    # A run without a given key draws one, writes it down before the first step, and a restart must find it.
    assert results["fresh"]["deaths"] == 2 and results["fresh"]["final"]["first"] > 0
    keys = [json.loads((tmp_path / "fresh" / name / "key.json").read_text())["key"] for name in ("killed", "reference")]
    assert keys[0] != keys[1]


# Without a kill: what is saved, and what is refused ------------------------------------------------------------------


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 4, generator=g), torch.randint(2, (32,), generator=g))


def _run(noise_multiplier=1.0, optimizer=None, correlated=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(model.parameters())
    common = {"noise_multiplier": noise_multiplier, "delta": 1e-5, "batch_size": 8, "dataset_size": 32}
    plan = Plan.dpftrl(epochs=2, **common) if correlated else Plan.dpsgd(steps=8, **common)
    return model, optimizer, make_private(model, optimizer, plan, **options)


def _take(model, optimizer, private, data, steps):
    for x, y in private.loader(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if private.steps == steps:
            return


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_survives_without_pickle(tmp_path, data, name):
    ends = []
    for interrupted in (False, True):
        run = _run(optimizer=OPTIMIZERS[name], seed=1)
        directory = tmp_path / f"{interrupted}"
        checkpoint = Checkpoint(directory, run[2])
        _take(*run, data, 4)
        if interrupted:
            checkpoint.save()
            run = _run(optimizer=OPTIMIZERS[name], seed=1)
            assert Checkpoint(directory, run[2]).resumed and run[2].steps == 4
        _take(*run, data, 8)
        ends.append((_weights(run[0]), run[2].ledger))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("correlated", [False, True])
def test_the_state_dict_resumes_with_and_without_its_secrets(data, correlated, with_key):
    key = bytes(range(32))
    model, optimizer, private = _run(correlated=correlated, key=key)
    _take(model, optimizer, private, data, 3)
    saved = private.state_dict(with_key=with_key)
    # Optimizer.load_state_dict keeps the tensors that it is given: without a copy the two runs would share their momentum.
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = _run(correlated=correlated)
    other[0].load_state_dict(weights)
    other[1].load_state_dict(state)
    if not with_key:
        assert "key" not in saved and "noise" not in saved
        with pytest.raises(ArgumentError, match="interrupted run's"):
            other[2].load_state_dict(saved)
        other[2].load_state_dict(saved, key=key)  # buffers of correlated noise are drawn again from it
    else:
        other[2].load_state_dict(saved)
    for run in ((model, optimizer, private), other):
        _take(*run, data, 8)
    assert torch.equal(_weights(model), _weights(other[0])) and private.ledger == other[2].ledger


def test_modes_keys_and_contents(tmp_path, data):
    model, optimizer, private = _run()
    checkpoint = Checkpoint(tmp_path / "run", private)
    _take(model, optimizer, private, data, 2)
    checkpoint.save(notes={"epoch": 1, "loss": float("inf")})
    files = {path.name: path for path in (tmp_path / "run").iterdir()}
    assert set(files) == {".lock", "journal", "key.json", "state.safetensors"}  # no leftovers
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files.values())
    secret = private.key.secret
    content = files["state.safetensors"].read_bytes()
    assert secret not in content and secret.hex().encode() not in content
    resumed = Checkpoint(tmp_path / "run", _run()[2])
    assert resumed.resumed and resumed.notes == {"epoch": 1, "loss": float("inf")}


def test_what_does_not_belong_together_is_refused(tmp_path, data):
    model, optimizer, private = _run()
    checkpoint = Checkpoint(tmp_path, private)
    _take(model, optimizer, private, data, 2)
    checkpoint.save()
    with pytest.raises(ArgumentError, match="one plan"):
        Checkpoint(tmp_path, _run(noise_multiplier=2.0)[2])
    with pytest.raises(ArgumentError, match="that of the run"):
        Checkpoint(tmp_path, _run(key=bytes(32))[2])
    with pytest.raises(ArgumentError, match="extras"):
        Checkpoint(tmp_path, _run()[2], extras={"x": torch.optim.SGD(model.parameters(), lr=1.0)})
    os.chmod(tmp_path / "key.json", 0o644)
    with pytest.raises(ArgumentError, match="0600"):
        Checkpoint(tmp_path, _run()[2])
    (tmp_path / "key.json").unlink()
    with pytest.raises(ArgumentError, match="without its key"):
        Checkpoint(tmp_path, _run()[2])


def test_a_checkpoint_is_made_before_the_first_step(tmp_path, data):
    model, optimizer, private = _run()
    _take(model, optimizer, private, data, 1)
    with pytest.raises(ArgumentError, match="before the first step"):
        Checkpoint(tmp_path, private)


def test_a_damaged_checkpoint_is_refused(tmp_path, data):
    model, optimizer, private = _run()
    checkpoint = Checkpoint(tmp_path, private)
    _take(model, optimizer, private, data, 1)
    checkpoint.save()
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ArgumentError, match="safetensors"):
        Checkpoint(tmp_path, _run()[2])


def test_state_that_would_need_pickle_is_refused(tmp_path, data):
    class Odd:
        def state_dict(self):
            return {"function": print}

        def load_state_dict(self, state_dict):
            pass

    with pytest.raises(ArgumentError, match="never pickles"):
        Checkpoint(tmp_path, _run()[2], extras={"odd": Odd()})
    assert not (tmp_path / "state.safetensors").exists()


# Damage --------------------------------------------------------------------------------------------------------------------


def _small_run(directory):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=64, steps=4)
    return Checkpoint(directory, make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan))


@pytest.mark.parametrize("name", ["state.safetensors", "key.json"])
def test_every_flipped_bit_and_every_truncation_is_noticed(tmp_path, name):
    plan = _small_run(tmp_path)._private.plan.digest
    path = tmp_path / name
    whole = path.read_bytes()
    key = json.loads((tmp_path / "key.json").read_text())["key"]
    positions = range(0, len(whole), 1 if name == "key.json" else 97)
    damaged = [whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :] for i in positions for bit in (1, 32)]
    for number, content in enumerate([whole[: len(whole) // 2], b"", *damaged]):
        path.write_bytes(content)
        with pytest.raises(ArgumentError) as refusal:  # its one reader; the first ones through a whole run as well
            _small_run(tmp_path) if number < 4 else read_key(path, plan=plan) if name == "key.json" else read_tree(path)
        assert key not in str(refusal.value)
    path.write_bytes(whole)
    assert _small_run(tmp_path).resumed


def test_a_loop_of_ones_own_that_died_after_its_last_step_goes_on_to_its_end(tmp_path):
    """The saved run has nothing left to deal: the loop is empty, and what comes after it is reached. A run of this life still refuses."""

    def life() -> tuple[int, list, float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan.dpsgd(noise_multiplier=1.0, max_grad_norm=1.0, batch_size=4, dataset_size=16, steps=3, delta=1e-5)
        private = make_private(model, optimizer, plan, key=bytes(32))
        checkpoint = Checkpoint(tmp_path / "run", private)
        data, taken = TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long)), 0
        for x, y in private.loader(data):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            checkpoint.save()
            taken += 1
        if taken:
            with pytest.raises(BudgetExceeded, match="One loop over the loader is the whole run"):
                iter(private.loader(data))
        epsilon, weights = private.spent().epsilon, model.weight.tolist()
        private.detach()
        return taken, weights, epsilon

    first, second = life(), life()
    assert (first[0], second[0]) == (3, 0) and first[1:] == second[1:]

"""No secret outlives its run, and no noise of a server is released twice: programs that once did, as tests."""

from __future__ import annotations

import itertools
import json
import os
import shutil

import numpy as np
import pytest

from hushgrad.budget import Ledger
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.recipes import Recipe, load_recipe, session, train
from hushgrad.recipes.column import Number
from hushgrad.recipes.columns import Columns
from hushgrad.release.erasure import secrets_in
from hushgrad.release.key_reuse import forget

CHANGES = ["plan.steps=6", "model.name='logistic'", "run.checkpoint_every=2", "run.threads=1"]


class Killed(BaseException):
    """As SIGKILL: nothing after it runs."""


def _killed(*args, **options):
    raise Killed


def test_a_death_between_the_last_two_writes_is_finished_by_the_next_command(tmp_path, monkeypatch, capsys):
    for number, words in enumerate((["train", "--resume", "--out"], ["key", "status"], ["report", "--json"], ["key", "destroy"])):
        out = tmp_path / str(number)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(session, "destroy", _killed)
            train(load_recipe(None, changes=CHANGES), out, progress=False)
        assert (out / "guarantee.json").exists() and len(secrets_in(out)) == 3
        main([*words, str(out)])
        assert secrets_in(out) == [] and not (out / "checkpoint").exists() and (out / "model.safetensors").exists()
        capsys.readouterr()


CORRELATED = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"method": "dpftrl", "noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 256, "epochs": 2, "noise": "BLT"},
    "run": {"threads": 1, "checkpoint_every": 2},
}


def _interrupted(out, recipe=None, key=None):
    recipe = load_recipe(None, changes=CHANGES) if recipe is None else recipe

    def stop(save):
        def at(metrics):
            if metrics["step"] == 5:
                raise Killed

        return at

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(session, "Interrupt", stop)
        train(recipe, out, progress=False, key=key)


def test_a_settled_run_keeps_neither_key_nor_buffers(tmp_path):
    ledger = Ledger.create(tmp_path / "b.db")
    ledger.add("d", epsilon=1000, delta=1e-4, relation="zero_out")
    _interrupted(tmp_path / "run", Recipe.from_tables(CORRELATED).paid_by(str(tmp_path / "b.db"), "d"))
    assert len(secrets_in(tmp_path / "run")) == 3
    (booked,) = ledger.status("d").reservations
    ledger.settle(booked, tmp_path / "run")
    assert secrets_in(tmp_path / "run") == [] and not (tmp_path / "run" / "checkpoint").exists()


def test_the_secrets_of_an_interrupted_search_are_found_and_destroyed(tmp_path, capsys, put_secret):
    (tmp_path / "search" / "00000" / "checkpoint").mkdir(parents=True)
    for place in ("search", "search/00000/checkpoint"):
        put_secret(tmp_path / place / "key.json")
    assert main(["key", "status", str(tmp_path)]) == 0
    assert "search/key.json" in capsys.readouterr().out
    assert main(["key", "destroy", str(tmp_path)]) == 0 and not (tmp_path / "search").exists()


def test_the_data_of_an_interrupted_command_are_compared(tmp_path):
    _interrupted(tmp_path / "run")
    recipe = load_recipe(None, changes=CHANGES)
    data = recipe.make_data()
    data.train.tensors[0][0] += 1
    with pytest.raises(ArgumentError, match="data of this run"):
        train(None, tmp_path / "run", resume=True, progress=False, data=data)
    os.unlink(tmp_path / "run" / "checkpoint" / "state.safetensors")
    with pytest.raises(ArgumentError, match="nobody knows what this run has released"):
        train(None, tmp_path / "run", resume=True, progress=False)


@pytest.mark.parametrize("kind", ["plain", "key", "paid"])
def test_a_run_that_lost_its_whole_checkpoint_does_not_begin_again(tmp_path, kind):
    recipe, key = load_recipe(None, changes=CHANGES), bytes(range(32)) if kind == "key" else None
    if kind == "paid":
        Ledger.create(tmp_path / "b.db").add("d", epsilon=10, delta=1e-4)
        recipe = recipe.paid_by(str(tmp_path / "b.db"), "d")
    out = tmp_path / "run"
    _interrupted(out, recipe, key)
    shutil.rmtree(out / "checkpoint")
    if kind == "paid":  # the ledger knows, if nothing else does
        (out / "metrics.jsonl").unlink()
    with pytest.raises(ArgumentError, match="this run has begun"):
        train(None, out, resume=True, progress=False, key=key)
    assert not (out / "checkpoint").exists()


LEARNING = {
    "model": {"name": "linear"},
    "data": {"name": "encoded", "classes": ["p", "q"]},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-5, "batch_size": 32, "steps": 9, "relation": "zero_out"},
    "run": {"checkpoint_every": 3, "threads": 1},
}


def _learning(path, moved=0.0):
    """A recipe whose encoder learns cut points from the file that it writes; records can be moved."""
    rows = [f"{a + moved * (a < 40)},{'p' if a % 3 else 'q'}" for a in range(100)]
    path.write_text("\n".join(["a,y", *rows]) + "\n")
    encoder = Columns(columns=(Number(name="a", low=0, high=128, bins=4, learn=True),), label="y")
    return Recipe.from_tables({**LEARNING, "data": {**LEARNING["data"], "path": str(path), "encoder": encoder.to_json()}})


@pytest.mark.parametrize("moved", [0.0, 50.0])
def test_what_was_learned_before_a_run_is_not_learned_again(tmp_path, moved):
    out, recipe = tmp_path / "run", _learning(tmp_path / "d.csv")
    _interrupted(out, recipe)
    first = (out / "encoder.json").read_text()
    (out / "encoder.json").unlink()
    _learning(tmp_path / "d.csv", moved)
    if moved:
        with pytest.raises(ArgumentError, match="data of this run"):
            train(None, out, resume=True, progress=False)
    else:
        train(None, out, resume=True, progress=False)
    assert (out / "encoder.json").read_text() == first


def test_other_learned_numbers_are_refused(tmp_path):
    out, recipe = tmp_path / "run", _learning(tmp_path / "d.csv")
    _interrupted(out, recipe)
    learned = json.loads((out / "encoder.json").read_text())
    learned["columns"][0]["cuts"][0] += 1
    (out / "encoder.json").write_text(json.dumps(learned))
    with pytest.raises(ArgumentError, match="learned numbers of this run"):
        train(None, out, resume=True, progress=False)


# Federated servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def federated():
    flwr = pytest.importorskip("flwr")
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from hushgrad import noise
    from hushgrad.federated import DPFTRL, LocalGrid
    from hushgrad.train import Plan

    assert flwr
    common = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 0.5, "batch_size": 5, "dataset_size": 20, "epochs": 2}
    plan = Plan.dpftrl(**common, unit="user", noise=noise.BLT(buffers=2))

    def grid(move=0.3):
        app = ClientApp()

        @app.train()
        def answer(message, context):
            moved = message.content["arrays"]["mean"].numpy() + np.array([move, 0, 0])
            return Message(RecordDict({"arrays": ArrayRecord({"mean": Array(moved)})}), reply_to=message)

        return LocalGrid(app, clients=20)

    def start(strategy, rounds, move=0.3):
        initial = ArrayRecord({"mean": Array(np.zeros(3))})
        return strategy.start(grid(move), initial, num_rounds=rounds).arrays["mean"].numpy()

    return lambda directory, **options: DPFTRL(FedAvg(), plan, directory=directory, **options), start


def test_of_two_servers_in_one_directory_one_releases(tmp_path, federated):
    server, start = federated
    first = server(tmp_path)
    start(first, 2)
    second = server(tmp_path)
    with pytest.raises(ArgumentError, match="taken it over"):
        start(first, 3, move=-0.3)
    start(second, 3)
    assert second.rounds == 3 and first.rounds == 2


@pytest.mark.usefixtures("on_another_machine")
def test_a_server_that_lost_files_is_refused(tmp_path, federated):
    server, start = federated
    start(server(tmp_path / "whole"), 2)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.name != ".lock")
    assert len(files) == 5
    for number, lost in enumerate(itertools.chain.from_iterable(itertools.combinations(files, k) for k in range(1, 5))):
        shutil.copytree(tmp_path / "whole", tmp_path / str(number), ignore=shutil.ignore_patterns(*lost))
        if lost == ("privacy.json",):  # says nothing that the others do not know
            continue
        with pytest.raises(ArgumentError, match="prior="):
            server(tmp_path / str(number))


def test_a_server_with_an_older_state_is_refused(tmp_path, federated):
    server, start = federated
    start(server(tmp_path), 1)
    shutil.copy2(tmp_path / "state.safetensors", tmp_path / "older")
    start(server(tmp_path), 2)
    shutil.copy2(tmp_path / "older", tmp_path / "state.safetensors")
    with pytest.raises(ArgumentError, match="cannot be asked again"):
        server(tmp_path)


@pytest.mark.usefixtures("on_another_machine")
def test_a_server_with_another_runs_state_is_refused(tmp_path, federated):
    server, start = federated
    start(server(tmp_path / "a"), 2)
    start(server(tmp_path / "b"), 3)  # one ahead, as if it had died between saving and writing down
    for name in ("state.safetensors", "cohorts.safetensors"):
        shutil.copy2(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(ArgumentError, match="another run's"):
        server(tmp_path / "a")


@pytest.mark.usefixtures("on_another_machine")
def test_a_server_put_back_is_refused_where_its_public_account_knows_better(tmp_path, federated):
    server, start = federated
    start(server(tmp_path / "a"), 1)
    shutil.copytree(tmp_path / "a", tmp_path / "before")
    start(server(tmp_path / "a"), 2)
    shutil.copy2(tmp_path / "a" / "privacy.json", tmp_path / "before")
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "before", tmp_path / "a")
    for name in os.listxattr(tmp_path / "a"):  # as on a disk that keeps none: else the folder knows it without this
        os.removexattr(tmp_path / "a", name)
    with pytest.raises(ArgumentError, match=r"privacy\.json tells"):
        server(tmp_path / "a")


def test_a_server_that_died_between_saving_and_writing_down_goes_on(tmp_path, federated, monkeypatch):
    server, start = federated
    first = server(tmp_path, key=bytes(range(32)))
    start(first, 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(type(first), "_write_down", _killed)
        start(first, 2)
    second = server(tmp_path)
    assert second.rounds == 2
    whole = start(server(None, key=bytes(range(32))), 4)
    assert np.array_equal(start(second, 4), whole) and second.ledger == second.ledger


@pytest.mark.usefixtures("on_another_machine")
def test_a_copied_server_costs_infinity(tmp_path, federated):
    server, start = federated
    start(server(tmp_path / "a"), 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a = server(tmp_path / "a")
    start(a, 3)
    forget()  # on another machine
    b = server(tmp_path / "b")
    start(b, 3, move=-0.3)
    assert np.isinf(_spent(a.ledger + b.ledger, a.plan)) and np.isfinite(_spent(a.ledger, a.plan))


def _spent(ledger, plan):
    from hushgrad.train.spending import guarantee_of

    return guarantee_of(ledger, plan).epsilon

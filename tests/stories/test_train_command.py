"""``hushgrad train`` as a user meets it: the demo, recipes, mistakes, Ctrl-C, kill and resume."""

from __future__ import annotations

import errno
import json
import re
import signal
import stat
from pathlib import Path

import pytest
import torch
from command_program import started
from safetensors.torch import load_file

from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError, StorageError
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.recipes import DATA, DEMO, MODELS, Recipe, evaluate, load_recipe, session, train
from hushgrad.train import Plan

QUICK = """
[model]
name = "logistic"
[data]
name = "digits"
[plan]
noise_multiplier = 2.0
delta = 1e-4
batch_size = 128
steps = 30
average = "tail"
[optimizer]
lr = 2.0
schedule = "cosine"
[run]
seed = 3
checkpoint_every = 10
evaluate_every = 15
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "quick.toml"
    path.write_text(QUICK)
    return path


def test_a_run_writes_everything_that_it_promises(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", str(recipe), "--out", str(out), "--quiet"]) == 0
    printed = capsys.readouterr().out
    names = {
        "model.safetensors",
        "plan.json",
        "ledger.json",
        "metrics.jsonl",
        "guarantee.json",
        "report.md",
        "report.json",
        "recipe.json",
    }
    assert {path.name for path in out.iterdir()} == names  # no checkpoint any more, hence no key
    plan, ledger = Plan.from_json((out / "plan.json").read_text()), Ledger.from_json((out / "ledger.json").read_text())
    guarantee = Guarantee.from_json((out / "guarantee.json").read_text())
    assert ledger.event() == plan.event() == guarantee.event and str(guarantee) in printed
    assert guarantee.epsilon == pytest.approx(plan.guarantee().epsilon)
    data = DATA["digits"]()
    model = MODELS["logistic"](data)
    model.load_state_dict(load_file(out / "model.safetensors"))
    accuracy = evaluate(model, data.test)["test_accuracy"]
    assert accuracy > 0.8 and f"{accuracy:.2%}" in printed and f"{accuracy:.2%}" in (out / "report.md").read_text()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert not any(name.startswith("raw_") for line in lines for name in line)  # un-noised metrics are not stored
    assert "test_accuracy" in lines[14] and "test_accuracy" not in lines[13]
    epsilons = [line["epsilon"] for line in lines]
    assert epsilons == sorted(epsilons) and epsilons[-1] == pytest.approx(guarantee.epsilon)
    assert all(line["epsilon"] >= plan.guarantee(steps=line["step"]).epsilon - 1e-9 for line in lines[:3])


def test_json_and_python_recipes(tmp_path, capsys):
    (tmp_path / "mine_hushgrad_test.py").write_text(
        "from torch.nn import Flatten, Linear, Sequential, Tanh\n"
        "def net(data, *, width):\n"
        "    return Sequential(Flatten(), Linear(64, width), Tanh(), Linear(width, data.classes))\n"
    )
    path = tmp_path / "recipe.py"
    path.write_text(
        'recipe = {"model": {"name": "mine_hushgrad_test:net", "width": 8}, "data": {"name": "digits"},\n'
        ' "plan": {"noise_multiplier": 1.0, "delta": 1e-4, "batch_size": 64, "steps": 3}, "run": {"max_physical_batch": 20}}\n'
    )
    assert main(["train", str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps"] == 3 and 0 <= answer["test_accuracy"] <= 1 and answer["guarantee"]["delta"] == 1e-4


@pytest.mark.parametrize(
    "change, match",
    [
        (("[model]", "[modell]"), "Did you mean 'model'"),
        (('"logistic"', '"logistik"'), "Did you mean 'logistic'"),
        (('"digits"', '"digit"'), "Did you mean 'digits'"),
        (("batch_size", "batchsize"), "Did you mean 'batch_size'"),
        (("delta = 1e-4", ""), "key 'delta'"),
        (("delta = 1e-4", "delta = 2"), "delta=2"),
        (("lr = 2.0", "lrr = 2.0"), "Did you mean 'lr'"),
        (("lr = 2.0", "lr = -2.0"), r"\[optimizer\]"),
        (("seed = 3", "seeds = 3"), "Did you mean 'seed'"),
        (("batch_size = 128", "batch_size = 128\nepsilon = 3.0"), "exactly one of epsilon and noise_multiplier"),
        (("batch_size = 128", 'batch_size = 128\ndenoise = "Laplacien"'), "Laplacian"),
        (("steps = 30", "steps = 30.5"), "steps"),
        (("[run]", "[run"), "to be TOML"),
        (('"cosine"', '"cosin"'), "Did you mean 'cosine'"),
        (('name = "digits"', 'name = "mnist"'), "path"),
        (("lr = 2.0", "lr = nan"), "lr=nan"),
        (("checkpoint_every = 10", "checkpoint_every = 0"), "checkpoint_every=0"),
        (("checkpoint_every = 10", "checkpoint_every = 1.5"), "checkpoint_every=1.5"),
        (("evaluate_every = 15", "evaluate_every = -1"), "evaluate_every=-1"),
        (("seed = 3", 'workers = "two"'), "workers='two'"),
        (("seed = 3", "workers = -1"), "workers=-1"),
        (("seed = 3", 'raw_metrics = "no"'), "raw_metrics='no'"),  # a word is true, and would store what is not private
        (("seed = 3", 'device = "banana"'), "device='banana'"),
    ],
)
def test_a_bad_recipe_is_one_sentence_and_exit_code_2(tmp_path, capsys, change, match):
    assert change[0] in QUICK
    path = tmp_path / "bad.toml"
    path.write_text(QUICK.replace(*change))
    assert main(["train", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    assert re.search(match, error), error


def test_single_values_are_set_on_the_command_line(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--set", "plan.steps=2", "--set", "optimizer.name=adam", "--set", "run.seed=4", "--quiet"]
    assert main(["train", str(recipe), "--out", str(out), *words]) == 0
    stored = json.loads((out / "recipe.json").read_text())
    assert (stored["plan"]["steps"], stored["optimizer"]["name"], stored["run"]["seed"]) == (2, "adam", 4)
    assert main(["train", str(recipe), "--out", str(tmp_path / "x"), "--set", "epsilon=3"]) == 2
    assert "table.key=value" in capsys.readouterr().err


def test_folders_are_not_overwritten(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    assert main(["train", str(recipe), "--out", str(out)]) == 2
    assert "new or empty folder" in capsys.readouterr().err and (out / "precious").exists()
    assert main(["train", "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert main(["train", str(tmp_path / "missing.toml"), "--out", str(tmp_path / "x")]) == 2


STUMBLING = """
import os, torch
class Net(torch.nn.Module):
    '''Sends its own process a signal in the middle of its 38th training pass, once.'''
    def __init__(self, classes):
        super().__init__()
        self.linear, self.passes = torch.nn.Linear(64, classes), 0
    def forward(self, x):
        self.passes += self.training
        if self.training and self.passes == 38 and "STUMBLE" in os.environ:
            os.kill(os.getpid(), int(os.environ["STUMBLE"]))
        return self.linear(x.flatten(1))
def net(data):
    return Net(data.classes)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, how):
    (tmp_path / "stumbling.py").write_text(STUMBLING)
    recipe, out = tmp_path / "recipe.toml", tmp_path / "cut"
    recipe.write_text(QUICK.replace('"logistic"', '"stumbling:net"').replace("steps = 30", "steps = 60"))
    child = started(["train", str(recipe), "--out", str(out), "--quiet", "--allow-code"], tmp_path, STUMBLE=str(int(how)))
    errors = child.communicate()[1]
    assert not (out / "guarantee.json").exists()
    if how == signal.SIGINT:
        assert child.returncode == 130 and f"hushgrad train --out {out} --resume --allow-code" in errors
    else:
        assert child.returncode == -signal.SIGKILL
    assert stat.S_IMODE((out / "checkpoint" / "key.json").stat().st_mode) == 0o600
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = train(load_recipe(recipe, allow_code=True), tmp_path / "whole", progress=False)
        resumed = train(None, out, resume=True, progress=False, allow_code=True)
    finally:
        torch.set_num_threads(threads)
    assert resumed.guarantee == whole.guarantee and resumed.test == whole.test
    for name in ("model.safetensors", "ledger.json", "metrics.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    with pytest.raises(ArgumentError, match="complete"):
        train(None, out, resume=True)


def test_a_full_disk_at_a_resume_leaves_the_run_as_it_was(tmp_path, recipe, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(session, "run_steps", _stop)
        with pytest.raises(KeyboardInterrupt):
            train(load_recipe(recipe), out, progress=False)
    before = {name: (out / name).read_bytes() for name in ("recipe.json", "plan.json", "checkpoint/key.json")}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", _half_written)
        with pytest.raises(StorageError, match="No space left"):
            train(None, out, resume=True, progress=False)
    assert {name: (out / name).read_bytes() for name in before} == before
    assert train(None, out, resume=True, progress=False).steps == 30


def _stop(*args, **options):
    raise KeyboardInterrupt


def _half_written(path, text, **options):
    with path.open("w") as file:
        file.write(text[: len(text) // 2])
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.parametrize("plan", ["", 'method = "dpftrl"\nnoise = { name = "BLT", buffers = 2 }\n'])
def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch, plan):
    """A file that grows from day to day: the steps since the checkpoint would be repeated on it, under the same noise."""
    rows = [f"{i % 7},{i % 3},{'yes' if i % 2 else 'no'}" for i in range(100)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["a,b,label", *rows]))
    data = f'name = "csv"\npath = "{table}"\nlabel = "label"\nclasses = ["no", "yes"]'
    recipe = tmp_path / "recipe.toml"
    text = QUICK.replace('name = "digits"', data).replace("batch_size = 128\nsteps = 30", f"batch_size = 8\nepochs = 3\n{plan}")
    recipe.write_text(text)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(session, "run_steps", _stop)
        with pytest.raises(KeyboardInterrupt):
            train(load_recipe(recipe), out, progress=False)
    table.write_text("\n".join(["a,b,label", *rows, *rows[:10]]))
    with pytest.raises(ArgumentError, match="their number has changed"):
        train(None, out, resume=True, progress=False)
    table.write_text("\n".join(["a,b,label", *rows]))
    # By content 82 of the 100 records are trained on, by place 80.
    assert train(None, out, resume=True, progress=False).steps == (30 if plan else 31)


def test_a_damaged_folder_is_one_sentence(tmp_path, capsys):
    (tmp_path / "recipe.json").write_text('{"model":')
    assert main(["train", "--out", str(tmp_path), "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "recipe.json" in error and "damaged" in error


def test_another_recipe_cannot_resume_a_run(tmp_path, recipe):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.json").write_text(json.dumps(Recipe.from_tables(DEMO).tables()))
    with pytest.raises(ArgumentError, match="that of the interrupted run"):
        train(load_recipe(recipe), tmp_path / "out", resume=True)


@pytest.mark.slow
def test_the_demo(tmp_path, capsys):
    for _ in range(2):  # the demo may replace an earlier demo
        assert main(["train", "--out", str(tmp_path / "demo")]) == 0
        printed = capsys.readouterr()
        assert "-DP per example" in printed.out and "epsilon <=" in printed.err
        assert json.loads((tmp_path / "demo" / "report.json").read_text())["outcome"]["test_accuracy"] > 0.88


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(QUICK, encoding="utf-8-sig")
    assert load_recipe(path).plan["batch_size"] == 128

"""Policies, approvals and releases: what an organisation allows is asked everywhere, and strange claims are questioned."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from forger import renamed

from hushgrad.budget import Ledger, Policy, read_policy
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError, PolicyRefused
from hushgrad.events import Gaussian
from hushgrad.guarantee import questions
from hushgrad.noise import Banded
from hushgrad.recipes import Recipe, train
from hushgrad.recipes.spending import require_allowed
from hushgrad.report import compare_runs, privacy_card
from hushgrad.sampling import CyclicPoisson
from hushgrad.train import Plan

TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-5, "batch_size": 64, "steps": 3},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A ledger with one finished run on one data set."""
    place = tmp_path_factory.mktemp("policy")
    ledger = Ledger.create(place / "budget.db")
    ledger.add("digits", epsilon=5.0, delta=1e-5)
    train(Recipe.from_tables(TABLES).paid_by(str(place / "budget.db"), "digits"), place / "run", progress=False)
    return place


def _policy(folder: Path, **rules: object) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in rules.items()]
    (folder / "policy.toml").write_text("\n".join(lines))
    return str(folder / "policy.toml")


@pytest.mark.parametrize(
    "rules, match",
    [
        ({"max_epsilon": 0.01}, "epsilon of at most 0.01"),
        ({"units": ["user"]}, "'user'"),
    ],
)
def test_train_tune_ledger_and_card_obey(place, tmp_path, capsys, rules, match):
    policy = _policy(tmp_path, **rules)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\nname = "logistic"\n[data]\nname = "digits"\n'
        "[plan]\nnoise_multiplier = 2.0\ndelta = 1e-5\nbatch_size = 64\nsteps = 3\n"
    )
    out = str(tmp_path / "out")
    ledger = str(place / "budget.db")
    for words in (
        ["train", str(recipe), "--out", out, "--policy", policy],
        ["tune", str(recipe), "--over", "optimizer.lr=0.1,1", "--mean", "2", "--out", out + "t", "--policy", policy],
        ["ledger", "add", ledger, "others", "--epsilon", "3", "--delta", "1e-5", "--policy", policy],
        ["report", str(place / "run"), "--policy", policy],
    ):
        assert main(words) == 3, words
        assert match in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert [dataset.name for dataset in Ledger(ledger).datasets()] == ["digits"]


@pytest.mark.parametrize("command", ["train", "tune"])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_refused_leaves_its_folder_as_it_was(tmp_path, capsys, command, there):
    Ledger.create(tmp_path / "budget.db").add("tiny", epsilon=0.001, delta=1e-7)
    recipe = tmp_path / "r.py"
    recipe.write_text(f"recipe = {TABLES}")
    out = tmp_path / "out"
    if there:
        out.mkdir()
    words = [command, str(recipe), "--out", str(out), *(["--over", "optimizer.lr=0.1,1"] if command == "tune" else [])]
    paid = ["--ledger", str(tmp_path / "budget.db"), "--dataset", "tiny"]
    for more in (["--policy", _policy(tmp_path, max_epsilon=0.01)], paid):
        assert main([*words, *more]) == 3, capsys.readouterr().err
        assert out.exists() is there and (not there or not list(out.iterdir()))


_MISSED = {
    "--ledger nope.db --dataset digits": "to be a ledger",
    "--ledger budget.db --dataset digit": "to be in the ledger (digits",
    "--policy nope.toml": "Expected a policy",
}
_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from hushgrad.cli.main import main
print([main(line.split()) for line in sys.stdin])
"""


def test_a_payer_that_is_not_there_is_missed_before_torch_and_data(place):
    lines = [f"{name} no-such-recipe.toml --out never {words}" for name in ("train", "tune") for words in _MISSED]
    program, text = [sys.executable, "-c", _WITHOUT_TORCH], "\n".join(lines)
    done = subprocess.run(program, input=text, cwd=place, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[2] * len(lines)}\n", done.stderr
    for match, told in zip([*_MISSED.values()] * 2, done.stderr.splitlines(), strict=True):
        assert match in told
    assert not (place / "never").exists()


@pytest.mark.parametrize(
    "rules", [{"max_delta": 1e-7}, {"relations": ("zero_out",)}, {"accountants": ("rdp",)}, {"max_epsilon": 0.5}]
)
def test_every_rule_refuses_what_it_names(rules):
    claim = {"epsilon": 1.0, "delta": 1e-5, "relation": "add_remove", "unit": "example", "accountant": "pld", "records": 1000}
    Policy().require(**claim)
    with pytest.raises(PolicyRefused):
        Policy(**rules).require(**claim)


def test_the_variable_names_a_policy_for_everybody(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HUSHGRAD_POLICY", _policy(tmp_path, max_epsilon=0.01))
    with pytest.raises(PolicyRefused, match="epsilon of at most"):
        privacy_card(place / "run")
    with pytest.raises(PolicyRefused, match="epsilon of at most"):
        train(Recipe.from_tables(TABLES), tmp_path / "out", progress=False)
    with pytest.raises(PolicyRefused, match="epsilon of at most"):
        Ledger(place / "budget.db").add("others", epsilon=1.0, delta=1e-6)
    monkeypatch.setenv("HUSHGRAD_POLICY", str(tmp_path / "gone.toml"))
    with pytest.raises(ArgumentError, match="gone"):  # a policy that cannot be read allows nothing
        train(Recipe.from_tables(TABLES), tmp_path / "out", progress=False)


def test_how_a_run_is_carried_out_is_part_of_a_policy(tmp_path):
    for name in ("certified", "secure", "ledger"):
        with pytest.raises(PolicyRefused, match=repr(name)):
            train(Recipe.from_tables(TABLES), tmp_path / "out", progress=False, policy=Policy(**{name: True}))
    with pytest.raises(PolicyRefused, match="accountant 'rdp'"):
        train(Recipe.from_tables(TABLES), tmp_path / "out", progress=False, policy=Policy(accountants=("rdp",)))
    many = {**TABLES, "plan": {**TABLES["plan"], "delta": 0.01}}
    with pytest.raises(PolicyRefused, match="below 1 / 1438"):
        train(Recipe.from_tables(many), tmp_path / "out", progress=False, policy=Policy())


@pytest.mark.parametrize(
    "content", ["max_epsilom = 3", "max_epsilon = -1", "relations = 'add'", "[", "units = [1]", "approvals = 1.5"]
)
def test_a_policy_that_is_not_understood_is_refused(tmp_path, content):
    (tmp_path / "p.toml").write_text(content)
    with pytest.raises(ArgumentError):
        read_policy(tmp_path / "p.toml")


def test_only_what_a_ledger_has_booked_and_people_have_approved_is_released(place, tmp_path, capsys):
    ledger, run = str(place / "budget.db"), place / "run"
    other = tmp_path / "other.safetensors"
    other.write_bytes((run / "model.safetensors").read_bytes() + b"\0")
    assert main(["release", str(other), "--ledger", ledger]) == 3
    assert "no run in the ledger has booked" in capsys.readouterr().err
    policy = _policy(tmp_path, approvals=2)
    words = ["release", str(run), "--ledger", ledger, "--policy", policy, "--out", str(tmp_path / "public.safetensors")]
    assert main(words) == 3
    assert "wants 2 approvals" in capsys.readouterr().err and not (tmp_path / "public.safetensors").exists()
    identifier = json.loads((run / "reservation.json").read_text())["reservation"]
    for who in ("Ada", "ada ", "Ａda"):  # one person, however she writes her name
        assert main(["ledger", "approve", ledger, identifier, "--by", who]) == 0
    assert main(words) == 3
    assert main(["ledger", "approve", ledger, identifier, "--by", "Grace"]) == 0
    assert main(words) == 0
    assert (tmp_path / "public.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert "approved by Ada, Grace" in capsys.readouterr().out
    assert Ledger(ledger).verify().ok


@pytest.mark.parametrize(
    "content", [b"", b'[model]\nname = "logistic"\n', b'{"epsilon": 1}', b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 40]
)
def test_what_is_no_model_file_is_called_so(place, tmp_path, capsys, content):
    (tmp_path / "recipe.toml").write_bytes(content)
    assert main(["release", str(tmp_path / "recipe.toml"), "--ledger", str(place / "budget.db")]) == 2
    assert "recipe.toml is no model file" in capsys.readouterr().err


def test_a_release_obeys_the_policy_of_the_day(place, tmp_path, capsys):
    words = ["release", str(place / "run"), "--ledger", str(place / "budget.db"), "--policy"]
    for rules, match in (
        ({"max_epsilon": 0.01}, "epsilon of at most"),
        ({"units": ["user"]}, "'user'"),
        ({"max_delta": 1e-9}, "delta"),
    ):
        assert main([*words, _policy(tmp_path, **rules)]) == 3  # its training may have known another policy, or none
        assert match in capsys.readouterr().err


def test_nothing_is_released_by_a_ledger_that_was_edited(place, tmp_path, capsys):
    forged = tmp_path / "forged.db"
    shutil.copy(place / "budget.db", forged)
    with contextlib.closing(sqlite3.connect(forged)) as file, file:
        file.execute("DROP TRIGGER hushgrad_ledger_same")
        file.execute("UPDATE hushgrad_ledger SET text = replace(text, '\"epsilon\":5.0', '\"epsilon\":50.0')")
    assert main(["release", str(place / "run"), "--ledger", str(forged)]) == 3
    assert "the ledger does not verify. Row 2 was changed" in capsys.readouterr().err


def test_that_a_run_is_booked_is_looked_up_and_not_read_in_its_folder(place, tmp_path, capsys):
    ledger, wants = Ledger(place / "budget.db"), Policy(ledger=True)
    with pytest.raises(PolicyRefused, match="give the ledger"):
        privacy_card(place / "run", policy=wants)
    card = privacy_card(place / "run", policy=wants, ledger=ledger)
    assert card.budget["looked_up"] and card.budget["head"] == ledger.head and "not looked up" not in card.to_markdown()
    assert "not looked up in the ledger" in privacy_card(place / "run").to_markdown()
    train(Recipe.from_tables(TABLES), tmp_path / "unpaid", progress=False)
    booked = (place / "run" / "reservation.json").read_text()
    report = json.loads((tmp_path / "unpaid" / "report.json").read_text())
    for forged in (booked, booked.replace("run", "unpaid"), json.dumps({"reservation": "0" * 32, "state": "committed"})):
        (tmp_path / "unpaid" / "reservation.json").write_text(forged)
        (tmp_path / "unpaid" / "report.json").write_text(json.dumps(report))
        with pytest.raises(ArgumentError, match=r"reservation\.json to name the reservation in report\.json"):
            privacy_card(tmp_path / "unpaid", policy=wants, ledger=ledger)
        (tmp_path / "unpaid" / "report.json").write_text(json.dumps({**report, "reservation": json.loads(forged)["reservation"]}))
        renamed(tmp_path / "unpaid")
        with pytest.raises(ArgumentError, match="ledger to have booked this run"):
            privacy_card(tmp_path / "unpaid", policy=wants, ledger=ledger)
    words = ["report", str(tmp_path / "unpaid"), "--save", str(tmp_path / "c.json"), "--ledger", ledger.place]
    assert main(words) == 2 and not (tmp_path / "c.json").exists()


def test_a_card_is_verified_under_the_policy_that_it_was_made_under(place, tmp_path, capsys):
    card, policy = str(tmp_path / "c.json"), _policy(tmp_path, max_epsilon=5.0, ledger=True)
    words = ["report", str(place / "run"), "--save", card, "--policy", policy, "--ledger", str(place / "budget.db")]
    assert main(words) == 0 and main(["report", "--verify", card, "--policy", policy]) == 0
    for rules, match in (
        ({"max_epsilon": 50.0, "ledger": True}, "made under this policy"),  # edited: looser
        ({"max_epsilon": 0.1, "ledger": True}, "epsilon of at most"),
    ):
        capsys.readouterr()
        assert main(["report", "--verify", card, "--policy", _policy(tmp_path, **rules)]) == 1
        assert match in capsys.readouterr().out


def test_a_delta_is_compared_with_all_records_however_batches_are_drawn(tmp_path):
    plan = dataclasses.replace(
        Plan.dpsgd(noise_multiplier=2.0, delta=1e-3, batch_size=64, dataset_size=1438, steps=8),
        sampler=CyclicPoisson(period=4, rate=4 * 64 / 1438, steps=8),
        noise=Banded(bands=4),
    )
    with pytest.raises(PolicyRefused, match=r"below 1 / 1438"):
        require_allowed(Policy(), plan, paid=False)


def test_names_that_look_alike_are_one_budget(tmp_path):
    ledger = Ledger.create(tmp_path / "b.db")
    ledger.add("Patients 2024", epsilon=1.0, delta=1e-6)
    for twin in (
        "patients 2024",
        "Patients  2024 ",
        "Patients2024",
        "Pаtients 2024",
        "Ｐatients 2024",
        "Pátients 2024",
    ):
        with pytest.raises(ArgumentError, match="to look unlike 'Patients 2024'"):
            ledger.add(twin, epsilon=1.0, delta=1e-6)
        with pytest.raises(ArgumentError, match="to be in the ledger"):
            ledger.reserve(twin, Gaussian(50.0))
    ledger.add("Patients 2025", epsilon=1.0, delta=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ["epsilon", "--noise-multiplier", "1", "--delta", "0.5"],
        ["calibrate", "--epsilon", "1", "--delta", "0.5"],
        ["plan", "--epsilon", "1", "--delta", "0.01", "--dataset-size", "1000", "--batch-size", "100", "--steps", "4"],
        ["tune", "--dry", "--epsilon", "1", "--delta", "0.5"],
    ],
    ids=lambda words: words[0],
)
def test_strange_claims_are_questioned(words, capsys):
    assert main(words) == 0
    assert "Question: A delta of 0." in capsys.readouterr().err


def test_a_claim_of_a_million_is_questioned_on_every_page(tmp_path, capsys):
    tables = {**TABLES, "plan": {**TABLES["plan"], "noise_multiplier": 0.01, "delta": 0.1}}
    train(Recipe.from_tables(tables), tmp_path / "run", progress=False)
    for page in ((tmp_path / "run" / "report.md").read_text(), privacy_card(tmp_path / "run").to_markdown()):
        assert "promises next to nothing" in page and "A delta of 0.1" in page
    assert questions(1.0, 1e-6) == () and len(questions(1.0, 1e-4, records=10_000)) == 1


def test_two_runs_side_by_side(place, tmp_path, capsys):
    tables = {**TABLES, "plan": {**TABLES["plan"], "delta": 1e-6, "noise_multiplier": 4.0}}
    train(Recipe.from_tables(tables), tmp_path / "other", progress=False)
    assert main(["compare", str(place / "run"), str(tmp_path / "other")]) == 0
    printed = capsys.readouterr().out
    assert "Their deltas differ. At delta 1e-06" in printed and "other promises more" in printed
    found = compare_runs(place / "run", tmp_path / "other")
    rows = {what: (first, second) for what, first, second in found.rows}
    assert rows["delta"] == ("1e-05", "1e-06") and rows["steps"] == ("3", "3")
    assert rows["test records"][0].isdigit()
    guarantee = json.loads((tmp_path / "other" / "guarantee.json").read_text())
    (tmp_path / "other" / "guarantee.json").write_text(json.dumps({**guarantee, "epsilon": 0.001}))
    assert main(["compare", str(place / "run"), str(tmp_path / "other")]) == 2  # a forged epsilon is not compared

"""Advice from public facts, and training by it: a codebook, a file, a budget; nothing to tune, and the truth about the model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

import hushgrad
from hushgrad.advice import Codebook, advise, read_codebook, rules
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.events import Gaussian
from hushgrad.recipes.encoders import Encoder

BOOK = """
kind = "table"
classes = ["no", "yes"]
label = "y"
[columns]
age = { low = 0, high = 100, bins = 5 }
job = { values = ["a", "b", "c"] }
"""
LEARNED = BOOK.replace("bins = 5", "bins = 5, learn = true")


def table(folder: Path, *, rows: int = 3000, linked: float = 1.0, ones: float = 0.5) -> str:
    rng = np.random.default_rng(5)
    lines = ["age,job,y"]
    for _ in range(rows):
        yes = rng.random() < ones
        job = rng.choice(["a", "b"], p=[0.9, 0.1] if yes else [0.1, 0.9]) if rng.random() < linked else "c"
        lines.append(f"{rng.integers(0, 90)},{job},{'yes' if yes else 'no'}")
    (folder / "table.csv").write_text("\n".join(lines))
    return str(folder / "table.csv")


def book(folder: Path, text: str = BOOK) -> str:
    (folder / "book.toml").write_text(text)
    return str(folder / "book.toml")


def auto(folder: Path, data: str, text: str = BOOK, *more: str) -> list[str]:
    words = ["train", book(folder, text), "--auto", "--data", data, "--out", str(folder / "run"), "--quiet"]
    return [
        *words,
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
        "--records",
        "2400",
        "--set",
        "run.seed=3",
        "--set",
        "plan.steps=60",
        *more,
    ]


def test_a_codebook_and_a_budget_are_enough(tmp_path, capsys):
    assert main(auto(tmp_path, table(tmp_path))) == 0
    printed = capsys.readouterr().out
    assert "(1, 1e-05)-DP" in printed
    assert "Always the most frequent class" in printed
    report = json.loads((tmp_path / "run" / "report.json").read_text())["outcome"]
    assert report["test_accuracy"] > 0.8
    assert report["test_auc"] > 0.85
    assert 400 < sum(map(sum, report["confusion"])) < 800
    assert "verdict" not in report
    assert "| no | " in (tmp_path / "run" / "report.md").read_text()


def test_what_is_learned_first_is_written_once_and_paid_for(tmp_path):
    assert main(auto(tmp_path, table(tmp_path), LEARNED, "--json")) == 0
    out = tmp_path / "run"
    plan = hushgrad.Plan.from_json((out / "plan.json").read_text())
    assert plan.before == Gaussian(rules.MEAN_NOISE)
    claim = json.loads((out / "guarantee.json").read_text())
    assert claim["epsilon"] <= 1.0
    assert hushgrad.Guarantee.from_json(claim).event == plan.event()
    learned = Encoder.from_json((out / "encoder.json").read_text())
    assert learned.learns is None
    assert learned.columns[0].cuts is not None


def test_no_better_than_a_constant_is_said_aloud(tmp_path, capsys):
    assert main(auto(tmp_path, table(tmp_path, linked=0.0, ones=0.1))) == 0
    assert "No better than a constant" in capsys.readouterr().out
    assert "No better than a constant" in (tmp_path / "run" / "report.md").read_text()


def test_the_command_that_advice_prints_trains_as_advised(tmp_path, capsys):
    asked = ["--epsilon", "1", "--delta", "1e-5", "--records", "2400", "--minutes", "0.5"]
    assert main(["advise", book(tmp_path), *asked]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("Train so:  hushgrad ")
    places = {"FILE": table(tmp_path), "DIR": tmp_path / "advised"}
    assert main([str(places.get(word, word)) for word in shlex.split(line)]) == 0
    capsys.readouterr()
    assert main(["advise", book(tmp_path), *asked, "--json"]) == 0
    advised = json.loads(capsys.readouterr().out)["recipe"]["plan"]
    assert json.loads((tmp_path / "advised" / "recipe.json").read_text())["plan"] == advised


def test_advice_reads_nothing_but_its_arguments(tmp_path, capsys):
    assert main(["advise", book(tmp_path), "--epsilon", "1", "--delta", "1e-5", "--records", "2400", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recipe"]["plan"]["dataset_size"] == 2400
    assert "path" not in said["recipe"]["data"]
    assert said["expected_gap_points"] > 0


@pytest.mark.parametrize("records", [500, 20_000, 3_000_000])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_rate_follows_the_rule_and_the_plan_meets_the_budget(records, epsilon):
    advice = advise(Codebook(kind="text", classes=("a", "b")), epsilon=epsilon, delta=1e-6, records=records)
    plan, rate = advice.plan, advice.tables["optimizer"]["lr"]
    assert plan.guarantee().epsilon <= epsilon
    step = plan.batch_size / (plan.noise_multiplier * plan.steps**0.5)
    step *= min(2.0, max(1.0, 1000 / (step * plan.steps)))  # n mu, as far as the weights reach
    assert rate * plan.max_grad_norm == pytest.approx(min(step, rules.LONGEST_STEP["text"]))


def test_less_time_means_fewer_steps():
    book = Codebook(kind="images", classes=("a", "b"))
    slow, quick = (advise(book, epsilon=3, delta=1e-5, records=60_000, minutes=m) for m in (30, 0.5))
    assert 40 <= quick.plan.steps < slow.plan.steps <= rules.STEPS["images"]


@pytest.mark.parametrize(
    "text",
    [
        "kind = 'table'",
        "kind = 'tabel'\nclasses = ['a', 'b']",
        "kind = 'text'\nclasses = ['a']",
        "kind = 'text'\nclasses = ['a', 'b']\ncolour = 1",
        *(
            BOOK.replace('label = "y"', f'label = "y"\n{more}')
            for more in ('header = "yes"', "delimiter = ';;'", "delimiter = 5", "user = 'y'")
        ),
        BOOK.replace('label = "y"', "label = 3"),
    ],
)
def test_a_codebook_that_is_not_understood_is_refused(tmp_path, text):
    with pytest.raises(ArgumentError):
        read_codebook(book(tmp_path, text))


def test_an_epsilon_out_of_reach_is_told_so_in_words_of_the_question(tmp_path, capsys):
    assert main(["advise", book(tmp_path), "--records", "600", "--epsilon", "1e-9", "--delta", "1e-200"]) == 2
    assert "epsilon=1e-09 to be within reach at delta=1e-200" in capsys.readouterr().err
    assert main(["advise", book(tmp_path), "--records", "600", "--epsilon", "1e-3", "--delta", "1e-5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expected_gap_points"] == 100


def test_the_same_words_and_resume_go_on_with_the_run_that_they_began(tmp_path, capsys, monkeypatch):
    words = auto(tmp_path, table(tmp_path, rows=200), LEARNED, "--set", "run.checkpoint_every=5")
    with monkeypatch.context() as broken:
        broken.setattr("hushgrad.recipes.session.save_model", _out_of_room)
        assert main(words) == 2
    assert main([*words, "--epsilon", "2", "--resume"]) == 2
    assert "recipe" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert "(1, 1e-05)-DP" in capsys.readouterr().out


def _out_of_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("rate", ["1e40", "-1e40", "1" + 40 * "0", "nan"])
def test_a_rate_that_single_precision_does_not_hold_is_refused_before_a_step(tmp_path, capsys, rate):
    assert main(auto(tmp_path, table(tmp_path, rows=50), BOOK, "--set", f"optimizer.lr={rate}")) == 2
    assert "Expected lr=" in capsys.readouterr().err


def test_the_number_of_records_is_asked_for(tmp_path, capsys):
    assert main(["advise", book(tmp_path), "--epsilon", "1", "--delta", "1e-5"]) == 2
    assert "may be known" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--epsilon", "1"], ["--auto"], ["--auto", "--epsilon", "1", "--delta", "1e-5"]])
def test_words_that_do_not_belong_together_are_refused(tmp_path, words):
    assert main(["train", book(tmp_path), "--out", str(tmp_path / "run"), *words]) == 2


def test_a_plan_beside_the_advice_is_refused_and_not_passed_over(tmp_path, capsys):
    assert main(auto(tmp_path, table(tmp_path), BOOK, "--plan", "plan.json")) == 2
    assert "--auto makes a plan of its own" in capsys.readouterr().err


@pytest.mark.parametrize("public", [False, True])
def test_records_that_are_split_off_to_test_on_are_said_to_be_unprotected(tmp_path, capsys, public):
    data = table(tmp_path)
    words = [word for word in auto(tmp_path, data) if word != "--quiet"]
    assert main([*words, "--test-data", data] if public else words) == 0
    assert ("which nothing protects" in capsys.readouterr().out) is not public
    told = json.loads((tmp_path / "run" / "report.json").read_text())["caveats"]
    assert any("The test records are a part of the data file" in caveat for caveat in told) is not public


@pytest.mark.parametrize("epsilon", [0.01, 0.05, 0.1])
def test_a_small_budget_leaves_room_for_the_steps_beside_what_is_learned_first(epsilon):
    advice = advise(Codebook(kind="images", classes=("a", "b")), epsilon=epsilon, delta=1e-5, records=60_000)
    alone = advise(Codebook(kind="text", classes=("a", "b")), epsilon=epsilon, delta=1e-5, records=60_000)
    assert advice.plan.guarantee().epsilon <= epsilon
    learned = Encoder.from_json(advice.tables["data"]["encoder"]).learns
    assert advice.plan.before == Gaussian(learned) and learned > rules.MEAN_NOISE
    assert hushgrad.epsilon(advice.plan.before, delta=1e-5) < 0.5 * epsilon
    assert advice.plan.noise_multiplier and alone.plan.noise_multiplier

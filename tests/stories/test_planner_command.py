"""``hushgrad plan`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hushgrad.cli.main import main
from hushgrad.train import Plan

WORDS = ["plan", "--epsilon", "2", "--delta", "1e-5", "--dataset-size", "1000", "--batch-size", "100"]


def test_a_table_with_reasons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*WORDS, "--epochs", "2", "--parameters", "1e6", "--memory", "10M", "--save", str(path)]) == 0
    out = capsys.readouterr().out
    assert "DP-SGD" in out and "Least predicted error here." in out and "Not ranked:" in out
    assert Plan.from_json(path.read_text()).guarantee().epsilon <= 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--steps", "20", "--no-sampling", "--momentum", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["candidates"][0]["relative"] == 1
    assert all(c["plan"]["sampler"]["sampler"] == "RoundRobin" for c in found["candidates"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "exactly one of epochs and steps"),
        (["--epochs", "2", "--memory", "10x"], "expected bytes"),
        (["--epochs", "2", "--memory", "10M"], "to be given with --memory"),
        (["--steps", "2.5"], "expected a whole number"),
        (["--epochs", "2", "--relation", "cousins"], "cousins"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *words]) == 2
    err = capsys.readouterr().err
    assert message.lower() in err.lower() and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--modle smollm2-135m", "has no option --modle. Did you mean --model?"),
        ("--computes 1e18", "has no option --computes. Did you mean --compute?"),
        ("--model gpt2 --dataset-size 10", "hushgrad plan --model NAME has no option --dataset-size."),
        (
            "--model gpt2 --device-memory 8GB",
            "expected a number such as 8 or 1e-5, got '8GB'. Try hushgrad plan --model NAME --help.",
        ),
        ("--compute 1e18", "are required: --epsilon, --delta, --dataset-size. Try hushgrad plan --compute FLOP --help."),
    ],
)
def test_each_of_its_questions_has_options_of_its_own(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err

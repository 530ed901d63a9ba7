"""Numbers that make no sense, in every option that takes one: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import shlex

import pytest

from hushgrad.cli.main import main

_LINES = (
    "epsilon --noise-multiplier 2 --rate 0.5 --steps 2 --delta 1e-5",
    "calibrate --epsilon 4 --delta 1e-5 --rate 0.5 --steps 2 --dataset-size 10",
    "calibrate --for batch --noise-multiplier 4 --epsilon 4 --delta 1e-5 --steps 2 --dataset-size 10",
    "plan --epsilon 4 --delta 1e-5 --dataset-size 10 --batch-size 5 --steps 2 --parameters 3 --memory 9 --max-grad-norm 1 --no-sampling",
    "plan --compute 1e12 --epsilon 4 --delta 1e-5 --dataset-size 10",
    "plan --model smollm2-135m --rank 4 --processes 1 --device-memory 8 --batch-size 8 --length 8",
    "tune --dry --epsilon 1 --delta 1e-5 --mean 2 --shape 1",
    "ledger add {ledger} data --epsilon 3 --delta 1e-6 --records 9",
)


def _changed(line: str) -> list[str]:
    """The line with each of its numbers in turn made 0, negative, endless, no number, or huge."""
    words = line.split()
    places = [i for i, word in enumerate(words) if word[0].isdigit()]
    return [shlex.join([*words[:i], bad, *words[i + 1 :]]) for i in places for bad in ("0", "-1", "inf", "nan", "1e400")]


@pytest.mark.parametrize("line", _LINES, ids=lambda line: " ".join(line.split()[:2]))
def test_a_number_without_sense_is_one_sentence(line, tmp_path, capsys):
    ledger = str(tmp_path / "budget.db")
    assert main(["ledger", "init", ledger]) == 0
    refused = 0
    for changed in _changed(line):
        code = main(shlex.split(changed.replace("{ledger}", ledger)))
        said = capsys.readouterr().err
        assert code in (0, 1, 2, 3) and said.count("\n") == said.count("hushgrad: ") + said.count("Question: "), changed
        refused += code == 2
    assert refused > len(_changed(line)) / 3  # most of them make no question

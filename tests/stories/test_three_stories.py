"""Three people, each from an empty folder, in a real shell: a data scientist, a privacy officer, and whoever forges what they made."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS

RECIPE = """
[model]
name = "logistic"
[data]
name = "csv"
path = "people.csv"
label = "y"
classes = ["no", "yes"]
[plan]
noise_multiplier = 2.0
delta = 1e-4
batch_size = 64
steps = 20
[optimizer]
lr = 4.0
"""
SCIENTIST = """
hushgrad plan --epsilon 3 --delta 1e-4 --dataset-size 320 --batch-size 64 --steps 20 --save plan.json
hushgrad train recipe.toml --plan plan.json --out run --quiet
hushgrad evaluate run held-out.csv
hushgrad predict run new.csv --out predictions.csv
"""
OFFICER = """
export HUSHGRAD_POLICY="$PWD/policy.toml"
hushgrad ledger init budget.db
hushgrad ledger add budget.db people --epsilon 9 --delta 1e-4 --records 320
hushgrad train recipe.toml --out paid --quiet --ledger budget.db --dataset people
refused 3 hushgrad train recipe.toml --out unpaid --quiet
refused 3 hushgrad release paid --ledger budget.db --out public.safetensors
hushgrad ledger approve budget.db "$(sed -n 's/.*"reservation": "\\([0-9a-f]*\\)".*/\\1/p' paid/reservation.json)" --by Ada
hushgrad release paid --ledger budget.db --out public.safetensors
hushgrad report --new-signer officer.key
hushgrad report paid --sign officer.key --by Ada --save card.json --ledger budget.db
hushgrad report --verify card.json public.safetensors --signer officer.key.pub
"""
FORGER = """
sed 's/"epsilon": [0-9][0-9.]*/"epsilon": 0.1/' card.json > forged.json
refused 1 hushgrad report --verify forged.json public.safetensors --signer officer.key.pub
refused 1 hushgrad report --verify card.json run/model.safetensors --signer officer.key.pub
head -c 200 card.json > cut.json
refused 1 hushgrad report --verify cut.json
refused 3 hushgrad release run --ledger budget.db
head -c 300 public.safetensors > cut.safetensors
refused 2 hushgrad predict cut.safetensors new.csv
head -c 100 plan.json > cut-plan.json
refused 2 hushgrad train recipe.toml --plan cut-plan.json --out other
refused 2 hushgrad report run --policy /dev/null/none
"""
HEAD = """set -eu
hushgrad() { "$PYTHON" -m hushgrad.cli.main "$@"; }
refused() {
  wanted=$1; shift; code=0
  "$@" > refused.out 2>&1 || code=$?
  cat refused.out
  [ "$code" = "$wanted" ] || { echo "exit code $code"; exit 99; }
  [ "$(grep -c Traceback refused.out)" = 0 ]
}
"""


def _people(path: Path, count: int, *, label: bool) -> None:
    draw = random.Random(count)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "job", *(["y"] if label else [])])
        for _ in range(count):
            job = draw.choice(["clerk", "boss", "none"])
            out.writerow([draw.randint(18, 80), job, *(["yes" if job == "boss" else "no"] if label else [])])


def _shell(script: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("HUSHGRAD_POLICY", None)
    done = subprocess.run(["sh", "-c", HEAD + script], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "policy.toml").write_text('max_epsilon = 9.0\nrelations = ["add_remove"]\nledger = true\napprovals = 1\n')
    _people(folder / "people.csv", 400, label=True)
    _people(folder / "held-out.csv", 60, label=True)
    _people(folder / "new.csv", 5, label=False)
    return folder


@pytest.mark.slow  # some twenty processes, each of which imports torch
def test_from_an_empty_folder_to_predictions_a_signed_card_and_refusals(folder):
    told = _shell(SCIENTIST, folder)
    with (folder / "predictions.csv").open() as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 5 and {answer["prediction"] for answer in answers} <= {"no", "yes"} and "60 records" in told
    told = _shell(OFFICER, folder)
    assert "May be released" in told and "approved by Ada" in told and "The model file is the one it is about" in told
    assert "wants 1 approvals" in told and "wants runs with 'ledger'" in told
    assert json.loads((folder / "card.json").read_text())["signed_by"] == "Ada"
    told = _shell(FORGER, folder)
    for words in ("does not fit its content", "another one", "JSON", "no run in the ledger has booked", "to be a model file"):
        assert words in told, words

"""A recipe whose [data] declares its columns, as a codebook does: bounds, cut points and categories, from training to prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hushgrad
from hushgrad.advice import Codebook
from hushgrad.cli.main import main
from hushgrad.events import Gaussian
from hushgrad.recipes import DATA, load_predictor
from hushgrad.recipes.column import columns_of

COLUMNS = {"age": {"low": 0, "high": 100, "bins": 5}, "job": {"values": ["a", "b"]}}
RECIPE = """
[model]
name = "logistic"
[data]
name = "csv"
path = "PATH"
label = "y"
classes = ["no", "yes"]
[data.columns]
age = { low = 0, high = 100, bins = 5 }
job = { values = ["a", "b"] }
[plan]
noise_multiplier = 1.0
delta = 1e-4
batch_size = 16
steps = 3
"""


def _folder(folder: Path, *, recipe: str = RECIPE) -> Path:
    rows = [f"{i * 7 % 90},{'ab'[i % 2]},{i},{['no', 'yes'][i % 3 == 0]}" for i in range(90)]
    (folder / "people.csv").write_text("\n".join(["age,job,note,y", *rows]) + "\n")
    (folder / "recipe.toml").write_text(recipe.replace("PATH", str(folder / "people.csv")))
    return folder


def _train(folder: Path, *words: str) -> int:
    return main(["train", str(folder / "recipe.toml"), "--out", str(folder / "run"), "--quiet", *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = _folder(tmp_path_factory.mktemp("declared"))
    assert _train(folder) == 0
    return folder


def test_a_recipe_declares_columns_as_a_codebook_does(trained):
    book = Codebook(kind="table", classes=("no", "yes"), label="y", columns=columns_of(COLUMNS))
    assert load_predictor(trained / "run").encoder == book.encoder(buckets=8, weight=1.0, noise_multiplier=30.0)


def test_cut_points_that_a_recipe_learns_are_paid_for(tmp_path):
    _folder(tmp_path, recipe=RECIPE.replace("bins = 5", "bins = 5, learn = true"))
    assert _train(tmp_path) == 0
    assert hushgrad.Plan.from_json((tmp_path / "run" / "plan.json").read_text()).before == Gaussian(30.0)
    assert load_predictor(tmp_path / "run").encoder.columns[0].cuts is not None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("age = {", "agee = {", "agee"),
        ("age = {", "y = {", "leave out the label"),
        ("low = 0, high", "lo = 0, high", "key of column age"),
        ("low = 0, high = 100", "bounds = [0, 100]", "Bounds are low and high; categories are values"),
        ('label = "y"', 'label = "y"\ndrop = ["note"]', "data.drop"),
        ('label = "y"', 'label = "y"\nbuckets = 8', "data.buckets"),
        ('label = "y"', 'label = "y"\nuser = "job"', "leave out the user"),
        ("age = { low = 0, high = 100, bins = 5 }", "age = 3", "column"),
    ],
)
def test_declarations_that_do_not_fit_are_refused_by_name(tmp_path, capsys, old, new, said):
    _folder(tmp_path, recipe=RECIPE.replace(old, new))
    assert _train(tmp_path) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_columns_by_position_where_there_is_no_header(tmp_path):
    (tmp_path / "bare.csv").write_text("".join(f"{i},{'ab'[i % 2]}\n" for i in range(40)))
    declared = {"0": {"cuts": [10, 20]}}
    data = DATA["csv"](path=str(tmp_path / "bare.csv"), label=1, classes=["a", "b"], header=False, columns=declared, placed=True)
    assert data.shape == (3,)


def test_cells_that_were_not_declared_are_counted_by_row(trained, capsys):
    (trained / "new.csv").write_text("age,job\n30,a\nmany,a\n,b\n40,king\naged,b\n")
    words = ["predict", str(trained / "run"), str(trained / "new.csv")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 6
    assert re.findall(r"column '(\w+)' .* in (\d) rows? \((.*)\)", printed.err) == [("age", "2", "2, 5"), ("job", "1", "4")]
    assert not any(
        word in printed.err for word in ("many", "king", "aged")
    )  # errors go to logs: where a record is, not what it holds
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undeclared"] == {"age": [2, 5], "job": [4]}


def test_an_evaluation_counts_them_too(trained, capsys):
    (trained / "test.csv").write_text("age,job,y\n30,a,no\nmany,a,yes\n")
    assert main(["evaluate", str(trained / "run"), str(trained / "test.csv")]) == 0
    assert "column 'age' holds what was not declared in 1 row (2)" in capsys.readouterr().err
    assert main(["evaluate", str(trained / "run"), str(trained / "people.csv")]) == 0
    assert not capsys.readouterr().err

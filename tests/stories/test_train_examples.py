"""Every example runs, and does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hushgrad.recipes import load_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
BARS = {
    "minimal": lambda accuracy: accuracy > 0.85,
    "dpftrl": lambda accuracy: accuracy > 0.8,
    "denoised": lambda accuracies: len(accuracies) == 3 and min(accuracies.values()) > 0.6,
    "user_level": lambda accuracy: accuracy > 0.6,
    "resume": lambda same: same is True,
    "accounting_only": lambda epsilon: 5 < epsilon < 7,
    "microbatches": lambda accuracy: accuracy > 0.85,
    # Eleven speakers in four rounds: the plain run is fixed by its seed, and the private one is mostly noise, whatever it is.
    "federated_shakespeare": lambda s: set(s) == {"plain", "private"} and s["plain"] > 0.05 and 0 <= s["private"] <= 1,
}


def test_no_example_is_forgotten():
    assert set(BARS) == {path.stem for path in EXAMPLES.glob("*.py")}
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", BARS)
def test_example(name):
    assert BARS[name](runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_are_understood(path):
    assert load_recipe(path).data["name"] == path.stem.split("_")[0]

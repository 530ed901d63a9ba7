"""Printed epsilons, deltas and bounds promise no more than holds, and one printer prints them all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad._printed import at_least, at_most
from hushgrad.budget.values import Dataset, Status
from hushgrad.events import Gaussian
from hushgrad.guarantee import Guarantee

SOURCE = Path(__file__).parents[2] / "src" / "hushgrad"
ANY = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@settings(max_examples=500, derandomize=True)
@given(x=ANY, digits=st.integers(1, 12))
def test_an_upper_bound_is_rounded_up_and_by_less_than_a_unit_of_its_last_digit(x, digits):
    up, down = float(at_most(x, digits)), float(at_least(x, digits))
    assert down <= x <= up
    assert up - down <= max(10.0 ** (1 - digits) * x * (1 + 1e-9), 1.0 if x >= 10.0**digits else 0.0)


@pytest.mark.parametrize("x", [1e-5, 0.1, 0.3, 3.0, 2.5, 1e-12, 0.999, 7e-9])
def test_what_has_few_digits_is_printed_as_it_is(x):
    assert at_most(x) == at_least(x) == f"{x:g}"


@pytest.mark.parametrize("x", [0.0, float("inf"), 5e-324, 1.7976931348623157e308])
def test_extremes(x):
    assert float(at_least(x)) <= x <= float(at_most(x))


def test_ends_of_an_interval_go_outwards():
    assert (at_least(1.00049), at_most(2.00001)) == ("1", "2.001")


def test_known_places_round_up():
    assert str(Guarantee(epsilon=2.99964, delta=1.000001e-5, event=Gaussian(1.0), accountant="pld")).startswith(
        "(3, 1.00001e-05)"
    )
    kept = Dataset(name="patients", epsilon=5.0, delta=1e-5)
    assert "epsilon 1.235 of 5" in str(Status(dataset=kept, epsilon=1.23449, committed_epsilon=1.23449, reservations=()))


# A second printer is noticed --------------------------------------------------------------------------------------------

PRIVATE = re.compile(r"epsilon|(?<!_)delta|lower_bound|naive|\bspent\b|\bleast\b|\bwanted\b|\blower\b|\bupper\b", re.IGNORECASE)
# Not bounds on privacy: by how many per cent a claim is too large, a distance between means, thousandths that name a curve.
OTHERS = {
    "100 * (claimed / upper - 1)",
    "abs(mean - _EARLIER[epsilon, sigma]) / one_run",
    "round(1000 * task.epsilon)",
    "round(lower)",
    "round(upper)",
}


def _formatted(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        words = ""
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            words = ast.unparse(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("round", "format", "np.round"):
            words = ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"%\.\d+[efg]", node.value):
            words = node.value
        if PRIVATE.search(words) and words not in OTHERS:
            found.append(f"{path}:{node.lineno}: {words}")
    return found


def test_nobody_else_formats_an_epsilon_a_delta_or_a_bound():
    found = [line for path in sorted(SOURCE.rglob("*.py")) if path.name != "_printed.py" for line in _formatted(path)]
    templates = [
        f"{path.name}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.html"))
        for line in path.read_text().splitlines()
        if re.search(r"(epsilon|delta|spent|budget|left)[^}|]*\|\s*(number|round|format)", line)
    ]
    assert not found + templates


def test_the_search_finds_a_second_printer(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text('print(f"epsilon {spent.epsilon:.3g}", round(epsilon, 3), "delta %.2g" % delta)\n')
    assert len(_formatted(planted)) == 3

"""The small defects of ``make mutate``: every kind is made, each in one place, and the files and tests that it names are there."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from mutants import bare

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutate():
    sys.path.insert(0, str(ROOT / "faults"))
    try:
        spec = importlib.util.spec_from_file_location("mutate", ROOT / "faults" / "mutate.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["mutate"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT / "faults"))
        sys.modules.pop("mutate", None)


SNIPPET = '''
"""Words 1 < 2."""
def clip(norm: "1 + 1", bound=2.0):
    if norm < 0 and bound > 0:
        raise ValueError(f"negative {norm + 1}")
    check(norm)
    return True if not norm else min(1, bound / norm)
'''


def test_every_kind_of_change_is_made_in_one_place(mutate, tmp_path):
    (tmp_path / "clip.py").write_text(SNIPPET)
    made = mutate.mutants(tmp_path, "clip.py")
    kinds = {"comparison", "and/or", "condition", "left out", "truth", "sign", "function", "number", "arithmetic"}
    assert {one.change for one in made} == kinds
    plain = ast.unparse(ast.parse(SNIPPET)).splitlines()
    for one in made:
        changed = ast.unparse(one.tree).splitlines()
        compile(one.tree, "clip.py", "exec")  # it is Python
        different = [(a, b) for a, b in zip(plain, changed, strict=False) if a != b]
        assert len(plain) == len(changed) and len(different) == 1, one
        assert "negative" not in str(changed) or "negative {norm + 1}" in str(changed)  # sentences are left alone
        assert one.line in one.lines
    assert len({ast.unparse(one.tree) for one in made}) == len(made)


def test_files_and_tests_exist(mutate):
    for file, tests in mutate.TESTS.items():
        assert (mutate.PACKAGE / file).is_file() and all((ROOT / test).is_file() for test in tests), file
    for (file, line, _), reason in mutate.EQUIVALENT.items():
        assert line in {bare(text) for text in (mutate.PACKAGE / file).read_text().splitlines()}, (file, line)
        assert len(reason.split()) >= 3

"""Copyleft comes with the extra that says so; the table in the documentation lists what is declared; a wheel holds no path of its build."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("packaging", reason="reading requirements needs packaging")
ROOT = Path(__file__).parents[2]
LICENCES = runpy.run_path(str(ROOT / "docs" / "licences.py"), run_name="licences")


def test_copyleft_is_not_pulled_in_unasked():
    found = {extra: LICENCES["closure"](wanted) for extra, wanted in LICENCES["extras"]().items()}
    for extra in ("", "report", "sklearn", "serve", "ledger"):
        assert not [name for name, text in found[extra].items() if LICENCES["_COPYLEFT"].search(text)], extra
    assert {extra for extra, names in found.items() if "psycopg" in names} <= {"ledger-postgresql"}


def test_the_table_lists_every_package_that_is_declared():
    page = (ROOT / "docs" / "licences.md").read_text()
    for extra, wanted in LICENCES["extras"]().items():
        for one in wanted:
            assert one.marker is not None or f"| {one.name.lower()} |" in page, (extra, one.name, "make licences")


def test_kernels_hold_no_path_of_their_build():
    text = (ROOT / "setup.py").read_text()
    assert re.findall("extra_compile_args=(.*),", text) == ["flags + SANITIZED"]
    assert set(re.findall(r'": \((\w+), \[', text)) == {"COMMON", "EXACT"}  # the only flags that a library may have
    assert text.count('"-g0"') == 1 and text.count("*COMMON]") == 1


@pytest.mark.parametrize(("script", "code"), [("exit 1", 2), (": > $out; exit 1", 2), (": > $out", 2), ("echo {} > $out", 0)])
def test_a_bill_of_materials_is_whole_or_not_there(tmp_path, script, code):
    """A tool that fails, is killed half-way, or writes nothing leaves no file, not even an older one."""
    for name in ("pyproject.toml", "constraints.txt", "build/sbom.json", "venv/bin/uv", "venv/.ready"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "venv/bin/uv").write_text(f'#!/bin/sh\nfor out in "$@"; do :; done\n{script}\n')  # the last word is the file
    (tmp_path / "venv/bin/uv").chmod(0o755)
    make = ["make", "-s", "-f", str(ROOT / "Makefile"), "sbom", "VENV=venv"]
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code and [one.name for one in (tmp_path / "build").iterdir()] == ["sbom.json"] * (code == 0)
    assert ("No bill" in done.stdout) == (code != 0)

"""``hushgrad doctor``: bits, counts and times in one table and one file; what is wrong is the exit code."""

from __future__ import annotations

import json

import pytest

from hushgrad.cli.main import main
from hushgrad.testing import doctor


@pytest.fixture
def small(monkeypatch):
    """One small model instead of four, and no second process."""
    monkeypatch.setattr(doctor, "_CHECKED", ("MLP",))
    monkeypatch.setattr(doctor, "_triton", lambda: "equal (interpreted)")


def test_one_table_and_one_file(small, tmp_path, capsys):
    assert main(["doctor", "--seconds", "0.01", "--out", str(tmp_path / "doctor.json")]) == 0
    found, shown = json.loads((tmp_path / "doctor.json").read_text()), capsys.readouterr().out
    assert set(found) == {"machine", "bits", "counts", "steps"} and found["counts"]["MLP"]["syncs"] == 0
    assert set(found["bits"].values()) <= {"equal", "equal (interpreted)", "not built: numpy draws"}
    assert {"hushgrad / plain", "opacus / plain"} <= set(found["steps"]["MLP"])
    assert "| MLP |" in shown and "bits, Triton kernel" in shown


@pytest.mark.parametrize("answer", ["other", "failed: no such kernel"])
def test_other_bits_are_an_answer_that_says_no(small, monkeypatch, answer):
    monkeypatch.setattr(doctor, "_triton", lambda: answer)
    monkeypatch.setattr(doctor, "ratios", lambda seconds: {})
    assert main(["doctor"]) == 1

"""Files of a run that somebody else wrote, or a killed process left: refused in one sentence, or swept."""

from __future__ import annotations

import os
import subprocess
import sys

import mpmath
import pytest

from hushgrad import _check
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Event
from hushgrad.guarantee import Ledger
from hushgrad.noise import secure
from hushgrad.release.atomic import replacing
from hushgrad.train import Plan

DEEP = [
    "[" * 100_000,
    "{" * 9,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    "[" * 50_000 + "]" * 50_000,
    "1" * 100_000,
    "nul",
    "\ud800",
    "",
]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize("reader", [Event.from_json, Plan.from_json, Ledger.from_json], ids=["event", "plan", "ledger"])
def test_text_that_cannot_be_json_is_refused(reader, text):
    with pytest.raises(HushgradError):
        reader(text)


def test_parsed_is_json_or_a_refusal():
    assert _check.parsed('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    for text in DEEP[:2] + DEEP[4:]:
        with pytest.raises(ArgumentError, match="Expected JSON text"):
            _check.parsed(text)


def test_what_a_killed_process_left_half_written_is_swept(tmp_path):
    path = tmp_path / "key.json"
    program = f"""
import os, signal
from pathlib import Path
from hushgrad.release.atomic import replacing
with replacing(Path({str(path)!r})) as new:
    new.write_text("a secret")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "a secret"
    others = [tmp_path / f".key.json.{os.getppid()}", tmp_path / ".key.json.x", tmp_path / ".other.json.999999999"]
    for other in others:  # a process that lives, and names that are none of ours
        other.write_text("not ours")
    with replacing(path) as new:
        new.write_text("whole")
    assert {p.name for p in tmp_path.iterdir()} == {"key.json", *(other.name for other in others)}
    assert path.read_text() == "whole"


def test_exact_roundings_have_a_precision_of_their_own(monkeypatch):
    """The global precision of mpmath neither matters nor moves, so other threads may use it at the same time."""
    monkeypatch.setattr(mpmath, "workprec", lambda prec: pytest.fail("a global precision"))
    monkeypatch.setattr(mpmath, "workdps", lambda dps: pytest.fail("a global precision"))
    words = (0x01234567, 0x89ABCDEF, 0x76543210, bytes(range(64)))
    fine = [secure.exact_pair(*words)]
    before = mpmath.mp.prec
    try:
        mpmath.mp.prec = 20
        fine.append(secure.exact_pair(*words))
        assert mpmath.mp.prec == 20
    finally:
        mpmath.mp.prec = before
    assert fine[0] == fine[1] and all(x != float(x) for x in fine[0])

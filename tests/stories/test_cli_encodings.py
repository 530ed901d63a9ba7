"""Every text that a command reads, saved as UTF-16 by an editor: one sentence that says so, and no codec's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushgrad.cli.main import main

_RECIPE = '[model]\nname = "logistic"\n[data]\nname = "csv"\npath = "people.csv"\nlabel = "y"\nclasses = ["no", "yes"]\n'
_ASKED = {
    "recipe": ["train", "bad.toml", "--out", "out"],
    "tune": ["tune", "bad.toml", "--over", "optimizer.lr=1,2", "--out", "out"],
    "codebook": ["advise", "bad.toml", "--records", "100", "--epsilon", "1", "--delta", "1e-6"],
    "plan": ["train", "good.toml", "--plan", "bad.json", "--out", "out"],
    "policy": ["train", "good.toml", "--policy", "bad.toml", "--out", "out"],
    "event": ["epsilon", "--event", "@bad.json", "--delta", "1e-5"],
    "card": ["report", "--verify", "bad.json"],
    "audited plan": ["audit", "bad.json"],
}


@pytest.mark.parametrize("what", _ASKED)
@pytest.mark.parametrize("encoding, words", [("utf-16", "UTF-16, not UTF-8"), ("latin-1", "not UTF-8 text (byte 2)")])
def test_another_encoding_is_told_in_a_sentence(what, encoding, words, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("bad.toml", "bad.json"):
        (tmp_path / name).write_bytes(f'{{"ä": 1}}\n{_RECIPE}'.encode(encoding))
    (tmp_path / "good.toml").write_text(_RECIPE)
    assert main(_ASKED[what]) in (1, 2)  # --verify says that it is not verified
    told = capsys.readouterr()
    assert words in told.out + told.err and "codec" not in told.out + told.err
    assert len((told.out + told.err).strip().splitlines()) == 1 and not (tmp_path / "out").exists()

"""The key of a run: seen, guarded and destroyed from the command line."""

from __future__ import annotations

import json

import pytest

from hushgrad.cli.main import main


@pytest.fixture
def folder(tmp_path, put_secret):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "checkpoint").mkdir()
    for name in ("key.json", "state.safetensors"):
        put_secret(tmp_path / "checkpoint" / name)
    return tmp_path


def _status(folder, capsys):
    code = main(["key", "status", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_destroyed_key_is_gone_and_the_rest_stays(folder, capsys):
    code, before = _status(folder, capsys)
    assert code == 0 and before["held"] == ["checkpoint/key.json", "checkpoint/state.safetensors"]
    assert main(["key", "destroy", str(folder)]) == 0
    assert "no key" in capsys.readouterr().out
    assert not (folder / "checkpoint").exists() and (folder / "plan.json").exists()
    assert _status(folder, capsys)[1]["held"] == []


def test_a_key_that_others_can_read_is_a_no(folder, capsys):
    (folder / "checkpoint" / "key.json").chmod(0o644)
    code, answer = _status(folder, capsys)
    assert code == 1 and answer["open_to_others"] == ["checkpoint/key.json"]


def test_what_is_no_run_is_left_alone(tmp_path, capsys):
    (tmp_path / "checkpoint").mkdir()
    assert main(["key", "destroy", str(tmp_path)]) == 2
    assert (tmp_path / "checkpoint").exists() and "folder of a run" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "--out", str(tmp_path / "file" / "run"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hushgrad: ") and error.count("\n") == 1

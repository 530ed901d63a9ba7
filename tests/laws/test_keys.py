"""The custodian of secrets: it finds and erases every file of a run, and touches no other."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
from safetensors.torch import save

from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing
from hushgrad.release.erasure import destroy, finish, secrets_in
from hushgrad.release.owner import Owner

OURS = ["key.json", "journal", "state.safetensors", "cohorts.safetensors", "shard-12-3.safetensors", ".journal.0123abcd.77"]
OVER = '{"epsilon": 1}'  # in guarantee.json
SEARCH = {name: {} for name in ("model", "data", "plan", "optimizer", "run", "tune")}
FOREIGN = [b"", b"{}", b'{"type": "service_account", "key": "x"}', b"dear diary", b"[1]", bytes(300), b"\xff" * 40, save({})]
HOMES = ["", "checkpoint", "search", "search/00003/checkpoint"]


def _near(name: str, rng: random.Random) -> str:
    """A name of the user's own that resembles one of ours."""
    ends = [".bak", ".old", ".md", "~", " (copy)", "-000000.tar", ".2026", ".0123abcd", ".x.77"]
    starts = ["my-", "old.", "_", ".."]
    return rng.choice([name + rng.choice(ends), rng.choice(starts) + name, "." + name + rng.choice(ends)])


@pytest.mark.parametrize("seed", range(12))
def test_every_secret_goes_and_no_other_file_does(tmp_path, seed, put_secret):
    rng = random.Random(seed)
    ours, foreign = set(), {}
    for home in HOMES:
        place = tmp_path / home
        place.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            if rng.random() < 0.5:
                put_secret(place / name)
                ours.add(place / name)
            elif rng.random() < 0.5 and not name.startswith("."):  # our very name
                foreign[place / name] = rng.choice(FOREIGN)
                (place / name).write_bytes(foreign[place / name])
            if rng.random() < 0.5:
                path = place / _near(name, rng)
                foreign[path] = rng.randbytes(8)
                path.write_bytes(foreign[path])
    assert set(secrets_in(tmp_path)) == ours
    (tmp_path / "guarantee.json").write_text(OVER)
    assert finish(tmp_path) == bool(ours)
    assert secrets_in(tmp_path) == []
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_all_of_a_search_goes_and_what_bears_its_name_stays(tmp_path):
    recipes = {"ours": SEARCH, "noted": SEARCH | {"ledger": {}}, "theirs": {}, "another": SEARCH | {"more": {}}, "none": None}
    for name, recipe in recipes.items():
        trial = tmp_path / name / "search" / "00001"
        trial.mkdir(parents=True)
        (trial / "score.json").write_text("0.9")
        (tmp_path / name / "guarantee.json").write_text(OVER)
        if recipe is not None:
            (trial.parent / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "noted" / "search" / "thesis.tex").write_text("mine")
    before = {path for name in ("theirs", "another", "none") for path in (tmp_path / name).rglob("*")}
    for name in recipes:
        finish(tmp_path / name)
        destroy(tmp_path / name)
    assert not (tmp_path / "ours" / "search").exists()
    assert [path.name for path in (tmp_path / "noted" / "search").iterdir()] == ["thesis.tex"]
    assert {path for name in ("theirs", "another", "none") for path in (tmp_path / name).rglob("*")} == before


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith(".")])
def test_a_death_while_a_secret_is_overwritten_is_finished_by_the_next_command(tmp_path, monkeypatch, put_secret, name):
    """Half of it is random then, and shows no format any more."""
    put_secret(tmp_path / name)
    (tmp_path / "guarantee.json").write_text(OVER)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
        finish(tmp_path)
    assert len(secrets_in(tmp_path)) == 1
    assert finish(tmp_path) and [path.name for path in tmp_path.iterdir()] == ["guarantee.json"]


def test_a_folder_that_may_not_be_written_is_left_alone(tmp_path, monkeypatch, put_secret):
    put_secret(tmp_path / "key.json")
    (tmp_path / "guarantee.json").write_text(OVER)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "_take", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
        assert not finish(tmp_path)
    assert finish(tmp_path)


@pytest.mark.parametrize("place", HOMES[1:])
def test_a_run_that_another_process_owns_is_not_erased(tmp_path, monkeypatch, put_secret, place):
    home = tmp_path / place
    home.mkdir(parents=True)
    put_secret(home / "key.json")
    (tmp_path / "guarantee.json").write_text(OVER)
    owner = Owner(home)
    monkeypatch.setattr("hushgrad.release.owner._here", WeakValueDictionary())  # as another process sees it
    with pytest.raises(ArgumentError, match="to have no other owner"):
        destroy(tmp_path)
    assert not finish(tmp_path) and (home / "key.json").exists()
    owner.release()
    assert finish(tmp_path) and not home.exists()


def test_a_linked_home_loses_its_secrets_when_that_is_asked_for_and_stays(tmp_path, put_secret):
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    run.mkdir()
    put_secret(disk / "key.json")
    (run / "guarantee.json").write_text(OVER)
    (run / "checkpoint").symlink_to(disk)
    assert not finish(run) and secrets_in(run) == [run / "checkpoint" / "key.json"]  # it may be another run's
    destroy(run)
    assert (run / "checkpoint").is_symlink() and list(disk.iterdir()) == []


def test_a_linked_file_is_neither_followed_nor_erased(tmp_path, put_secret):
    other, run = tmp_path / "other", tmp_path / "run"
    for folder in (other, run / "search"):
        folder.mkdir(parents=True)
    (run / "guarantee.json").write_text(OVER)
    (other / "checkpoint").mkdir()
    put_secret(other / "checkpoint" / "key.json")
    (run / "search" / "00001").symlink_to(other)
    for name in OURS:
        put_secret(other / name)
        (run / name).symlink_to(other / name)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    finish(run)
    destroy(run)
    assert all((run / name).is_symlink() for name in OURS) and (run / "search" / "00001").is_symlink()
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


def test_half_written_files_are_told_from_the_users_own(tmp_path):
    mine, left = tmp_path / ".notes.txt.2026", tmp_path / ".notes.txt.0123abcd.999999999"
    for path in (mine, left):
        path.write_text("half")
    with replacing(Path(tmp_path / "notes.txt")) as new:
        new.write_text("whole")
    assert mine.exists() and not left.exists()


EARLIER = {
    "checkpoint": {"reproducible": False, "plan": "p", "fingerprint": "f"},
    "": {"reproducible": False, "plan": "p"},
    "search": {},
}


@pytest.mark.parametrize("home", EARLIER)
def test_keys_of_version_0_1_and_torn_ones_are_found_and_unknown_files_are_named(tmp_path, home, capsys):
    """An unfinished run outlives the library's version, and a crash leaves half a key: most of the secret is still there."""
    (tmp_path / "plan.json").write_text("{}")
    path = tmp_path / home / "key.json"
    path.parent.mkdir(exist_ok=True)
    whole = json.dumps({"key": bytes(range(32)).hex(), **EARLIER[home]})
    for content in (whole, whole[:-1], whole[:50]):
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        assert secrets_in(tmp_path) == [path]
        assert main(["key", "destroy", str(tmp_path)]) == 0 and not path.exists()
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"key": "of my own"}')
    capsys.readouterr()
    assert main(["key", "destroy", str(tmp_path)]) == 0 and path.exists()
    assert path.relative_to(tmp_path).as_posix() in capsys.readouterr().out

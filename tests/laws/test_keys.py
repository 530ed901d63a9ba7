"""The custodian of secrets: it finds and erases every file of a run, and touches no other."""

from __future__ import annotations

import random
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing
from hushgrad.release.keys import destroy, finish, secrets_in
from hushgrad.release.owner import Owner

OURS = ["key.json", "journal", "state.safetensors", "cohorts.safetensors", "shard-12-3.safetensors", ".journal.0123abcd.77"]
HOMES = ["", "checkpoint", "search", "search/00003/checkpoint"]


def _near(name: str, rng: random.Random) -> str:
    """A name of the user's own that resembles one of ours."""
    ends = [".bak", ".old", ".md", "~", " (copy)", "-000000.tar", ".2026", ".0123abcd", ".x.77"]
    starts = ["my-", "old.", "_", ".."]
    return rng.choice([name + rng.choice(ends), rng.choice(starts) + name, "." + name + rng.choice(ends)])


@pytest.mark.parametrize("seed", range(12))
def test_every_secret_goes_and_no_other_file_does(tmp_path, seed):
    rng = random.Random(seed)
    ours, foreign = set(), {}
    for home in HOMES:
        place = tmp_path / home
        place.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            if rng.random() < 0.5:
                (place / name).write_bytes(b"secret")
                ours.add(place / name)
            if rng.random() < 0.5:
                path = place / _near(name, rng)
                foreign[path] = rng.randbytes(8)
                path.write_bytes(foreign[path])
    assert set(secrets_in(tmp_path)) == ours
    (tmp_path / "guarantee.json").write_text("{}")
    assert finish(tmp_path) == bool(ours)
    assert secrets_in(tmp_path) == []
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_all_of_a_search_goes_and_what_bears_its_name_stays(tmp_path):
    for root in (tmp_path / "ours", tmp_path / "theirs"):
        (root / "search" / "00001").mkdir(parents=True)
        (root / "search" / "00001" / "score.json").write_text("0.9")
    (tmp_path / "ours" / "search" / "recipe.json").write_text("{}")
    for root in (tmp_path / "ours", tmp_path / "theirs"):
        destroy(root)
    assert not (tmp_path / "ours" / "search").exists()
    assert (tmp_path / "theirs" / "search" / "00001" / "score.json").exists()


def test_a_run_that_another_process_owns_is_not_erased(tmp_path, monkeypatch):
    home = tmp_path / "checkpoint"
    home.mkdir()
    (home / "key.json").write_bytes(b"secret")
    (tmp_path / "guarantee.json").write_text("{}")
    owner = Owner(home)
    monkeypatch.setattr("hushgrad.release.owner._here", WeakValueDictionary())  # as another process sees it
    with pytest.raises(ArgumentError, match="to have no other owner"):
        destroy(tmp_path)
    assert not finish(tmp_path) and (home / "key.json").exists()
    owner.release()
    assert finish(tmp_path) and not home.exists()


def test_a_linked_home_loses_its_secrets_and_stays(tmp_path):
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    run.mkdir()
    (disk / "key.json").write_bytes(b"secret")
    (run / "checkpoint").symlink_to(disk)
    destroy(run)
    assert (run / "checkpoint").is_symlink() and list(disk.iterdir()) == []


def test_half_written_files_are_told_from_the_users_own(tmp_path):
    mine, left = tmp_path / ".notes.txt.2026", tmp_path / ".notes.txt.0123abcd.999999999"
    for path in (mine, left):
        path.write_text("half")
    with replacing(Path(tmp_path / "notes.txt")) as new:
        new.write_text("whole")
    assert mine.exists() and not left.exists()

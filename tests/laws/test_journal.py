"""The journal's file, the owner's lock, the custodian's files and the book of who took part, each against its own promise."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANGS, next_tick, wait_until

from hushgrad import _universal_hash
from hushgrad._universal_hash import Witness
from hushgrad.errors import ArgumentError, CaptureError, StorageError
from hushgrad.events import Everyone, FixedSize, Gaussian, MinSep, Poisson
from hushgrad.guarantee import Ledger
from hushgrad.noise.source import Source
from hushgrad.noise.streams import IndependentStream
from hushgrad.release import journal as journals
from hushgrad.release import journal_frames, journal_history, keys, owner
from hushgrad.release import journal_place as places
from hushgrad.release.erasure import erase, finish, secrets_in
from hushgrad.release.journal import Journal
from hushgrad.release.keys import RunKey, read_key, write_key
from hushgrad.release.owner import Owner
from hushgrad.sampling import BallsInBins, CyclicPoisson, RoundRobin
from hushgrad.sampling import Poisson as PoissonSampler
from hushgrad.sampling.attendance import Attendance
from hushgrad.train import Checkpoint, Plan, make_private, micro_batches
from hushgrad.train.books import Books

KEY = RunKey(bytes(range(32)), fresh=True)


START = Journal(KEY).chain


def _life(path, steps, *, first=0, position=0, chain=START, witness=lambda step: bytes([step % 250])):
    """One life: opened or made, taken through ``steps``; (position, chain) after each release."""
    own = Owner(path.parent, newest=True)
    if path.exists():
        journal = Journal.open(path, KEY, own)
        journal.seek(position, chain)
    else:
        journal = Journal.create(path, KEY, own, {"plan": "x"})
    after = []
    for step in range(first, first + steps):
        journal.begin(step)
        journal.released(step, witness(step))
        after.append((journal.position, journal.chain))
    journal.close()
    return after


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=5))
def test_however_often_it_dies_a_run_that_repeats_itself_goes_on(tmp_path_factory, lives):
    path = tmp_path_factory.mktemp("j") / "journal"
    after = {0: (0, START)}
    reached = 0
    for steps, back in lives:
        first = max(0, reached - back)
        for place, state in enumerate(_life(path, steps, first=first, position=after[first][0], chain=after[first][1])):
            assert after.setdefault(first + place + 1, state) == state
        reached = max(reached, first + steps)
    whole = _life(tmp_path_factory.mktemp("whole") / "journal", reached)  # a folder knows one journal of a key
    assert not reached or whole[-1] == after[reached]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(0, 29), st.data())
def test_a_release_that_differs_is_stopped_wherever_it_is(tmp_path_factory, steps, wrong, data):
    path = tmp_path_factory.mktemp("j") / "journal"
    wrong = wrong % steps
    after = [(0, START), *_life(path, steps)]
    first = data.draw(st.integers(0, wrong))
    with pytest.raises(ArgumentError, match=rf"release {wrong} .*prior="):
        other = {"witness": lambda step: b"other" if step == wrong else bytes([step % 250])}
        _life(path, steps - first, first=first, position=after[first][0], chain=after[first][1], **other)
    _life(path, steps - first, first=first, position=after[first][0], chain=after[first][1])  # and as it was, it goes on


def test_every_flipped_bit_is_noticed_and_every_cut_behind_the_state(tmp_path):
    path = tmp_path / "journal"
    after = _life(path, 20)
    whole = path.read_bytes()
    assert (
        len(whole) < 24 + 300 + len(str(path)) + 20 * 8 + 20 * 8
    )  # the bindings, one release and at most one mark for each step
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        with pytest.raises(ArgumentError):
            _life(path, 0, position=after[-1][0], chain=after[-1][1])
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        try:
            _life(path, 0, position=after[-1][0], chain=after[-1][1])
        except ArgumentError:
            continue
        assert _releases(whole[:place]) == 20  # nothing but an opening or a mark is missing


def _releases(data):

    return sum(frame.kind == ord("r") for frame in journal_frames._frames(data))


def test_a_machine_that_stopped_may_lose_what_was_behind_the_last_mark_and_the_guarantee_says_so(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    monkeypatch.setattr(journal_frames, "_SHARE", 1e9)  # blocks double each time
    after = _life(path, 40)
    whole = path.read_bytes()
    lost = whole[: -5 * 8] + bytes(3 * 8)  # zeros, as file systems leave them
    path.write_bytes(lost)
    with pytest.raises(ArgumentError, match="damaged"):  # on a machine that did not stop, that is damage
        Journal.open(path, KEY, Owner(tmp_path, newest=True))
    for module in (journals, journal_history, places):
        monkeypatch.setattr(module, "boot_identity", lambda: "another start")
    journal = Journal.open(path, KEY, Owner(tmp_path, newest=True))
    journal.seek(*after[9])
    assert journal.ahead == _releases(lost) - 10 and "vouched" in journal.notes[0]
    assert Journal.open(path, KEY, Owner(tmp_path, newest=True)).notes == journal.notes  # and is not forgotten by the next life
    path.write_bytes(whole[:200] + bytes(len(whole) - 200))  # more is gone than could be unflushed
    with pytest.raises(ArgumentError, match="damaged"):
        Journal.open(path, KEY, Owner(tmp_path, newest=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_journal_that_was_cut_between_two_frames_is_known_to_its_folder(tmp_path, seed):
    """By any number of frames, also of those behind the last flush; a machine that stopped may have lost these."""
    try:
        os.setxattr(tmp_path, "user.test", b"1")
    except (OSError, AttributeError):
        pytest.skip("the disk keeps no attributes")
    draw = random.Random(seed)
    path = tmp_path / "journal"
    _life(path, draw.randrange(2, 30))
    whole = path.read_bytes()
    there = list(journal_frames.frames_in(path))
    kept = draw.choice([len(there) - 2, draw.randrange(len(there) - 1)])
    for end in (there[kept].end, len(journal_frames._MAGIC)):  # and all of them
        with path.open("r+b") as file:
            file.truncate(end)
        with pytest.raises(ArgumentError, match="an older one was put in its place"):
            Journal.open(path, KEY, Owner(tmp_path, newest=True))
    path.write_bytes(whole)
    Journal.open(path, KEY, Owner(tmp_path, newest=True)).close()


@pytest.mark.parametrize("way", ["written over", "moved there", "removed and copied", "unpacked", "linked"])
@pytest.mark.parametrize("seed", range(3))
def test_an_older_journal_that_is_put_into_its_folder_is_refused_whatever_file_it_is(tmp_path, way, seed):
    """As cp, mv, git checkout, tar and rsync do; what has another number on the disk is no less old. A newer copy goes on, as a copy."""
    draw = random.Random(f"{way} {seed}")
    run, path, copy_ = tmp_path / "run", tmp_path / "run" / "journal", tmp_path / "copy"
    run.mkdir()
    try:
        os.setxattr(run, "user.test", b"1")
    except (OSError, AttributeError):
        pytest.skip("the disk keeps no attributes")
    states = _life(path, draw.randrange(1, 12))
    first = len(states)
    shutil.copy2(path, copy_)
    _life(path, draw.randrange(1, 4), first=first, position=first, chain=states[-1][1])
    newest = path.read_bytes()
    if way == "written over":
        path.write_bytes(copy_.read_bytes())
    elif way == "moved there":
        copy_.rename(path)
    elif way == "removed and copied":
        path.unlink()
        shutil.copy2(copy_, path)
    elif way == "linked":  # in another folder of links, and written over there
        shutil.copytree(run, tmp_path / "links", copy_function=os.link)
        run, path = tmp_path / "links", tmp_path / "links" / "journal"
        path.write_bytes(copy_.read_bytes())
    else:
        shutil.make_archive(str(tmp_path / "packed"), "tar", tmp_path, "copy")
        shutil.unpack_archive(tmp_path / "packed.tar", run)
        (run / "copy").rename(path)
    with pytest.raises(ArgumentError, match="an older one was put in its place"):
        Journal.open(path, KEY, Owner(run, newest=True))
    shutil.rmtree(tmp_path / "run") if way == "linked" else path.unlink()
    path.unlink(missing_ok=True)
    path.write_bytes(newest)
    (note,) = Journal.open(path, KEY, Owner(run, newest=True)).notes
    assert "copied or put back" in note


@pytest.mark.parametrize(
    "what",
    ["nothing", "killed between two writes", "killed while opened", "put back", "other rights", "written ahead", "forgotten"],
)
def test_a_folder_that_was_put_back_with_its_attributes_is_said_to_be_by_every_later_life(tmp_path, monkeypatch, what):
    """As ``cp -a`` and ``shutil.copytree`` do, in place: all that a program can write is then as it was, but not when it was written."""
    run, path = tmp_path / "run", tmp_path / "run" / "journal"
    run.mkdir()
    try:
        os.setxattr(run, "user.test", b"1")
    except (OSError, AttributeError):
        pytest.skip("the disk keeps no attributes")
    journal = Journal.create(path, KEY, Owner(run, newest=True), {"plan": "x"})
    for step in range(7):
        if step == 5:
            shutil.copytree(run, tmp_path / "back")
            (name,) = (name for name in os.listxattr(run) if name.startswith("user.hushgrad."))
        if step == 6:
            told = os.getxattr(run, name)
        journal.begin(step)
        journal.released(step, bytes([step]))
    journal.close()
    next_tick(tmp_path.parent)
    if what == "put back":
        shutil.copytree(tmp_path / "back", run, dirs_exist_ok=True)
    elif what == "other rights":
        path.chmod(0o400)
        path.chmod(0o600)
    elif what == "killed between two writes":
        os.setxattr(run, name, told)
    elif what == "written ahead":  # by a clock that was put right, before the folder was put back
        content = os.getxattr(run, name)
        written = int.from_bytes(content[-8:], "little") + 10**15
        os.setxattr(run, name, content[:-8] + written.to_bytes(8, "little"))
    elif what == "killed while opened":  # long after it was written
        later = time.time_ns() + 10**12
        monkeypatch.setattr(time, "time_ns", lambda: later)
        monkeypatch.setattr(journal_frames.Frames, "tell", None)
        with pytest.raises(TypeError):
            Journal.open(path, KEY, Owner(run, newest=True))
        monkeypatch.undo()
    elif what == "forgotten":
        os.removexattr(run, name)
    expected = {"put back": "changed from outside", "other rights": "changed from outside", "forgotten": "attribute"}
    expected["written ahead"] = "changed from outside"
    for _ in range(2):
        journal = Journal.open(path, KEY, Owner(run, newest=True))
        assert [expected[what] in note for note in journal.notes] == [True] * (what in expected)
        journal.close()
    shutil.copytree(tmp_path / "back", run, dirs_exist_ok=True)  # of an earlier life: the folder knows the later one as well
    with pytest.raises(ArgumentError, match="an older one was put in its place"):
        Journal.open(path, KEY, Owner(run, newest=True))


@pytest.mark.parametrize(
    "how", ["nothing fits", "half fits", "slowly cut", "interrupted", "interrupted when told", "killed when cut"]
)
def test_a_write_that_fails_is_not_taken_for_a_change_from_outside(tmp_path, monkeypatch, how):
    path, write, grown, cut = tmp_path / "journal", os.write, places.Place.grown, os.ftruncate

    def half(file, data):
        return write(file, data[:3])

    def fails(file, data):
        if how != "nothing fits":
            write(file, data)
        raise OSError(errno.ENOSPC, "full") if how == "nothing fits" else KeyboardInterrupt

    def told(place, size):
        grown(place, size)
        raise KeyboardInterrupt

    def killed(file, size):
        cut(file, size)
        raise KeyboardInterrupt

    journal = Journal.create(path, KEY, Owner(tmp_path, newest=True), {"plan": "x"})
    journal.begin(0)
    journal.flush()
    next_tick(tmp_path.parent)
    with monkeypatch.context() as patch:
        if how in ("interrupted when told", "killed when cut"):
            patch.setattr(places.Place, "grown", told)
        else:
            patch.setattr(os, "write", half if how in ("half fits", "slowly cut") else fails)
        if how == "slowly cut":  # so that the file's time of change moves on
            patch.setattr(os, "ftruncate", lambda *about: (next_tick(tmp_path.parent), cut(*about)))
        with pytest.raises((StorageError, KeyboardInterrupt)):
            journal.released(0, b"0")
    next_tick(tmp_path.parent)
    if how == "killed when cut":
        monkeypatch.setattr(os, "ftruncate", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.released(0, b"0")
        monkeypatch.undo()
    elif how == "interrupted":  # and the next write removes what it left
        with pytest.raises(OSError, match="full"), monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            journal.released(0, b"0")
    journal.close()
    assert Journal.open(path, KEY, Owner(tmp_path, newest=True)).notes == ()


def test_a_journal_that_could_not_be_opened_can_be_when_it_is_put_back(tmp_path):
    path = tmp_path / "journal"
    _life(path, 3)
    whole = path.read_bytes()
    path.write_bytes(b"x" * 100)
    with pytest.raises(ArgumentError, match="damaged") as kept:  # the error holds the file, as a debugger does
        Journal.open(path, KEY, Owner(tmp_path, newest=True))
    path.write_bytes(whole)
    assert Journal.open(path, KEY, Owner(tmp_path, newest=True)).durable and kept.value


@pytest.mark.parametrize("when", ["never", "in the middle"])
@pytest.mark.parametrize("way", ["written over", "cut", "nothing"])
@pytest.mark.parametrize("seed", range(2))
def test_where_the_disk_keeps_no_attributes_a_run_that_goes_on_says_what_nobody_can_see(tmp_path, monkeypatch, way, when, seed):
    """An older journal in the place of its own file is known to nobody there, so that the guarantee says so, once."""
    draw, path, setting = random.Random(seed), tmp_path / "journal", os.setxattr
    steps, kept = draw.randrange(3, 9), draw.randrange(1, 3)

    def refused(folder, name, value, *flags):
        if when == "never" or path.stat().st_size > full:
            raise OSError(errno.ENOSPC if when == "in the middle" else errno.ENOTSUP, "no")
        setting(folder, name, value, *flags)

    full = 0
    if when == "never":
        monkeypatch.setattr(os, "setxattr", refused)
    journal = Journal.create(path, KEY, Owner(tmp_path, newest=True), {"plan": "x"})
    full = path.stat().st_size
    monkeypatch.setattr(os, "setxattr", refused)
    for step in range(steps):
        if step == kept:
            older = path.read_bytes()
        journal.begin(step)
        journal.released(step, bytes([step]))
    journal.flush()
    journal.close()
    if way == "cut":
        os.truncate(path, len(older))
    elif way == "written over":
        path.write_bytes(older)
    for _ in range(2):
        journal = Journal.open(path, KEY, Owner(tmp_path, newest=True))
        assert len([note for note in journal.notes if "no attributes of folders" in note]) == 1
        journal.close()


def test_a_key_that_was_given_is_said_to_be_by_every_life(tmp_path):
    """Nobody sees a second run under it; one that was drawn, or a seed, which says so itself, needs no word."""
    given, path = RunKey(bytes(32)), tmp_path / "journal"
    notes = [
        Journal.create(path, given, Owner(tmp_path), {}).notes,
        Journal.open(path, given, Owner(tmp_path, newest=True)).notes,
    ]
    assert notes[0] == notes[1] == Journal(given).notes and "key was given" in notes[0][0]
    assert Journal(RunKey.make()).notes == Journal(RunKey.make(seed=1)).notes == ()


@pytest.mark.parametrize("way", ["a run's own", "drawn and given twice", "drawn before a fork"])
def test_a_drawn_key_that_two_runs_have_was_given_to_the_second(monkeypatch, way):
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)

    def run(key):
        model = torch.nn.Linear(3, 1)
        return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, key=key)

    drawn = RunKey.make()
    if way == "drawn before a fork":
        process = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: process + 1)
    else:
        first = run(None if way == "a run's own" else drawn)
        assert not first.spent().notes
        drawn = first.key
    second = run(drawn)
    assert "key was given" in str(second.spent().notes) and second.key.fingerprint == drawn.fingerprint


@pytest.mark.parametrize("way", ["another owner", "attribute removed", "folder moved", "another folder"])
def test_who_is_no_longer_the_owner_finds_out_before_its_next_release(tmp_path, way):
    """Whether it lost its lock or not: the folder, by its path, is asked with every release."""
    run, path = tmp_path / "run", tmp_path / "run" / "journal"
    run.mkdir()
    journal = Journal.create(path, KEY, Owner(run), {"plan": "x"})
    journal.begin(0)
    journal.released(0, b"0")
    journal.begin(1)
    if not journal._frames.asks:
        pytest.skip("the disk keeps no attributes, or no locks")
    size = path.stat().st_size
    if way == "another owner":  # with the lock and the journal removed by hand, as rm -r does before a new run
        (run / ".lock").unlink()
        path.rename(tmp_path / "kept")
        pid = _child(lambda: int(not Journal.create(path, RunKey(bytes(32)), Owner(run), {"plan": "x"}).durable))
        assert os.waitpid(pid, 0)[1] == 0
        path = tmp_path / "kept"
    elif way == "attribute removed":
        for name in os.listxattr(run):
            os.removexattr(run, name)
    else:
        run.rename(tmp_path / "moved")
        path = tmp_path / "moved" / "journal"
        if way == "another folder":
            run.mkdir()
    with pytest.raises(ArgumentError, match="taken it over"):
        journal.released(1, b"1")
    assert journal.position == 1 and path.stat().st_size == size  # nothing is entered either


def test_a_key_is_not_begun_again_in_a_folder_that_was_emptied(tmp_path):
    """The folder itself remembers that something may have been released under it; a seed, for experiments, may be used again."""
    path, seed = tmp_path / "journal", RunKey.make(seed=3)
    for key in (KEY, seed):
        for steps in (0, 3):  # without a step it is begun again
            path.unlink(missing_ok=True)
            journal = Journal.create(path, key, Owner(tmp_path, newest=True), {"plan": "x"})
            for step in range(steps):
                journal.begin(step)
                journal.released(step, b"x")
            asks = journal._frames.asks
            journal.close()
        path.unlink()
        if key is KEY and asks:
            with pytest.raises(ArgumentError, match="a key that was never used"):
                Journal.create(path, key, Owner(tmp_path, newest=True), {"plan": "x"})
            assert not path.exists()
        else:
            Journal.create(path, key, Owner(tmp_path, newest=True), {"plan": "x"}).close()


def test_a_copy_is_refused_beside_the_original_and_said_to_be_one_without_it(tmp_path):
    """Moved, linked and restored files: who has the file's number on the disk is the run; others are copies."""
    for name in "abc":
        (tmp_path / name).mkdir()
    first, moved, copied = (tmp_path / name / "journal" for name in "abc")
    state = _life(first, 5)[-1]
    shutil.copy2(first, copied)
    with pytest.raises(ArgumentError, match="not a copy"):
        _life(copied, 1, first=5, position=5, chain=state[1])
    first.rename(moved)
    moved.with_name("other name").symlink_to(moved)
    state = _life(moved.with_name("other name"), 1, first=5, position=5, chain=state[1])[-1]  # goes on, and knows where it is
    with pytest.raises(ArgumentError, match="not a copy"):
        shutil.copy2(moved, copied)
        _life(copied, 1, first=6, position=6, chain=state[1])
    moved.unlink()
    for _ in range(2):  # in this life and in the next
        journal = Journal.open(copied, KEY, Owner(copied.parent, newest=True))
        assert ["taken to another folder" in note for note in journal.notes] == [True, False]  # it was moved without its folder
        assert "copied or put back after 6 releases" in journal.notes[1]


@pytest.mark.parametrize("name", ["link", "symlink", "removed lock"])
def test_one_file_has_one_writer_by_whatever_name(tmp_path, name):
    """A second folder of hard or symbolic links, or a lock that somebody removed: the file itself is locked."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    path, other = tmp_path / "a" / "journal", tmp_path / "b" / "journal"
    journal = Journal.create(path, KEY, Owner(path.parent), {"plan": "x"})
    if name == "removed lock":
        (path.parent / ".lock").unlink()
        other = path
    else:
        (os.link if name == "link" else os.symlink)(path, other)
    program = (
        "import sys; from pathlib import Path; from hushgrad.release.journal import Journal; from hushgrad.release.owner import Owner\n"
        "from hushgrad.release.keys import RunKey; path = Path(sys.argv[1])\n"
        "Journal.open(path, RunKey(bytes(range(32))), Owner(path.parent))"
    )
    for expected in ("written by one process", ""):
        done = subprocess.run([sys.executable, "-c", program, str(other)], capture_output=True, text=True, timeout=HANGS)
        assert (expected in done.stderr) if expected else done.returncode == 0, done.stderr
        journal.close()


def test_a_journal_of_another_version_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "journal"
    _life(path, 3)
    path.write_bytes(path.read_bytes().replace(b"hushgrad journal 5", b"hushgrad journal 4"))
    with pytest.raises(ArgumentError, match=r"another one wrote it.*prior="):
        _life(path, 0)


def test_a_full_disk_stops_the_step_and_leaves_the_journal_whole(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    after = _life(path, 3)
    journal = Journal.open(path, KEY, Owner(tmp_path, newest=True))
    journal.seek(*after[-1])
    journal.begin(3)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    with pytest.raises(StorageError, match="Nothing was released"):
        journal.released(3, b"x")
    monkeypatch.undo()
    journal.released(3, b"x")
    journal.close()
    assert _life(path, 0, position=4, chain=journal.chain) == []


def test_blocks_are_reserved_so_that_flushing_takes_little_time(tmp_path, monkeypatch):
    clock = [0.0]
    flushes = []

    def flush(file):
        clock[0] += 0.01
        flushes.append(clock[0])

    monkeypatch.setattr(journals.os, "fsync", flush)
    monkeypatch.setattr(journal_frames.time, "perf_counter", lambda: clock[0])
    journal = Journal.create(tmp_path / "journal", KEY, Owner(tmp_path), {})
    for step in range(5000):
        clock[0] += 0.002
        journal.begin(step)
        assert journal._marks.reached > step
    journal.close()
    assert len(flushes) * 0.01 < 0.015 * clock[0]


# The owner -----------------------------------------------------------------------------------------------------------------


def _child(task):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = task()
        finally:
            os._exit(code)
    return pid


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path):
    ready = tmp_path / "ready"

    def hold():
        own = Owner(tmp_path)
        ready.touch()
        time.sleep(HANGS)
        return int(own.held)

    pid = _child(hold)
    wait_until(ready.exists)
    with pytest.raises(ArgumentError, match=rf"process {pid} on .*has it"):
        Owner(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    own = Owner(tmp_path)
    assert own.held
    own.release()
    assert not (tmp_path / ".lock").exists() and not own.held


def test_a_forked_child_keeps_no_lock_alive(tmp_path):
    own = Owner(tmp_path)
    pid = _child(lambda: time.sleep(HANGS) or 0)
    own.release()
    try:
        assert Owner(tmp_path).held
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("durable", [False, True])
def test_a_forked_child_releases_nothing(tmp_path, durable):
    """It has the key, the noise and the books of its parent, which goes on."""
    owner = Owner(tmp_path)
    journal = Journal.create(tmp_path / "journal", KEY, owner, {}) if durable else Journal(KEY)
    journal.begin(0)
    journal.released(0, b"a")

    def step():
        with pytest.raises(ArgumentError, match=r"process that began this run|no other owner"):
            journal.begin(1)
        with pytest.raises(ArgumentError, match=r"process that began this run|no other owner"):
            journal.released(1, b"b")
        return 0

    assert os.waitpid(_child(step), 0)[1] == 0
    journal.begin(1)
    journal.released(1, b"b")


@pytest.fixture
def no_flock(monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refused(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)


def test_without_locks_a_lease_is_kept_and_taken_over_on_demand_only(tmp_path, no_flock, monkeypatch):
    first = Owner(tmp_path)
    monkeypatch.setattr(owner, "_here", {})  # as in another process
    with pytest.raises(ArgumentError, match=rf"process {os.getpid()} on .*--take-over"):
        Owner(tmp_path)
    old = time.time() - 3600
    os.utime(tmp_path / ".lock", (old, old))
    with pytest.raises(ArgumentError, match="not been heard of for a minute"):
        Owner(tmp_path)
    second = Owner(tmp_path, take_over=True)
    assert second.held and not first.held
    with pytest.raises(ArgumentError, match="taken it over"):
        first.require()
    second.release()
    assert Owner(tmp_path).held


@pytest.mark.parametrize("age", [0, 3600])
def test_a_lease_is_taken_on_demand_only_also_where_locks_work(tmp_path, monkeypatch, age):
    """Two hosts may see one disk in two ways; a suspended owner, or a clock that jumped, makes a lease look old."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, "locked", lambda file: None)
        first = Owner(tmp_path)
    monkeypatch.setattr(owner, "_here", {})  # as on another host
    os.utime(tmp_path / ".lock", (time.time() - age,) * 2)
    with pytest.raises(ArgumentError, match=r"--take-over"):
        Owner(tmp_path)
    assert first.held
    second = Owner(tmp_path, take_over=True)
    assert second.held and not first.held


def test_a_lease_is_touched_while_it_is_held(tmp_path, no_flock, monkeypatch):
    monkeypatch.setattr(owner, "_BEAT", 0.02)
    own = Owner(tmp_path)
    old = time.time() - 3600
    os.utime(tmp_path / ".lock", (old, old))
    wait_until(lambda: (tmp_path / ".lock").stat().st_mtime > old + 1800)
    own.release()


# The custodian --------------------------------------------------------------------------------------------------------------


def test_a_wrapped_key_is_nowhere_in_its_file_and_needs_its_kek(tmp_path, monkeypatch):
    kek = tmp_path / "kek"
    kek.write_bytes(bytes(reversed(range(32))))
    monkeypatch.setenv("HUSHGRAD_KEK", str(kek))
    path = tmp_path / "key.json"
    write_key(path, KEY, plan="p")
    text = path.read_text()
    assert KEY.secret.hex() not in text and json.loads(text)["wrapped"]
    assert read_key(path, plan="p").secret == KEY.secret
    for wrong in (bytes(32), b"short"):
        kek.write_bytes(wrong)
        with pytest.raises(ArgumentError, match="HUSHGRAD_KEK"):
            read_key(path, plan="p")
    monkeypatch.delenv("HUSHGRAD_KEK")
    with pytest.raises(ArgumentError, match="HUSHGRAD_KEK"):
        read_key(path, plan="p")


SECRET = [
    "key.json",
    ".key.json.0a1b2c3d.123",
    "state.safetensors",
    ".state.safetensors.00ff00ff.9",
    "journal",
    "shard-3-1.safetensors",
]


@pytest.mark.parametrize("home", ["", "checkpoint", "search", "search/00003/checkpoint"])
@pytest.mark.parametrize(
    ("mark", "content"),
    [("guarantee.json", '{"epsilon": 1}'), ("tuning.json", '{"mean_trials": 3}'), ("settled.json", '{"settled": "why"}')],
)
def test_what_a_finished_folder_still_holds_is_erased(tmp_path, home, mark, content, monkeypatch, put_secret):
    place = tmp_path / home
    place.mkdir(parents=True, exist_ok=True)
    for name in SECRET:
        put_secret(place / name)
    (tmp_path / "model.safetensors").write_bytes(b"public")
    assert {path.name for path in secrets_in(tmp_path)} == set(SECRET)
    assert not finish(tmp_path) and len(secrets_in(tmp_path)) == len(SECRET)  # not finished: it may go on
    (tmp_path / mark).write_text("{}")
    assert not finish(tmp_path) and len(secrets_in(tmp_path)) == len(SECRET)  # a file of the user's own
    (tmp_path / mark).write_text(content)
    written = []
    flush = keys.os.fsync
    monkeypatch.setattr(keys.os, "fsync", lambda file: (written.append(os.fstat(file).st_size), flush(file))[1])
    assert finish(tmp_path) and secrets_in(tmp_path) == [] and len(written) == len(SECRET)  # overwritten, each of them
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", mark}
    assert not finish(tmp_path)


def test_keys_go_first(tmp_path, monkeypatch):
    for name in ("a", "journal", "key.json"):
        (tmp_path / name).write_bytes(b"secret")
    monkeypatch.setattr(keys.os, "urandom", lambda size: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        erase([tmp_path / "a", tmp_path / "journal", tmp_path / "key.json"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "journal").read_bytes() == b"secret"


# Who took part ----------------------------------------------------------------------------------------------------------------

SAMPLERS = [
    PoissonSampler(rate=0.3, steps=40),
    CyclicPoisson(period=4, rate=0.5, steps=40),
    RoundRobin(batch_size=5, dataset_size=30, epochs=5),
    BallsInBins(bins=8, epochs=3),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_every_sampler_keeps_its_promise_and_a_broken_one_is_noticed(sampler):
    n = 30
    book = Attendance(sampler.participation(), units=n)
    for step, chosen in enumerate(sampler.batches(n, np.random.default_rng(1))):
        book.enter(step, chosen)
    assert book.check() == ""
    broken = Attendance(sampler.participation(), units=n)
    with_everybody = (np.arange(n) for _ in range(sampler.steps))
    try:
        for step, chosen in enumerate(with_everybody):
            broken.enter(step, chosen)
        assert "promises about" in broken.check()
    except CaptureError as error:
        assert "was not taken" in str(error)


@given(st.integers(2, 6), st.integers(1, 4), st.lists(st.lists(st.integers(0, 5), unique=True), max_size=20))
@settings(max_examples=60, deadline=None)
def test_gaps_and_times_are_those_of_a_plain_count(gap, times, batches):
    book, seen = Attendance(MinSep(gap=gap, times=times), units=6), {unit: [] for unit in range(6)}
    for step, batch in enumerate(batches):
        allowed = all(len(seen[unit]) < times and (not seen[unit] or step - seen[unit][-1] >= gap) for unit in batch)
        try:
            book.enter(step, np.array(batch, np.int64))
        except CaptureError:
            assert not allowed
            return
        assert allowed
        for unit in batch:
            seen[unit].append(step)
    again = Attendance(MinSep(gap=gap, times=times), units=6)
    again.load_state_dict(book.state_dict())
    assert again.state_dict()["total"] == sum(map(len, seen.values()))


@pytest.mark.parametrize("waiting", [0, 7, 60, 4096])
def test_participations_that_wait_are_entered_as_if_they_had_not(waiting):
    book, lot = Attendance(Poisson(0.3), units=20), np.random.default_rng(5)
    seen = {unit: [] for unit in range(20)}
    for step in range(300):
        chosen = np.flatnonzero(lot.random(20) < 0.3) if step % 5 else np.empty(0, np.int64)
        if len(book.noted) * (len(chosen) + 1) > waiting:
            book.enter_noted()
        book.noted[step] = chosen
        for unit in chosen.tolist():
            seen[unit].append(step)
    state = book.state_dict()
    assert state["count"].tolist() == [len(steps) for steps in seen.values()]
    assert state["last"].tolist() == [steps[-1] for steps in seen.values()]
    assert state["gap"].tolist() == [min(b - a for a, b in pairwise(steps)) for steps in seen.values()]
    assert (state["total"], state["steps"]) == (sum(map(len, seen.values())), 300)


@pytest.mark.parametrize("promise", [Poisson(0.5), Everyone(), FixedSize(dataset_size=100, size=20)])
def test_another_rate_is_told(promise):
    book, rng = Attendance(promise, units=100), random.Random(0)
    try:
        for step in range(50):
            book.enter(step, np.array([unit for unit in range(100) if rng.random() < 0.35]))
    except CaptureError as error:
        assert isinstance(promise, FixedSize) and "records took part in step 0" in str(error)
    else:
        assert "participations in 50 steps" in book.check()


# The witness ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["C", "torch"])
def hashing(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(_universal_hash, "_HASH", None)
    elif _universal_hash._HASH is None:
        pytest.skip("the C library is not built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_bit_of_every_number_is_witnessed(hashing, dtype):
    """Wherever it is, in however large a tensor: 200 single flipped bits at random places, each of which is noticed."""
    rng = random.Random(1)
    g = torch.Generator().manual_seed(0)
    released = {str(n): torch.randn(n, generator=g).to(dtype) for n in (0, 1, 7, 2048, 30_001)}
    norms, witness = torch.rand(5, generator=g), Witness(KEY.witness)
    before = witness.of(released, norms, b"more")
    for _ in range(200):
        tensor = rng.choice([t for t in (*released.values(), norms) if t.numel()])
        flat, place, bit = tensor.view(torch.uint8), rng.randrange(tensor.numel() * tensor.element_size()), 1 << rng.randrange(8)
        flat[place] ^= bit
        assert witness.of(released, norms, b"more") != before
        flat[place] ^= bit
    assert witness.of(released, norms, b"more") == before != witness.of(released, norms, b"else")
    assert Witness(RunKey(bytes(32)).witness).of(released, norms, b"more") != before


@pytest.mark.parametrize("plan", [{}, {"secure": True}, {"certified": True}])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_witness_is_the_same_however_the_release_was_hashed(monkeypatch, plan, threads):
    """While the noise is added, on every thread, or afterwards; and never of something else than what is released."""
    before, witnesses = torch.get_num_threads(), []
    original = Witness.of

    def of(self, released, norms, more=b"", seen=None):
        witnesses.append(original(self, released, norms, more, seen))
        assert witnesses[-1] == original(self, {n: t.clone() for n, t in released.items()}, norms, more)
        known.append(seen is not None and seen.all_of(released.values()) is not None)
        return witnesses[-1]

    known: list[bool] = []
    monkeypatch.setattr(Witness, "of", of)
    try:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = torch.nn.Linear(600, 500)  # more than one thread's share
        about = dict(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=3)
        private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.dpsgd(**about, **plan), seed=1)
        loss = private.loss(torch.nn.functional.cross_entropy)
        for x, y in private.loader(torch.utils.data.TensorDataset(torch.randn(16, 600), torch.randint(500, (16,)))):
            private.optimizer.zero_grad()
            loss(model(x), y).backward()
            private.optimizer.step()
        private.detach()
    finally:
        torch.set_num_threads(before)
    assert known == [not plan] * 3 and len(set(witnesses)) == 3


def test_a_sum_that_is_changed_after_its_noise_is_hashed_again():
    """By torch, or because it is another object: what was seen before does not count."""
    witness, norms, sums = Witness(KEY.witness), torch.ones(2), {"a": torch.randn(3000), "b": torch.randn(5)}
    source = Source(seed=1)
    source.hashed = witness.hashed
    IndependentStream(source).rows(0, list(sums.values()), out=list(sums.values()))
    seen, source.seen = source.seen, None
    assert seen is not None and seen.all_of(sums.values()) and witness.of(sums, norms, b"", seen) == witness.of(sums, norms)
    source.z(1, 0, sums["b"], out=sums["b"])
    assert source.seen is None  # nobody said that this is all
    sums["b"].mul_(2)
    assert witness.of(sums, norms, b"", seen) == witness.of(sums, norms)
    sums["a"] = sums["a"] + 1
    assert witness.of(sums, norms, b"", seen) == witness.of(sums, norms)


def test_swapped_moved_and_cut_numbers_are_witnessed_and_both_ways_agree(monkeypatch):
    witness, norms = Witness(KEY.witness), torch.ones(1)
    a, b = torch.arange(5000.0), torch.arange(5000.0).flip(0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[3, 9]]), torch.ones(2, 4), (20, 4))
    moved = torch.sparse_coo_tensor(torch.tensor([[3, 8]]), torch.ones(2, 4), (20, 4))
    strided = torch.randn(70, 90).t()
    kinds = [
        {"x": a, "y": b},
        {"x": b, "y": a},
        {"x": torch.cat([a, b])},
        {"x": torch.cat([a, b, torch.zeros(1)])},
        {"x": sparse},
        {"x": moved},
        {"x": strided},
        {"x": strided.t()},
    ]
    seen = [witness.of(kind, norms) for kind in kinds]
    assert len(set(seen)) == len(kinds)
    monkeypatch.setattr(_universal_hash, "_HASH", None)
    assert [witness.of(kind, norms) for kind in kinds] == seen


def test_a_release_whose_hashes_fill_more_than_a_block_is_witnessed_to_its_end(monkeypatch):
    """Hashes are hashed once more, 512 together: of 640 blocks each counts, whole or begun, and both ways agree."""
    witness, norms = Witness(KEY.witness), torch.ones(1)
    released = {"a": torch.arange(1_300_000.0), "b": torch.arange(20_000.0)}
    assert witness.of({"a": torch.arange(1_300_000.0)}, norms) != (before := witness.of(released, norms))
    rng = random.Random(3)
    for name, low, high in [("a", 0, 2048), ("a", 1_048_576, 1_050_624), ("a", 1_298_432, 1_300_000), ("b", 18_432, 20_000)]:
        place = rng.randrange(low, high)
        released[name][place] *= -1
        released[name][place] -= 1
        assert witness.of(released, norms) != before
        released[name][place] += 1
        released[name][place] *= -1
        assert witness.of(released, norms) == before
    monkeypatch.setattr(_universal_hash, "_HASH", None)
    assert witness.of(released, norms) == before


# Small promises, each of which was broken once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["key.json", "journal", "nowhere"])
def test_a_lock_that_is_a_link_is_refused_and_writes_nothing_over(tmp_path, name):
    for kept in ("key.json", "journal"):
        (tmp_path / kept).write_bytes(b"of the run")
    (tmp_path / ".lock").symlink_to(name)
    with pytest.raises(StorageError, match=r"Expected to be able to write .*\.lock"):
        Owner(tmp_path)
    assert all((tmp_path / kept).read_bytes() == b"of the run" for kept in ("key.json", "journal"))
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_somebody_deleted_is_noticed(tmp_path):
    first = Owner(tmp_path)
    (tmp_path / ".lock").unlink()
    assert not first.held
    with pytest.raises(ArgumentError, match="taken it over"):
        first.require()
    (tmp_path / ".lock").write_text("{}")  # another file of that name is not the lock either
    assert not first.held


def test_a_key_names_its_run_whatever_the_plan():
    """Two plans under one key share its noise, so they are one run."""
    steps = [Plan.dpsgd(noise_multiplier=s, delta=1e-5, batch_size=4, dataset_size=16, steps=2) for s in (1.0, 2.0)]
    ledgers = []
    for number, plan in enumerate(steps):
        books = Books(plan, KEY.run_name())
        books.content = str(number)
        books.charge(issued=True)
        ledgers.append(books.ledger())
    assert "two ways" in str((ledgers[0] + ledgers[1]).event())
    assert KEY.run_name() != RunKey(bytes(32)).run_name()


def test_a_resumed_run_keeps_its_prior():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)
    small, large = Ledger(), Ledger()
    small.record(Gaussian(9.0))
    large.record(Gaussian(0.5), times=4)
    state = Books(plan, "run", prior=small).state_dict()
    for offered in (None, small):
        books = Books(plan, "run", prior=offered)
        books.load_state_dict(state)
        assert books.prior == small
    with pytest.raises(ArgumentError, match="prior= to be the interrupted run's own"):
        Books(plan, "run", prior=large).load_state_dict(state)
    with pytest.raises(ArgumentError, match="prior="):
        Books(plan, "run", prior=large).load_state_dict(Books(plan, "run").state_dict())


def test_the_chain_is_keyed_from_its_start():
    assert Journal(KEY).chain != Journal(RunKey(bytes(32))).chain


def test_a_state_is_never_on_the_disk_before_the_journal_that_it_counts_on(tmp_path, monkeypatch):
    """A machine that stops right after any flush: what the disk holds of the journal is at least what the state says."""
    model = torch.nn.Linear(3, 1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=40)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    checkpoint = Checkpoint(tmp_path, private)
    monkeypatch.setattr(journal_frames, "_SHARE", 1e9)  # marks are rare
    flushed, flush = [0], os.fsync

    def lasting(file):
        flush(file)
        if os.path.samestat(os.fstat(file), (tmp_path / "journal").stat()):
            flushed[0] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", lasting)
    for (x,) in private.loader(torch.utils.data.TensorDataset(torch.randn(16, 3))):
        model(x).square().mean().backward()
        private.optimizer.step()
        if private.steps % 13 == 0:
            checkpoint.save()
            assert _releases((tmp_path / "journal").read_bytes()[: flushed[0]]) == private.steps


def test_the_copy_of_a_hook_says_nothing():
    calls = []
    model = torch.nn.Linear(2, 1)
    hook = micro_batches._Hook(model, lambda args, kwargs: calls.append(1))
    model.register_forward_pre_hook(hook, with_kwargs=True)
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 2))
    assert calls == []
    model(torch.ones(1, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert calls == [1]


def test_settling_counts_what_the_journal_released(tmp_path):
    path = tmp_path / "journal"
    _life(path, 7)
    assert len(journal_history.shown(path).digests) == 7 and journal_history.shown(path).bound == {
        "key": KEY.fingerprint,
        "plan": "x",
    }

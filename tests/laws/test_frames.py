"""Frames of a journal: whatever interrupts a write, the file holds what was written, and nothing hides what comes after."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import HANGS

from hushgrad.errors import ArgumentError, StorageError
from hushgrad.release import journal_frames as module
from hushgrad.release import journal_place
from hushgrad.release.journal_frames import Frames, Marks, frames_in
from hushgrad.release.journal_place import Known
from hushgrad.release.owner import Owner


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("seed", range(10))
def test_a_write_that_is_struck_hides_no_frame(tmp_path, monkeypatch, seed, fault):
    rng = random.Random(seed)
    real = {name: getattr(os, name) for name in ("write", "setxattr", "ftruncate")}
    struck = False

    def strike(name):
        def call(*args, **kwargs):
            if struck and rng.random() < 0.2:
                raise fault
            result = real[name](*args, **kwargs)
            if struck and rng.random() < 0.2:  # after the call, whose work is done
                raise fault
            return result

        return call

    for name in real:
        monkeypatch.setattr(os, name, strike(name))
    frames = Frames(tmp_path / "journal", new=True)
    frames.claim(frames.known)
    entered = []
    for number in range(40):
        struck = rng.random() < 0.5
        content = number.to_bytes(5, "little")
        try:
            frames.append(ord("m"), content)
        except (KeyboardInterrupt, StorageError):
            continue
        entered.append(content)
    struck = False
    frames.append(ord("m"), bytes(5))
    frames.close()
    assert [frame.content for frame in frames_in(tmp_path / "journal")] == [*entered, bytes(5)]
    assert len(entered) < 40


def test_a_disk_that_fails_is_told_in_the_house_s_words(tmp_path, monkeypatch):
    frames, owner = Frames(tmp_path / "journal", new=True), Owner(tmp_path)

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.os, "write", failing)
    monkeypatch.setattr(module.os, "ftruncate", failing)
    monkeypatch.setattr(module.os, "stat", failing)
    with pytest.raises(StorageError, match="Expected to be able to write the journal"):
        frames.append(ord("m"), bytes(5))
    with pytest.raises(StorageError, match="Input/output error"):
        owner.require()
    monkeypatch.undo()
    frames.close()
    owner.release()


@pytest.mark.parametrize("seed", range(8))
def test_a_mark_reserves_as_many_steps_as_flushing_is_worth(tmp_path, monkeypatch, seed):
    """Twice as many if flushing took more than a four hundredth of the time since, half as many below an eight hundredth."""
    draw, clock, took, mean, block = random.Random(seed), [0.0], [1 / 1024], 0.0, 1
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    class Disk:
        def append(self, kind: int, content: bytes) -> None:
            clock[0] += took[0] / 2
            self.told = kind, int.from_bytes(content, "little")

        def flush(self, begun: int) -> None:
            clock[0] += took[0] / 2
            assert self.told == (ord("m"), begun)

    disk, marks = Disk(), Marks(step := draw.randrange(10**6))
    assert marks.reached == step
    for turn in range(200):
        far = (
            draw.choice([1, 200, 399, 401, 600, 799, 801, 2000, *([] if seed % 2 else [400, 800])])
            if turn % 60 > 25
            else 1 + 2000 * (turn % 2)
        )
        took[0] = draw.choice([1, 1, 1, 4]) / 1024 if seed % 2 else 1 / 1024
        mean_now = (3 * mean + took[0]) / 4 if mean else took[0]
        clock[0] += far * mean_now
        marks.reserve(step, disk)
        assert marks.reached == step + block == disk.told[1]
        mean = mean_now
        block = min(2 * block, 2**20) if far < 400 else max(1, block // 2) if far > 800 else block
        step = draw.choice([marks.reached, marks.reached + 3])
        if turn == 100:
            for _ in range(25):  # as many as there may be, and no more
                clock[0] += took[0]
                mean = (3 * mean + took[0]) / 4
                marks.reserve(step, disk)
                block = min(2 * block, 2**20)
            assert block == 2**20


def test_frames_end_where_whole_words_do_whatever_they_say(tmp_path):
    """So that no kill cuts one at the end of a page."""
    frames = Frames(tmp_path / "journal", new=True)
    for length in range(20):
        frames.tell(note="x" * length)
    frames.close()
    found = list(frames_in(tmp_path / "journal"))
    assert [frame.end % 8 for frame in found] == [0] * 20 and found[-1].end == (tmp_path / "journal").stat().st_size
    assert max(len(frame.content.rstrip()) + 8 - len(frame.content) for frame in found) == 8  # no word too many
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_one_file_has_one_writer_in_one_process_too(tmp_path):
    path = tmp_path / "journal"
    first = Frames(path, new=True)
    with pytest.raises(ArgumentError, match="written by one process") as kept:
        Frames(path, new=False)
    assert kept.value and [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()].count(str(path)) == 1
    first.close()
    assert not first.is_open
    Frames(path, new=False).close()
    Frames(path, new=True).close()  # begun again
    with pytest.raises(StorageError, match="Expected to be able to write the journal"):
        Frames(tmp_path / "nowhere", new=False)
    for call in (lambda: first.append(ord("m"), bytes(5)), first.flush, first.cut, lambda: first.tell(note="x")):
        with pytest.raises(ArgumentError, match="another run has taken it over"):
            call()


@pytest.mark.parametrize("length", range(24))
def test_a_file_that_ends_before_its_first_frame_is_damaged(tmp_path, length):
    path = tmp_path / "journal"
    Frames(path, new=True).close()
    whole = path.read_bytes()
    assert len(whole) == 24
    path.write_bytes(whole[:length])
    with pytest.raises(ArgumentError, match="damaged"):
        Frames(path, new=False)
    path.write_bytes(whole)
    Frames(path, new=False).close()


@pytest.mark.parametrize("what", ["write", "fsync"])
def test_a_disk_that_fails_leaves_nothing_that_counts(tmp_path, monkeypatch, what):
    real = os.write

    def failing(file: int, *data: bytes) -> None:
        if data:
            real(file, data[0][:1])
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        patch.setattr(os, what, failing)
        Frames(tmp_path / "journal", new=True).flush(7)
    assert (tmp_path / "journal").stat().st_size == (0 if what == "write" else 24)
    frames = Frames(tmp_path / "journal", new=True)
    frames.claim(frames.known)
    frames.append(ord("m"), bytes(5))
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        patch.setattr(os, "fsync", failing)
        frames.flush(7)
    assert frames.known.begun == 0
    frames.flush(7)
    assert not frames.place.told or frames.known[1:4] == (7, 32, 32)


def test_a_disk_with_no_room_for_attributes_any_more_is_told_of_once(tmp_path):
    frames = Frames(tmp_path / "journal", new=True)
    if not frames.claim(frames.known):
        pytest.skip("the disk keeps no attributes")
    frames.flush()
    frames.place.told = False
    for _ in range(3):
        frames.flush()
    assert [frame.content for frame in frames_in(frames.path)] == [b'{"told":false}' + b" " * 2]


def test_a_file_was_touched_if_it_changed_after_its_last_frame_or_long_before_that_was_told(tmp_path):
    frames = Frames(tmp_path / "journal", new=True)
    size, changed, minute = 24, frames.path.stat().st_ctime_ns, 60 * 10**9
    for late, touched in ((-1, True), (0, False), (1, False), (minute - 1, False), (minute, True), (minute + 1, True)):
        assert frames.is_touched(Known(length=size, written=changed + late)) == touched
        assert not frames.is_touched(Known(length=size + 1, written=changed + late))  # that is put back, or never told
    assert [frames.is_put_back(Known(flushed=size + more)) for more in (-1, 0, 1)] == [False, False, True]


# What the folder knows -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system's own command")
def test_a_file_s_birth_is_what_the_system_says(tmp_path, monkeypatch):
    for path in (tmp_path, Path(__file__)):
        told = subprocess.run(["stat", "-c", "%.9W", str(path)], capture_output=True, text=True, timeout=HANGS).stdout.strip()
        file = os.open(path, os.O_RDONLY)
        assert journal_place.born(file) == int(told.replace(".", ""))
        with monkeypatch.context() as patch:  # no Linux, and nothing else that says it
            patch.setattr(journal_place.sys, "platform", "another")
            assert journal_place.born(file) == 0
            patch.setattr(journal_place.os, "fstat", lambda _: SimpleNamespace(st_birthtime=1.5))
            assert journal_place.born(file) == 1_500_000_000
        os.close(file)


def test_a_folder_that_keeps_no_attributes_knows_nothing(tmp_path, monkeypatch):
    assert Known() == (0, 0, 0, 0, 0) and Known().least == 0
    frames = Frames(tmp_path / "journal", new=True)

    def refused(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no")

    for name in ("setxattr", "listxattr", "removexattr"):
        monkeypatch.setattr(os, name, refused)
    assert frames.claim(frames.known) is False and not frames.asks and not frames.place.told
    frames.append(ord("m"), bytes(5))
    assert frames.known == Known()


@pytest.mark.parametrize("births", ["told", "not told"])
@pytest.mark.parametrize("seed", range(4))
def test_a_folder_knows_the_newest_of_each_run_by_the_run_or_by_its_file(tmp_path, monkeypatch, seed, births):
    """Its length now, its length at the last flush, the steps that may have been released; after a restart of the machine the flushed."""
    if births == "not told":
        monkeypatch.setattr(journal_place, "born", lambda file: 0)
    draw, frames = random.Random(seed), Frames(tmp_path / "journal", new=True)
    frames.tell(note=f"{seed}")
    if not frames.claim(frames.known):
        pytest.skip("the disk keeps no attributes")
    size, flushed, begun, opened = frames.path.stat().st_size, 0, 0, len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        if draw.random() < 0.3:
            begun = max(begun, (asked := draw.randrange(100)))
            frames.flush(asked)
            flushed = size
        else:
            frames.append(ord("m"), bytes(5))
            size += 8
        known = frames.known
        assert (known.length, known.flushed, known.begun) == (size, flushed, begun) and known.least == size
        with monkeypatch.context() as patch:
            patch.setattr(journal_place, "boot_identity", lambda: "another start")
            assert frames.known.least == flushed
    assert len(os.listdir("/proc/self/fd")) <= opened  # who asks leaves nothing open
    frames.close()
    content = frames.path.read_bytes()
    (tmp_path / "copy").write_bytes(content)  # the same run in another file
    copied = Frames(tmp_path / "copy", new=False)
    assert copied.known == known
    copied.close()
    other = Frames(tmp_path / "another", new=True)  # another run, in another file
    other.tell(note="another")
    assert other.known == Known()
    assert other.claim(other.known) and other.known.length == other.path.stat().st_size
    other.close()
    again = Frames(frames.path, new=False)  # of which the folder now knows nothing
    assert again.known == Known()
    again.close()

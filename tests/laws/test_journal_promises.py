"""What a journal promises, against a plain list of what was released: lives that are drawn at random, and each way to be refused."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import random
from pathlib import Path

import pytest
from patience import next_tick

from hushgrad.errors import ArgumentError, HushgradError, StorageError
from hushgrad.release import journal as journals
from hushgrad.release import journal_frames, key_reuse
from hushgrad.release import owner as owners
from hushgrad.release.journal import Journal
from hushgrad.release.journal_frames import frames_in
from hushgrad.release.keys import RunKey
from hushgrad.release.owner import Owner

KEY = RunKey(bytes(range(32)), fresh=True)


def chain_of(entries: list[tuple[str, bytes]]) -> bytes:
    """The digest of releases as the format says it; files of earlier versions hold these."""
    chain = hashlib.blake2b(b"start", digest_size=16, key=KEY.journal).digest()
    for kind, content in entries:
        chain = hashlib.blake2b(chain + kind.encode() + content, digest_size=16, key=KEY.journal).digest()
    return chain


def content(step: int, witness: bytes = b"") -> bytes:
    return step.to_bytes(8, "little") + witness


@pytest.fixture(params=["with attributes", "without"])
def disk(request, monkeypatch, tmp_path):
    """A disk that keeps attributes of folders, and one that does not: there the lock is asked in their place."""
    if request.param == "without":
        monkeypatch.setattr(os, "setxattr", _refused)
    else:
        try:
            os.setxattr(tmp_path, "user.test", b"1")
        except (OSError, AttributeError):
            pytest.skip("the disk keeps no attributes")
    return request.param


def _refused(*_: object) -> None:
    raise OSError(errno.ENOTSUP, "no")


class Life:
    """One life of a run, and what it must be: ``entries`` are its releases and those of lives before, whole."""

    def __init__(self, path: Path, entries: list[tuple[str, bytes]], bound: dict, notes: list[str], draw: random.Random) -> None:
        self.path, self.entries, self.bound, self.notes, self.draw = path, entries, bound, notes, draw
        self.owner = Owner(path.parent, newest=True)
        if path.exists():
            self.journal = Journal.open(path, KEY, self.owner)
        else:
            bound.update(key=KEY.fingerprint, plan="x")
            self.journal = Journal.create(path, KEY, self.owner, {"plan": "x"})
        self.at = 0

    def check(self) -> None:
        journal = self.journal
        assert (journal.position, journal.chain) == (self.at, chain_of(self.entries[: self.at]))
        assert journal.ahead == len(self.entries) - self.at and journal.bound == self.bound and journal.durable
        assert [note for note in journal.notes if "no attributes of folders" not in note] == self.notes

    def refused(self, words: str, call, *args) -> None:
        before = self.path.read_bytes()
        with pytest.raises(ArgumentError, match=words):
            call(*args)
        assert self.path.read_bytes() == before

    def sought(self) -> None:
        """Go on from any earlier state; not from one that is ahead, nor from another run's."""
        at = self.draw.randrange(len(self.entries) + 1)
        self.refused("ahead of its journal", self.journal.seek, len(self.entries) + 1, bytes(16))
        for other in (chain_of([*self.entries[: at - 1], ("r", b"else")]), bytes(16)):  # of no release, too
            self.refused("another run's", self.journal.seek, at, other)
        self.journal.seek(at, chain_of(self.entries[:at]))
        self.at = at

    def released(self) -> None:
        """A release, or a reading of all tables; what was released before must be repeated as it was."""
        step, witness = self.draw.randrange(40), self.draw.randbytes(self.draw.choice([1, 8, 16]))
        if self.at < len(self.entries) and self.draw.random() < 0.7:
            kind, whole = self.entries[self.at]
            step, witness = int.from_bytes(whole[:8], "little"), whole[8:]
        else:
            kind = self.draw.choice("rra")
        entry = kind, content(step, witness if kind == "r" else b"")
        before = self.at < len(self.entries) and self.entries[self.at] == ("a", content(step))
        assert self.journal.read_all_before(step) == before
        self.journal.begin(step)
        call = (self.journal.released, step, witness) if kind == "r" else (self.journal.read_all, step)
        if self.at < len(self.entries) and self.entries[self.at] != entry:
            self.refused(rf"release {self.at} to be repeated.*Nothing was released.*prior=", *call)
            return
        call[0](*call[1:])
        assert kind == "a" or self.journal.chain == chain_of([*self.entries[: self.at], entry])
        self.entries[self.at :] = self.entries[self.at :] or [entry]
        self.at += 1

    def said(self) -> None:
        """What the user vouches for, and what the run is bound to."""
        note, name, value = self.draw.choice(["one", "two", "three"]), self.draw.choice(["data", "world"]), self.draw.randrange(3)
        self.journal.vouched(note)
        self.notes += [note] * (note not in self.notes)
        if self.bound.get(name, value) != value and self.draw.random() < 0.5:
            self.refused(f"Expected the {name} of this run as they were", self.journal.bind, name, value)
        else:
            (self.journal.rebind if name in self.bound else self.journal.bind)(name, value)
            self.bound[name] = value

    def after(self) -> None:
        """A release of the next step has the digest that the journal foretells."""
        assert self.journal.after(7, b"w") == chain_of([*self.entries[: self.at], ("r", content(7, b"w"))])


@pytest.mark.parametrize("seed", range(12))
def test_every_life_is_that_of_a_plain_list(tmp_path, disk, seed):
    draw, entries, bound, notes = random.Random(seed), list[tuple[str, bytes]](), dict[str, object](), list[str]()
    for _ in range(draw.randrange(2, 6)):
        life = Life(tmp_path / "journal", entries, bound, notes, draw)
        life.check()
        for _ in range(draw.randrange(25)):
            draw.choice([life.sought, life.released, life.released, life.released, life.said, life.after])()
            life.check()
        told = [frame.content for frame in frames_in(life.path) if frame.kind == ord("j")]
        assert all(sum(f'"note":"{note}"'.encode() in text for text in told) == 1 for note in notes)  # each is written once
        life.journal.close()
        for call in ((life.journal.begin, 0), (life.journal.released, life.at, b""), (life.journal.read_all, 0)):
            life.refused("to be attached|is attached", *call)


def _states(count: int) -> list[tuple[bytes, bytes]]:
    """(witness, chain) of the first releases of a run whose steps follow each other."""
    witnesses = [bytes([step + 1] * 9) for step in range(count)]
    return [(w, chain_of([("r", content(k, v)) for k, v in enumerate(witnesses[: n + 1])])) for n, w in enumerate(witnesses)]


@pytest.mark.parametrize("released", range(4))
@pytest.mark.parametrize("saved", range(6))
@pytest.mark.parametrize("wrong", ["nothing", "before", "witness", "chain"])
def test_what_cannot_be_repeated_is_caught_up_with_by_at_most_one_release(tmp_path, disk, released, saved, wrong):
    """It is saved first, then entered, then handed out: so the state is at most one release ahead, and that one was not handed out."""
    path, states = tmp_path / "journal", _states(6)
    journal = Journal.create(path, KEY, Owner(tmp_path, newest=True), {})
    for step in range(released):
        journal.begin(step)
        journal.released(step, states[step][0])
    journal.close()
    link = {
        "before": states[saved - 2][1] if saved > 1 else chain_of([]),
        "witness": states[saved - 1][0],
        "chain": states[saved - 1][1],
    }
    if not saved:
        link = {"before": b"", "witness": b"", "chain": chain_of([])}
    if wrong != "nothing":
        link[wrong] = bytes(len(link[wrong]))
    journal = Journal.open(path, KEY, Owner(tmp_path, newest=True))
    if saved < released:
        words = f"Expected the state of {released} releases; it has {saved}, .*asked again.*prior="
    elif saved > released + 1:
        words = "is ahead of its journal"
    else:
        looked_at = ("before", "witness", "chain") if saved > released else ("chain",)
        words = "is another run's" if wrong in looked_at else ""
    before = path.read_bytes()
    if words:
        with pytest.raises(ArgumentError, match=words):
            journal.catch_up(saved, link["chain"], before=link["before"], witness=link["witness"])
        assert path.read_bytes() == before
        return
    journal.catch_up(saved, link["chain"], before=link["before"], witness=link["witness"])
    assert (journal.position, journal.chain, journal.ahead) == (saved, link["chain"], 0)
    journal.begin(saved)
    journal.released(saved, states[saved][0])
    assert journal.chain == states[saved][1]
    journal.close()
    journal = Journal.open(path, KEY, Owner(tmp_path, newest=True))
    assert journal.ahead == saved + 1
    journal.seek(saved + 1, states[saved][1])


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("raised", [None, KeyboardInterrupt, StorageError, ArgumentError, ValueError])
@pytest.mark.parametrize("entered", [False, True])
def test_what_was_interrupted_between_entering_and_doing_goes_on_from_its_last_save_only(tmp_path, durable, raised, entered):
    """On disk. A refusal with nothing entered leaves nothing half done; without a disk nobody can go on from anywhere else."""
    journal = Journal.create(tmp_path / "journal", KEY, Owner(tmp_path), {}) if durable else Journal(KEY)
    journal.begin(0)
    try:
        with journal:
            if entered:
                journal.released(0, b"w")
            if raised:
                raise raised("stop")
    except (KeyboardInterrupt, HushgradError, ValueError):
        pass
    half = durable and raised is not None and (entered or not issubclass(raised, HushgradError))
    if half:
        for _ in range(2):
            with pytest.raises(ArgumentError, match=r"not interrupted while it entered.*last save"), journal:
                pass
    else:
        with journal:
            journal.released(1, b"v")
        assert journal.position == 1 + entered


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_two_runs_of_one_process_under_one_key_have_no_theorem_unless_they_release_the_same(tmp_path, durable, same):
    """Nor has a later life of theirs; a note of it is no note, but a reason."""
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(Journal.create(folder / "journal", KEY, Owner(folder), {}) if durable else Journal(KEY))
    for number, run in enumerate(runs):
        for step in range(3):
            run.begin(step)
            with run:
                run.released(step, bytes(8) + b"long" if same or step < 2 else bytes([number] * 12))
        with run:
            run.read_all(3)  # says nothing that could differ
    for _ in range(2):
        assert [run.broken for run in runs] == ["" if same else key_reuse.TWICE] * 2
        assert [run.notes for run in runs] == [()] * 2
        if not durable:
            return
        for number, run in enumerate(runs):
            run.close()
            runs[number] = Journal.open(tmp_path / str(number) / "journal", KEY, Owner(tmp_path / str(number), newest=True))
        key_reuse.forget()


@pytest.mark.parametrize("lost", ["lock removed", "another process", "closed", "lease taken"])
def test_who_may_not_write_any_more_neither_releases_nor_notes_anything(tmp_path, monkeypatch, disk, lost):
    path = tmp_path / "journal"
    if lost == "lease taken":  # no locks: neither of the folder nor of the file
        for module in (owners, journal_frames):
            monkeypatch.setattr(module, "locked", lambda file: None)
    owner = Owner(tmp_path)
    journal = Journal.create(path, KEY, owner, {})
    journal.begin(0)
    journal.released(0, b"w")
    journal.seek(0, chain_of([]))  # what is repeated is released again
    if lost == "lock removed":
        (tmp_path / ".lock").unlink()
    elif lost == "lease taken":  # by another host
        (tmp_path / ".lock").write_text('{"token": "another"}')
    elif lost == "another process":
        process = os.getpid()
        monkeypatch.setattr(journals.os, "getpid", lambda: process + 1)
    else:
        journal.close()
    before, words = path.read_bytes(), "taken it over|process that began this run|attached"
    for call in ((journal.begin, 10**6), (journal.released, 0, b"w"), (journal.read_all, 0)):
        with pytest.raises(ArgumentError, match=words):
            call[0](*call[1:])
    if disk == "without" or lost != "lock removed":  # the folder's attribute says who writes, not the lock
        if lost != "closed":
            journal.seek(1, chain_of([("r", content(0, b"w"))]))
        with pytest.raises(ArgumentError, match=words):
            journal.released(1, b"v")
    if lost == "another process":
        with pytest.raises(ArgumentError, match="process that began this run"), journal:
            pass
    journal.vouched("a note")
    assert journal.notes == ("a note",) and path.read_bytes() == before


def test_in_memory_another_process_releases_nothing_either(monkeypatch):
    journal = Journal(KEY)
    process = os.getpid()
    monkeypatch.setattr(journals.os, "getpid", lambda: process + 1)
    for call in ((journal.begin, 0), (journal.released, 0, b"w"), (journal.read_all, 0)):
        with pytest.raises(ArgumentError, match="process that began this run"):
            call[0](*call[1:])
    journal.vouched("a note")
    assert journal.notes == ("a note",) and journal.position == 0


def _open_files(path: Path) -> int:
    gc.collect()
    return sum(str(path) in os.path.realpath(file) for file in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("how", ["dropped", "refused", "refused anew"])
def test_a_journal_that_nobody_has_holds_no_file(tmp_path, how):
    """So that the next one can write it: also while its owner lives, or somebody keeps the error that refused it."""
    path, owner = tmp_path / "journal", Owner(tmp_path)
    journal = Journal.create(path, KEY, owner, {})
    journal.begin(0)
    journal.released(0, b"w")
    if how == "dropped":
        del journal
        assert not _open_files(path)
        Journal.open(path, KEY, owner).close()
        return
    asks = journal._frames.asks
    journal.close()
    if not asks:
        pytest.skip("the disk keeps no attributes, or no locks")
    newest = path.read_bytes()
    if how == "refused":
        path.write_bytes(newest[:24])
        with pytest.raises(ArgumentError, match="older one") as kept:
            Journal.open(path, KEY, owner)
        path.write_bytes(newest)
    else:
        path.unlink()
        with pytest.raises(ArgumentError, match="never used") as kept:
            Journal.create(path, KEY, owner, {})
    assert kept.value and not _open_files(path)
    if how == "refused":
        next_tick(tmp_path.parent)
        Journal.open(path, KEY, owner).close()


def test_what_a_state_may_rely_on_is_on_the_disk(tmp_path, monkeypatch):
    """Whatever a machine that stops now would leave of the journal, after it was made, opened, bound, flushed, or began a step."""
    path, flushed, flush = tmp_path / "journal", [0], os.fsync

    def lasting(file):
        flush(file)
        if os.path.samestat(os.fstat(file), path.stat()):
            flushed[0] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", lasting)

    def whole() -> bool:
        return flushed[0] == path.stat().st_size

    journal = Journal.create(path, KEY, Owner(tmp_path, newest=True), {})
    assert whole()
    journal.begin(0)
    assert whole()
    journal.released(0, b"w")
    assert not whole()
    journal.bind("data", 1)
    assert whole()
    journal.vouched("a note")
    journal.flush()
    assert whole()
    journal.close()
    Journal.open(path, KEY, Owner(tmp_path, newest=True))
    assert whole()


# The owner -------------------------------------------------------------------------------------------------------------------


def test_a_folder_has_one_owner_in_one_process_too_unless_the_newest_wins(tmp_path):
    first = Owner(tmp_path)
    with pytest.raises(ArgumentError, match="no other owner"):
        Owner(tmp_path)
    assert first.held
    second = Owner(tmp_path, newest=True)
    assert second.held and not first.held


@pytest.mark.parametrize("locks", ["there", "not there"])
def test_an_owner_that_is_refused_leaves_nothing_open(tmp_path, monkeypatch, locks):
    """By another process's lock, or by the lease of another host, which may be stale or not be asked for its age."""
    fcntl = pytest.importorskip("fcntl")
    lock = tmp_path / ".lock"
    lock.write_text('{"host": "another", "pid": 7, "token": "x", "lease": true}')
    with open(lock) as held:
        if locks == "there":
            fcntl.flock(held, fcntl.LOCK_EX)
        else:
            monkeypatch.setattr(owners, "locked", lambda file: None)
        for touch in (Path.touch, _refused):
            with monkeypatch.context() as patch, pytest.raises(ArgumentError, match="process 7 on another has it") as kept:
                patch.setattr(Path, "touch", touch)
                Owner(tmp_path)
            assert kept.value and _open_files(lock) == 1  # the test's own
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_a_pipe_among_the_secrets_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "key.json")
    with pytest.raises(ArgumentError, match=r"'key\.json' is neither"):
        Owner(tmp_path)
    assert not (tmp_path / ".lock").exists()

"""What a life finds of the lives before it: whole, cut by a crash in the one way that a crash can cut it, or damaged."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from hushgrad.errors import ArgumentError
from hushgrad.release import journal_history
from hushgrad.release.journal_frames import Frames, frames_in
from hushgrad.release.journal_history import JournalHistory, shown
from hushgrad.release.owner import boot_identity


def journal(path: Path, *, releases: int, mark: int, boot: str, told: bool | None = None) -> None:
    """A journal of so many releases, whose last mark is that, as a life that began then has left it."""
    frames = Frames(path, new=True)
    about = {} if told is None else {"told": told}
    frames.tell(open=boot, place=frames.place.identity, **about)
    if mark:
        frames.append(ord("m"), mark.to_bytes(5, "little"))
    for step in range(releases):
        frames.append(ord("r"), step.to_bytes(5, "little"))
    frames.close()


def found(path: Path) -> JournalHistory:
    frames = Frames(path, new=False)
    try:
        return JournalHistory.of(frames)
    finally:
        frames.close()


def tails(room: int) -> list[tuple[bytes, bool, bool]]:
    """(what is behind the last whole frame, whether a machine that stopped may have left it, whether a process that died may)."""
    zeros = [(bytes(size), size <= room, False) for size in (1, 7, 8, 9, room - 1, room, room + 1, room + 8, room + 16)]
    openings = []
    for text, there in itertools.product((0, 8, 300, 2000), (0, 1, 7, 299, 300, 301, 1999, 2000)):
        tail = b"j" + text.to_bytes(5, "little") + b"xx" + bytes(there)
        cut = text > there  # the sentence that it announces is not all there; otherwise its checksum is wrong
        openings.append((tail, cut or len(tail) <= room, cut))
    heads = [(b"j"[:size] + bytes(4)[: max(0, size - 1)], True, True) for size in (1, 3, 5)]
    return [*zeros, *openings, *heads]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(("releases", "mark"), [(0, 0), (0, 4), (3, 4), (4, 4), (2, 8)])
def test_behind_the_last_frame_stands_nothing_but_what_a_crash_may_leave(tmp_path, monkeypatch, stopped, releases, mark):
    """After the machine stopped at most a frame for each step that was reserved, and one; else half of what a life says at its start."""
    path = tmp_path / "journal"
    journal(path, releases=releases, mark=mark, boot=boot_identity())
    whole = path.read_bytes()
    if stopped:
        monkeypatch.setattr(journal_history, "boot_identity", lambda: "another start")
    for tail, by_machine, by_process in tails(room=8 * (mark - releases + 1)):
        path.write_bytes(whole + tail)
        if by_machine if stopped else by_process:
            assert len(found(path).recorded) == releases
            assert path.read_bytes()[: len(whole)] == whole
            assert list(frames_in(path))[-1].end == path.stat().st_size  # nothing is left of it
        else:
            with pytest.raises(ArgumentError, match="damaged"):
                found(path)
            assert path.read_bytes() == whole + tail


@pytest.mark.parametrize(("releases", "mark"), [(0, 0), (0, 1), (0, 4), (3, 4), (4, 4), (2, 0)])
def test_a_machine_that_stopped_is_told_of_where_steps_were_reserved_and_not_entered(tmp_path, monkeypatch, releases, mark):
    path = tmp_path / "journal"
    journal(path, releases=releases, mark=mark, boot=boot_identity())
    assert not [note for note in found(path).notes if "machine stopped" in note]
    monkeypatch.setattr(journal_history, "boot_identity", lambda: "another start")
    for _ in range(2):  # once, whoever opens it again
        notes = [note for note in found(path).notes if "machine stopped" in note]
        expected = [f"The machine stopped in steps {releases} to {mark - 1}:"] if mark > releases else []
        assert [note.partition(" that")[0] for note in notes] == expected


@pytest.mark.parametrize(("releases", "mark"), [(0, 0), (0, 1), (0, 2), (1, 0), (2, 3)])
@pytest.mark.parametrize("told", [None, False, True])
def test_a_run_has_begun_when_a_step_may_have_been_released_and_only_then_must_say_what_nobody_saw(
    tmp_path, releases, mark, told
):
    path = tmp_path / "journal"
    assert not JournalHistory().is_begun and JournalHistory().mark == 0
    journal(path, releases=releases, mark=mark, boot=boot_identity(), told=told)
    begun = bool(releases or mark)
    assert shown(path).is_begun == begun and len(shown(path).digests) == releases and shown(path).mark == mark
    notes = " ".join(found(path).notes)
    assert ("no attributes of folders" in notes) == (begun and not told)
    assert ("attribute with the length of the run's journal was removed" in notes) == bool(told)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_said_last_holds_and_every_note_stays(tmp_path, seed):
    draw, path = random.Random(seed), tmp_path / "journal"
    frames = Frames(path, new=True)
    frames.tell(open=boot_identity(), place=frames.place.identity, told=False)
    recorded, bound, notes, mark = [], {}, [], 0
    for number in range(60):
        kind = draw.choice("ramjn")
        if kind in "ra":
            recorded.append((ord(kind), number.to_bytes(5, "little")))
            frames.append(*recorded[-1])
        elif kind == "m":
            mark = draw.randrange(1000)
            frames.append(ord("m"), mark.to_bytes(5, "little"))
        elif kind == "j":
            name = draw.choice(["data", "world"])
            bound[name] = number
            frames.tell(bind={name: number})
        else:
            notes.append(f"note {number}")
            frames.tell(note=notes[-1])
    frames.close()
    for earlier in (shown(path), found(path)):
        assert (earlier.recorded, earlier.bound, earlier.mark) == (recorded, bound, mark)
        assert earlier.digests == [content for kind, content in recorded if kind == ord("r")]
        assert list(earlier.notes[: len(notes)]) == notes

"""Frames of a journal: whatever interrupts a write, the file holds what was written, and nothing hides what comes after."""

from __future__ import annotations

import os
import random

import pytest

from hushgrad.errors import StorageError
from hushgrad.release import journal_frames as module
from hushgrad.release.journal_frames import Frames, frames_in
from hushgrad.release.owner import Owner


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("seed", range(10))
def test_a_write_that_is_struck_hides_no_frame(tmp_path, monkeypatch, seed, fault):
    rng = random.Random(seed)
    real = {name: getattr(os, name) for name in ("write", "setxattr")}
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

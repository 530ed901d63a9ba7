"""What a process leaves for those that may wait for it: the error that it raises instead of sending its next message.

A message arrives when every process has sent its part. One that refuses in the middle of a pass, meets an error or is interrupted never
does, and messages are matched by their order alone, so it cannot say so in one. It leaves a notice in the group's store. Who has waited
for a while looks there, and raises the same error. A message that arrives costs nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hushgrad import errors
from hushgrad.clipping._torch_compile import group_store
from hushgrad.errors import CaptureError, HushgradError

LOOK = timedelta(seconds=0.5)  # how long a process waits before it looks, and between two looks
PATIENT = 4  # looks after which it asks what the others wait for


class ProcessLost(HushgradError, RuntimeError):
    """Another process of the run has ended or does not answer. Start all of them again: the run resumes from its checkpoint."""


def lost(what: str) -> ProcessLost:
    """The error message for a message that does not arrive because a process is gone."""
    return ProcessLost(
        f"Another process ended or did not answer in time while {what}. Nothing of this step was released. Start all "
        "processes again; with a Checkpoint the run goes on from its last save."
    )


def unlike(what: str) -> CaptureError:
    """The error message for messages about different things that have met."""
    return CaptureError(
        f"The processes did different things: one waited while {what}, another one for something else. Every process must take every step, "
        "and call Checkpoint.save() where the others do. Start all processes again."
    )


def described(error: BaseException) -> bytes:
    """An error as other processes are told of it. Of one that is not ours only the kind: its words may be about records."""
    if isinstance(error, HushgradError):
        return json.dumps([type(error).__name__, str(error)]).encode()
    said = (
        f"A process was stopped by {type(error).__name__} in a step that all processes take together; its own report says why. Nothing of "
        "this step was released. Start all processes again; with a Checkpoint the run goes on from its last save."
    )
    return json.dumps([ProcessLost.__name__, said]).encode()


def raised_there(content: bytes) -> HushgradError:
    """The error that another process has told of."""
    kind, said = json.loads(content)
    known: dict[str, type[HushgradError]] = {**vars(errors), ProcessLost.__name__: ProcessLost}
    made = known.get(kind, CaptureError)(said)
    getattr(made, "add_note", str)("Another process of this run has raised this error; all raise it.")  # since Python 3.11
    return made


class Notices:
    """The notices of one group of processes, numbered alike in all of them: by run, and by how many errors this process has raised in it.

    So who has raised an error by itself is not stopped by the same one of another process.
    """

    def __init__(self) -> None:
        self._runs = self._left = self._sent = 0
        self.out_of_step = False  # this process has begun a message that others may not send

    def begin(self) -> None:
        """A run begins: notices of earlier ones are out of date."""
        self._runs, self._left, self._sent = self._runs + 1, 0, 0

    def leave(self, error: BaseException, found: Sequence[bool] = ()) -> None:
        """Leave ``error`` for the others, and what this process has ``found`` for their guarantees."""
        said = json.dumps([described(error).decode(), [*map(bool, found)]])
        self._asked(lambda store: store.check([self._name]) or store.set(self._name, said))
        self._left += 1

    def read(self) -> tuple[HushgradError, list[bool]] | None:
        """What another process has left."""
        content = self._asked(lambda store: store.get(self._name) if store.check([self._name]) else None)
        if content is None:
            return None
        self._left += 1
        said, found = json.loads(content)
        return raised_there(said.encode()), found

    def sent(self) -> None:
        """One more message was sent."""
        self._sent += 1

    def differs(self, what: str, rank: int, size: int) -> CaptureError | None:
        """The error message if another process has waited for long, too, and for another message in this place: none will arrive."""
        place = f"hushgrad/waits/{self._runs}/{self._sent}/"
        self._asked(lambda store: store.set(f"{place}{rank}", what))
        others = [f"{place}{other}" for other in range(size) if other != rank]
        found = self._asked(lambda store: [store.get(name).decode() for name in others if store.check([name])]) or []
        if not {*found} - {what}:
            return None
        first, second = sorted((what, min({*found} - {what})))
        return CaptureError(
            f"The processes made different passes: one waited while {first}, another while {second}. Every process must make the same "
            "passes in every step, with fully_shard also over an empty part of the batch. Start all processes again."
        )

    @property
    def _name(self) -> str:
        return f"hushgrad/left/{self._runs}/{self._left}"

    @staticmethod
    def _asked(question: Any) -> Any:
        """The store's answer; None if it is gone with the process that had it: then every connection to that one is closed, too."""
        if not dist.is_initialized():
            return None
        try:
            return question(group_store())
        except RuntimeError:
            return None

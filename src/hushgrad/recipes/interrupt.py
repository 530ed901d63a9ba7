"""Handles Ctrl-C between two steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any


class Interrupt(AbstractContextManager["Interrupt"]):
    """A callback that lets the running step finish, calls ``save`` and then raises KeyboardInterrupt.

    A second Ctrl-C interrupts at once; the run then continues from the last checkpoint.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._asked = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def __call__(self, metrics: dict[str, Any]) -> None:
        """After each step: stop if an interrupt was requested, unless this was the last step."""
        if self._asked and metrics["step"] < metrics["steps"]:
            self._save()
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

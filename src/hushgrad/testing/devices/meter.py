"""Counts what happens on the simulated device, by the line that caused it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = str(Path(__file__).parent)  # as frames spell it: a link is not followed
_ROOT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Meter:
    """What happened, by the line that caused it: ``launches``, ``syncs`` (the host waits), ``copies`` and ``bytes`` from or to the host.

    ``trace`` has every launch and copy in its order, with the shapes and numbers that it was given: two steps with one trace are one graph.
    """

    launches: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[str, ...]] = field(default_factory=list)

    def copied(self, what: str, tensors: list[Tensor]) -> None:
        """A copy between host and device."""
        place = f"{what} {caller()}"
        self.trace.append((what, *_described(tensors)))
        self.copies[place] += 1
        self.bytes[place] += sum(t.numel() * t.element_size() for t in tensors)

    def launched(self, name: str, given: Sequence[Any]) -> None:
        """An operation on the device, and the tensors and numbers that it is given."""
        self.launches[caller()] += 1
        self.operations[name] += 1
        self.trace.append((name, *_described(given)))

    def waited(self, what: str) -> None:
        """The host waits for the device."""
        self.syncs[f"{what} {caller()}"] += 1

    def __str__(self) -> str:
        names = ("launches", "syncs", "copies", "bytes")
        return ", ".join(f"{name} {sum(vars(self)[name].values())}" for name in names)


def _described(given: Sequence[Any]) -> list[str]:
    """Shapes and types of tensors, everything else as it is written."""
    return [f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else repr(t) for t in given]


meters: list[Meter] = []  # the innermost block that counts is the last


def caller() -> str:
    """The innermost line of hushgrad that is running, or else of whoever called torch."""
    frame, outside = sys._getframe(1), "torch"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and not name.startswith(_HERE):
            return f"{name[len(_ROOT) + 1 :]}:{frame.f_lineno}"
        if outside == "torch" and not name.startswith(_TORCH) and not name.startswith(_HERE) and not name.startswith("<"):
            outside = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outside

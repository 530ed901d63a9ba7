"""The metrics of a run as curves, from the lines that it has written so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad import _check
from hushgrad.serve.files import RunFolder, Unreadable

# What is shown, in this order, and how it is called. Nothing else in the file reaches a reader.
SHOWN = {
    "epsilon": "epsilon spent",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "signal_to_noise": "signal to noise",
    "learning_rate": "learning rate",
    "raw_loss": "training loss",
    "raw_accuracy": "training accuracy",
    "raw_clipped_fraction": "clipped gradients",
}
_POINTS = 240  # more cannot be seen


@dataclass(frozen=True, kw_only=True)
class Series:
    """Curves over the steps. ``steps`` is how many steps are planned, 0 where no line says so; ``has_raw``: some were hidden."""

    step: int
    steps: int
    curves: dict[str, tuple[tuple[int, float], ...]]
    has_raw: bool

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.curves[name][-1][1] if name in self.curves else None


def read_series(folder: RunFolder, *, raw: bool, points: int = _POINTS) -> Series:
    """The curves of a run in about ``points`` points; un-noised ones only with ``raw=True``. Without metrics they are empty."""
    try:
        lines = folder.lines("metrics.jsonl", about=points)
    except Unreadable:
        lines = []
    step, steps, has_raw = 0, 0, False
    found: dict[str, dict[int, float]] = {}
    for line in _thinned(lines, points):
        metrics = _check.parsed_object(line)
        at = _count(metrics.get("step"))
        if at is None:
            continue
        step, steps = max(step, at), _count(metrics.get("steps")) or steps
        for name in SHOWN:
            value = _number(metrics.get(name))
            hidden = name.startswith("raw_") and not raw
            has_raw |= hidden and value is not None
            if value is not None and not hidden:
                found.setdefault(name, {})[at] = value
    curves = {name: tuple(sorted(found[name].items())) for name in SHOWN if name in found}
    return Series(step=step, steps=steps, curves=curves, has_raw=has_raw)


def _thinned(lines: list[str], points: int) -> list[str]:
    """Some of many lines: the last one, and every one with a test result, which few lines have."""
    every = max(1, len(lines) // points)
    last = len(lines) - 1
    return [line for k, line in enumerate(lines) if k % every == 0 or k == last or '"test_' in line]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of a thousand digits
        return None


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < 1 << 53 else None

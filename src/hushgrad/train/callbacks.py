"""Callbacks of fit: each is called with one dict of metrics after each step.

A callback is any function of a dict. One that holds a file or a display is a context manager too, and fit enters it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hushgrad._printed import at_most
from hushgrad.errors import ArgumentError

OnStep = Callable[[dict[str, Any]], Any]
"""What fit calls after each step."""


def public(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without the metrics that show un-noised data.

    >>> public({"step": 3, "epsilon": 1.2, "raw_loss": 0.7})
    {'step': 3, 'epsilon': 1.2}
    """
    return {name: value for name, value in metrics.items() if not name.startswith("raw_")}


class JsonLines(AbstractContextManager["JsonLines"]):
    """One JSON object per step, appended to a file. Un-noised metrics are left out unless ``raw=True``."""

    def __init__(self, path: str | Path, *, raw: bool = False) -> None:
        self._path, self._raw = Path(path), raw
        self._file: TextIO | None = None

    def __enter__(self) -> JsonLines:
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __call__(self, metrics: dict[str, Any]) -> None:
        """Write one line."""
        if self._file is None:
            self.__enter__()
        assert self._file is not None
        shown = metrics if self._raw else public(metrics)
        # JSON has no NaN: a loss that has diverged is null.
        finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in shown.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()  # a killed run keeps the lines of all steps up to its last checkpoint

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """Scalars for TensorBoard (``pip install hushgrad[tensorboard]``). Un-noised metrics are left out unless ``raw=True``."""

    def __init__(self, directory: str | Path, *, raw: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ArgumentError("TensorBoard is not installed. Install it with pip install 'hushgrad[tensorboard]'.") from None

        self._writer, self._raw = SummaryWriter(str(directory)), raw

    def __call__(self, metrics: dict[str, Any]) -> None:
        """Add one point to each curve."""
        for name, value in (metrics if self._raw else public(metrics)).items():
            if isinstance(value, (int, float)) and name not in ("step", "steps"):
                self._writer.add_scalar(name, value, metrics["step"])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar on a terminal; elsewhere about ten lines in all. Writes to standard error.

    It shows un-noised metrics (marked by an asterisk) to the person who runs the training, and stores nothing.
    """

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=steps, shown="")
        self._every = max(1, steps // 10)
        self._drawn = 0.0
        self._smooth: dict[str, float] = {}

    def __enter__(self) -> ProgressBar:
        if self._live:
            self._progress.start()
        return self

    def __call__(self, metrics: dict[str, Any]) -> None:
        """Show where the run is."""
        self._take_in(metrics)
        done = metrics["step"] == metrics["steps"]
        if self._live:
            now = time.monotonic()
            if done or now - self._drawn > 0.1:
                self._drawn = now
                self._progress.update(self._task, completed=metrics["step"], shown=self._show(metrics))
        elif done or metrics["step"] % self._every == 0:
            self._console.print(
                f"step {metrics['step']} of {metrics['steps']}  {self._show(metrics)}", highlight=False, soft_wrap=True
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._progress.stop()

    def _take_in(self, metrics: dict[str, Any]) -> None:
        """Running means: values of single batches fluctuate."""
        for name in ("raw_loss", "raw_accuracy", "raw_clipped_fraction", "signal_to_noise"):
            value = metrics.get(name)
            if value is not None:
                self._smooth[name] = value if name not in self._smooth else 0.9 * self._smooth[name] + 0.1 * value

    def _show(self, metrics: dict[str, Any]) -> str:
        forms = (
            ("raw_loss", "loss* {:.3f}"),
            ("raw_accuracy", "accuracy* {:.1%}"),
            ("raw_clipped_fraction", "clipped* {:.0%}"),
            ("signal_to_noise", "signal/noise {:.2f}"),
        )
        parts = [form.format(self._smooth[name]) for name, form in forms if name in self._smooth]
        return "  ".join([f"epsilon <= {at_most(metrics['epsilon'])}", *parts])

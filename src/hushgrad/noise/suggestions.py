"""Suggestions of a mechanism to the planner: the settings that are worth trying in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushgrad.events import Participation
from hushgrad.noise.workload import AnyWorkload

if TYPE_CHECKING:
    from hushgrad.noise.base import Mechanism

REGENERATED = 4096  # steps: beyond this, regenerating all earlier z costs more than a training step


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that is planned: all of it public.

    ``rate`` is the sampling rate of random secret batches, or None for a fixed order with this ``participation``. ``alone``: random batches
    are not allowed, so fixed-order mechanisms have no better rival. ``tune``: optimise settings even where a closed form exists.
    """

    steps: int
    rate: float | None = None
    participation: Participation | None = None
    workload: AnyWorkload = None
    alone: bool = False
    tune: bool = False


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A mechanism that is worth trying, and why.

    ``work`` counts the rows of noise that are drawn or combined in an average step: 1 for independent noise. ``groups`` is the
    number of groups that random batches are drawn from in turn. In one ``family`` a larger member is shown only if it is better.
    """

    name: str
    make: Callable[[], Mechanism]
    why: str
    work: float
    groups: int = 1
    family: str = ""


@dataclass(frozen=True)
class Skipped:
    """A mechanism that cannot serve here, and why."""

    name: str
    reason: str


def regenerating(kind: Callable[[], Mechanism], name: str, why: str, run: Run) -> Suggestion | Skipped:
    """A mechanism for a fixed order whose rows need all earlier draws; these are made again, several rows at a time.

    Args:
        kind: constructor of the mechanism.
        name: what it is called.
        why: its advantage, in words.
        run: the run that is planned.
    """
    if run.steps > REGENERATED:
        return Skipped(name, f"Each row would need up to {run.steps} earlier draws; BLT does with a few buffers.")
    return Suggestion(name=name, make=kind, why=f"{why}; each row needs all earlier draws.", work=run.steps / 2)

"""Experiments and their findings: frozen values, standard library only (``hushgrad reproduce --list`` does not import torch).

An experiment is a function from a :class:`Context` (how much work, which seed, which data) to :class:`Findings` (claims with
verdicts, tables, the numbers behind a picture, and how to draw it). The claims of the sources are in ``claims.toml``, and
:mod:`hushgrad.experiments.runner` writes the files.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hushgrad import _check

T = TypeVar("T")

HOLDS = "holds"
MISPRINT = "does not hold as printed"  # the source is in error, and the corrected statement is what was found
UNDECIDED = "undecided"  # a measured inequality, within its noise: more seeds would be needed to say
REFUTED = "not reproduced"  # neither the printed nor a corrected statement was found: a defect here or a false claim
NOISE = 2.0  # standard errors that count as noise

_BETTER = {"equal": "=", "at most": "≤", "at least": "≥"}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a source next to what was found; the verdict follows from the numbers alone.

    ``expected`` is the printed value and ``relation`` how the finding should lie to it ("equal", "at most", "at least", within
    the absolute ``tolerance``). An inequality whose finding has a ``stderr`` must be met, and is broken, beyond two standard errors:
    between the two it is undecided, and no tolerance for noise may be added to it. ``corrected`` is the true value, if that
    contradicts the print: found by other means, and to be met within the tolerance or one per cent. ``note`` says why.

        >>> Claim(source="000", says="2 + 2 = 5", expected=5, corrected=4, found=4.0).verdict
        'does not hold as printed'
        >>> Claim(source="000", says="2 + 2 = 5", expected=5, found=4.0).verdict
        'not reproduced'
        >>> Claim(source="000", says="it helps", expected=0, relation="at least", found=0.5, stderr=0.3).verdict
        'undecided'
    """

    source: str
    says: str
    expected: float
    found: float
    tolerance: float = 0.0
    relation: str = "equal"
    corrected: float | None = None
    stderr: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _check.one_of(tuple(_BETTER), relation=self.relation)

    @property
    def verdict(self) -> str:
        """``holds``, ``does not hold as printed``, ``undecided`` or ``not reproduced``."""
        if self._agreement >= self._noise:
            return HOLDS
        if self._is_as_corrected():
            return MISPRINT
        return UNDECIDED if self._agreement > -self._noise else REFUTED

    def _is_as_corrected(self) -> bool:
        if self.corrected is None:
            return False
        return self.found == self.corrected or abs(self.found - self.corrected) <= max(self.tolerance, 0.01 * abs(self.corrected))

    @property
    def _noise(self) -> float:
        return 0.0 if self.relation == "equal" or self.stderr is None else NOISE * self.stderr

    @property
    def _agreement(self) -> float:
        """How far the finding is on the claimed side, not negative if it agrees; NaN never agrees."""
        if self.found == self.expected:
            return self.tolerance
        if self.relation == "at most":
            return self.expected + self.tolerance - self.found
        if self.relation == "at least":
            return self.found - self.expected + self.tolerance
        return self.tolerance - abs(self.found - self.expected)

    def to_json(self) -> dict[str, Any]:
        """For ``results.json``: all fields and the verdict."""
        shown = "source says relation expected corrected found tolerance stderr verdict note"
        return {name: getattr(self, name) for name in shown.split()}


class Stated:
    """The claims of one experiment from ``claims.toml``: each becomes a :class:`Claim` with what was found.

    >>> Stated("tree")("nodes of a prefix", 4.0, expected=4.0).verdict
    'holds'
    """

    def __init__(self, experiment: str) -> None:
        self._claims: dict[str, dict[str, Any]] = tables("claims.toml")[experiment]

    def __call__(self, name: str, found: float, /, **told: Any) -> Claim:
        """The claim of this name; ``told`` are computed fields, and the words that its sentences have in braces."""
        stated = self._claims[name]
        fields = {key: value for key, value in told.items() if key in Claim.__dataclass_fields__}
        words = {key: value for key, value in told.items() if key not in fields}
        sentences: dict[str, str] = {key: stated[key].format(**words) for key in ("says", "note") if key in stated}
        whole: dict[str, Any] = {**stated, **sentences, **fields}
        return Claim(found=found, **whole)

    def measured(self, name: str, value: tuple[float, float], **told: Any) -> Claim:
        """The claim of this name with a mean and its standard error."""
        return self(name, value[0], stderr=value[1], **told)


@cache
def tables(name: str) -> dict[str, Any]:
    """The content of one of this package's TOML files."""
    return _check.toml(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A small table: a title, the names of the columns, and rows of numbers or words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                _check.fail("rows", row, f"to have {len(self.columns)} entries, as columns={self.columns}")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of an experiment. ``draw`` fills a matplotlib figure; ``caption`` describes it, including units."""

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]
    draw: Callable[[Any], None]
    caption: str
    data: dict[str, Any] = field(default_factory=dict)


def _untracked(items: Sequence[T], about: str) -> Iterable[T]:
    return items


@dataclass(frozen=True, kw_only=True)
class Context:
    """How to run: ``quick`` for a small version on embedded data, ``seed`` of all randomness, ``data`` a folder of real data.

    ``track(items, about)`` yields items and shows progress on a terminal.
    """

    quick: bool = False
    seed: int = 0
    data: Path | None = None
    track: Callable[[Sequence[Any], str], Iterable[Any]] = _untracked


@dataclass(frozen=True)
class Experiment:
    """A published result that a command repeats: its name, its source, its claim, and where its code is.

    ``code`` is "module:function" inside this room, imported when it is run. ``heavy`` experiments train models for minutes;
    ``--all --quick`` runs their quick forms too. ``again`` names the experiment of which this one is the second look: claims that
    were undecided there, on seeds from ``fresh`` on; ``looks`` are the tables of what is compared, ``quick`` those of the quick form.
    """

    name: str
    source: str
    claim: str
    code: str
    heavy: bool = False
    again: str = ""
    fresh: int = 101
    looks: Sequence[Mapping[str, Any]] = ()
    quick: Sequence[Mapping[str, Any]] = ()

    def run(self, context: Context) -> Findings:
        """Run the experiment."""
        module, function = self.code.split(":")
        run: Callable[..., Findings] = vars(importlib.import_module(f"hushgrad.experiments.{module}"))[function]
        return run(context, self) if self.again else run(context)


SOURCES: dict[str, str] = tables("experiments.toml")["sources"]
EXPERIMENTS: tuple[Experiment, ...] = tuple(Experiment(**entry) for entry in tables("experiments.toml")["experiments"])
"""All experiments, in the order of the results page."""


def find(name: str) -> Experiment:
    """The experiment of that name; a misspelt one is answered with the closest.

    >>> find("tree").source
    '000'
    """
    return {experiment.name: experiment for experiment in EXPERIMENTS}[_check.one_of([e.name for e in EXPERIMENTS], name=name)]

"""Declared columns of a table: the bins of a number, the categories of a word. What is declared costs nothing.

Cut points come from one of three places: they are declared (``cuts``); or the bounds are, and the points lie evenly between them; or
``learn=True``, and they are quantiles of a histogram that is released before the run with Gaussian noise (its price is in the plan's
``before``). Repeated values need no care: they fill one cell of the histogram, and a cell with more than its share is a bin of its own.
If not even bounds are known, the histogram has 1,024 cells on a logarithmic scale, each 5 % wide; only cells that hold more than noise
count. Categories that are not declared are hashed into ``buckets``, which costs nothing.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hushgrad import _check
from hushgrad._value import LATER, Value
from hushgrad.recipes.files import utf8

_CELLS = 64  # of the histogram behind learned cut points
_FINE, _FARTHEST = 1024, 1e12  # the same where no bounds are known, and how far it reaches


class Column(Value, family="column"):
    """One declared column."""

    name: str

    @property
    @abstractmethod
    def places(self) -> int:
        """The number of features of its block."""

    @abstractmethod
    def place(self, cells: Sequence[str]) -> np.ndarray:
        """The feature that each cell sets, -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Category(Column):
    """Declared words, or any words hashed into ``buckets``.

    >>> Category(name="sex", values=("f", "m")).place(["m", "f", "?"]).tolist()
    [1, 0, -1]
    >>> Category(name="town", buckets=8).place(["Bern", "Rome", "", "Bern"]).tolist()
    [2, 5, -1, 2]
    """

    name: str
    values: tuple[str, ...] = ()
    buckets: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        values = tuple(str(value).strip() for value in self.values)  # as cells are
        if self.buckets is not None and _check.integer(2, buckets=self.buckets) and values:
            _check.fail("buckets", self.buckets, f"to be left out where the values of {self.name!r} are declared")
        if self.buckets is None and (not values or len(set(values)) < len(values)):
            _check.fail("values", self.values, f"to be the different categories of {self.name!r}")
        object.__setattr__(self, "values", values)

    @property
    def places(self) -> int:
        """One for each category, or bucket."""
        return len(self.values) if self.buckets is None else self.buckets

    def place(self, cells: Sequence[str]) -> np.ndarray:
        """The number of each cell's category, or bucket."""
        if self.buckets is not None:
            return np.array([zlib.crc32(utf8(cell)) % self.buckets if cell else -1 for cell in cells], np.int64)
        number = {value: i for i, value in enumerate(self.values)}
        return np.array([number.get(cell, -1) for cell in cells], np.int64)


@dataclass(frozen=True, kw_only=True)
class Number(Column):
    """A number: declare ``cuts``; or ``low``, ``high`` and ``bins``, on a "linear" or "log" scale, with ``learn=True`` as quantiles.

    With ``learn=True`` the bounds may be left out. Then numbers count up to 1e12 either way, and their hundredths are not told apart.

    >>> Number(name="age", cuts=(20, 40)).place(["19", "20", "77", "?"]).tolist()
    [0, 1, 2, -1]
    >>> Number(name="pay", low=0, high=1000, bins=4, scale="log").points.round().tolist()
    [5.0, 31.0, 177.0]
    """

    name: str
    cuts: tuple[float, ...] | None = None
    low: float | None = None
    high: float | None = None
    bins: int = 8
    scale: str = "linear"
    learn: bool = False

    def __post_init__(self) -> None:
        _check.one_of(("linear", "log"), scale=self.scale)
        if self.cuts is not None:
            cuts = tuple(_check.number(cuts=cut) for cut in self.cuts)
            if not cuts or any(b <= a for a, b in pairwise(cuts)):
                _check.fail("cuts", self.cuts, f"to be increasing numbers for {self.name!r}")
            object.__setattr__(self, "cuts", cuts)
            return
        _check.instance(bool, learn=self.learn)
        if self.learn and self.low is None and self.high is None:
            for name, end in (("low", -_FARTHEST), ("high", _FARTHEST), ("scale", "log")):
                object.__setattr__(self, name, end)
        if self.low is None or self.high is None:
            remedy = "Give limits that are known without a look at the data, or cuts, or neither and learn = true."
            _check.fail("low, high", (self.low, self.high), f"to be numbers for {self.name!r}", remedy)
        low, high = _check.number(low=self.low), _check.number(high=self.high)
        if not low < high:
            _check.fail("low, high", (low, high), f"to be increasing for {self.name!r}")
        if _check.positive_int(bins=self.bins) < 2 or self.bins > _CELLS:
            _check.fail("bins", self.bins, f"to lie in 2..{_CELLS} for {self.name!r}")
        with np.errstate(all="ignore"):
            if not (np.diff(self.grid(self.cells if self.learn else self.bins)) > 0).all():  # also where one is no number
                _check.fail("low, high", (low, high), f"to have numbers between them that can be told apart for {self.name!r}")

    @property
    def waits(self) -> bool:
        """Whether its cut points must be learned first."""
        return self.learn and self.cuts is None

    @property
    def points(self) -> np.ndarray:
        """The cut points."""
        return np.array(self.cuts) if self.cuts is not None else self.grid(self.bins)[1:-1]

    def grid(self, count: int) -> np.ndarray:
        """The bounds and ``count`` - 1 points between them, evenly on the scale."""
        low, high = np.array([self.low, self.high], float).tolist()
        if self.scale == "linear":
            return np.linspace(low, high, count + 1)
        logs = np.linspace(_log(low), _log(high), count + 1)
        return np.sign(logs) * np.expm1(np.abs(logs))

    @property
    def places(self) -> int:
        """One for each bin."""
        return len(self.points) + 1

    def place(self, cells: Sequence[str]) -> np.ndarray:
        """The bin of each cell: how many cut points it reaches."""
        return _cut(self.points, cells)

    @property
    def cells(self) -> int:
        """The number of cells of the histogram from which its cut points are learned."""
        return _FINE if self.high == -float(self.low or 0.0) == _FARTHEST else _CELLS

    def histogram(self, cells: Sequence[str], shares: np.ndarray) -> np.ndarray:
        """The shares of the cells in each part between the bounds; numbers beyond them count at the ends."""
        places = _cut(self.grid(self.cells)[1:-1], cells)
        known = places >= 0
        return np.bincount(places[known], shares[known], minlength=self.cells)

    def learned(self, noisy: np.ndarray, noise: float) -> Number:
        """This column with cut points that divide a noisy histogram, of deviation ``noise``, into about equal parts."""
        share = np.cumsum(np.maximum(noisy, 0.0) if self.cells == _CELLS else _occupied(noisy, noise))
        edges = self.grid(self.cells)[1:]
        if share[-1] <= 0:
            return replace(self, learn=False)
        wanted = np.searchsorted(share / share[-1], np.arange(1, self.bins) / self.bins)
        # A cell that holds several quantiles (equal values) is cut off on both sides.
        places = sorted(
            {int(p) for p in wanted} | {int(p) - 1 for p, n in zip(*np.unique(wanted, return_counts=True), strict=True) if n > 1}
        )
        cuts = tuple(float(edges[p]) for p in places if 0 <= p < self.cells - 1)
        return replace(self, cuts=cuts, learn=False) if cuts else replace(self, learn=False)


def _occupied(noisy: np.ndarray, noise: float) -> np.ndarray:
    """A histogram without the blocks of eight cells whose sums are hardly above the noise."""
    blocks = noisy.reshape(-1, 8)
    least = noise * math.sqrt(8) * math.sqrt(2 * math.log(len(blocks)))
    kept = np.where(blocks.sum(axis=1, keepdims=True) > least, blocks, 0.0)
    return np.diff(np.maximum.accumulate(np.concatenate([[0.0], kept.ravel()]).cumsum()))  # sums that do not fall


def _cut(points: np.ndarray, cells: Sequence[str]) -> np.ndarray:
    numbers = np.array([_number(cell) for cell in cells])
    return np.where(np.isnan(numbers), -1, np.searchsorted(points, numbers, "right"))


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


_OF_CATEGORY, _OF_NUMBER = ("values", "buckets"), ("cuts", "low", "high", "bins", "scale", "learn")
_OTHER_WORDS = "Bounds are low and high; categories are values, or buckets where they are not known."


def columns_of(tables: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns that a codebook's tables declare: ``{"age": {"cuts": [20, 40]}, "sex": {"values": ["f", "m"]}}``."""
    return tuple(_column(str(name), _check.instance(dict, **{f"column {name}": table})) for name, table in tables.items())


def _log(x: float) -> float:
    return math.copysign(math.log1p(abs(x)), x)


def _column(name: str, table: Mapping[str, Any]) -> Column:
    kind = Category if table.keys() & {"values", "buckets"} else Number
    known = _OF_CATEGORY if kind is Category else _OF_NUMBER
    remedy = _OTHER_WORDS if table.keys() & {"bounds", "categories"} else ""
    for key in table:
        _check.one_of(known, remedy, **{f"key of column {name}": key})
    options: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return kind(name=name, **options)

"""Declared columns of a table as the input of a model (:mod:`hushgrad.recipes.column` says what a single one may be).

Every column becomes a block of features, one of which is set: the bin of a number, the category of a word. From each block its mean 1/k
is subtracted, and each row is scaled to length 1. So a linear model sees steps instead of slopes (rare large numbers do not dominate),
and the length of a row, which the clip norm is chosen for, is public. What is missing or was not declared leaves its block empty.
Two columns may be crossed: this adds a block with a feature for each pair, for effects that are not a sum of both (a date, say).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check
from hushgrad._value import LATER
from hushgrad.recipes.column import Column, Number
from hushgrad.recipes.encoders import unit_rows
from hushgrad.recipes.learning import LearningEncoder
from hushgrad.recipes.table_file import Records, cells_of, read_cells, require_form

_MOST = 4096  # places of two columns that are crossed: more would be empty, and each costs noise


@dataclass(frozen=True, kw_only=True)
class Columns(LearningEncoder):
    """Declared columns of a table as rows of length 1: centred one-hot blocks.

        >>> from hushgrad.recipes.column import Category
        >>> encode = Columns(columns=(Number(name="age", cuts=(20, 40)), Category(name="sex", values=("f", "m"))))
        >>> encode([("30", "f"), {"sex": "m", "age": 7}]).norm(dim=1).round(decimals=5).tolist()
        [1.0, 1.0]

    ``noise_multiplier`` is that of the histograms where cut points are learned; ``crosses`` are pairs of columns by name.
    """

    columns: tuple[Column, ...]
    header: bool = True
    delimiter: str = ","
    label: str | None = None
    user: str | None = None
    noise_multiplier: float = 30.0
    crosses: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        names = [_check.instance(Column, column=column).name for column in self.columns]
        if not names or len(set(names)) < len(names):
            _check.fail("columns", names, "to have names of their own")
        for role, name in (("label", self.label), ("user", self.user)):
            if name in names:
                _check.fail("columns", names, f"to leave out the {role}, {name!r}: it is not there when the model is used")
        require_form(header=self.header, delimiter=self.delimiter, label=self.label, user=self.user)
        _check.positive(noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "crosses", crossed(self.crosses, self.columns))

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """The rows of a CSV file; columns are found by name."""
        titles = tuple(column.name for column in self.columns)
        return read_cells(path, titles, header=self.header, delimiter=self.delimiter, label=self.label, user=self.user)

    def undeclared(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        """For each column, the rows (from 1) whose cell was not declared; such a cell counts as missing."""
        blocks = [
            (column.name, column.place(cells), cells) for column, cells in zip(self.columns, self.prepared(rows), strict=True)
        ]
        found = {name: [i for i, cell in enumerate(cells, 1) if cell and places[i - 1] < 0] for name, places, cells in blocks}
        return {name: numbers for name, numbers in found.items() if numbers}

    # What is learned before the run ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> dict[int, Number]:
        """The columns whose cut points must be learned first."""
        return {i: column for i, column in enumerate(self.columns) if isinstance(column, Number) and column.waits}

    @property
    def learns(self) -> float | None:
        """The noise multiplier of what must be learned; None if everything is declared."""
        return self.noise_multiplier if self.waiting else None

    def prepared(self, rows: Sequence[Any]) -> list[list[str]]:
        """The cells of each column; a row is a list of cells in the columns' order, or a mapping by name."""
        listed = cells_of(rows, [column.name for column in self.columns])
        return [[str(row[i]).strip() for row in listed] for i in range(len(self.columns))]

    def statistic(self, prepared: list[list[str]], chosen: np.ndarray, shares: np.ndarray) -> Tensor:
        """The histograms of all columns to learn, divided by the root of their number: a share of 1 adds a vector of length at most 1."""
        counts = [column.histogram([prepared[i][r] for r in chosen], shares) for i, column in self.waiting.items()]
        return torch.from_numpy(np.concatenate(counts) / math.sqrt(len(counts)))

    def learned(self, noisy: Tensor, records: float) -> Columns:
        """This encoder with cut points from the noisy histograms; the number of records is not needed."""
        ends = np.cumsum([column.cells for column in self.waiting.values()])[:-1]
        parts = zip(self.waiting.items(), np.split(noisy.numpy(), ends), strict=True)
        new = {i: column.learned(part, self.noise_multiplier) for (i, column), part in parts}
        return replace(self, columns=tuple(new.get(i, column) for i, column in enumerate(self.columns)))

    def finished(self, prepared: list[list[str]]) -> Tensor:
        """One row of length 1 (0 where nothing is known) for each record."""
        known = {c.name: (c.place(cells), c.places) for c, cells in zip(self.columns, prepared, strict=True)}
        blocks = [_block(*known[column.name]) for column in self.columns]
        blocks += [_block(*_pairs(*known[one], *known[other])) for one, other in self.crosses]
        return unit_rows(torch.from_numpy(np.concatenate(blocks, axis=1).astype(np.float32)))


def crossed(pairs: Any, columns: Sequence[Column]) -> tuple[tuple[str, str], ...]:
    """The checked pairs of different columns, each pair once.

    Args:
        pairs: what a codebook, a recipe or a program says.
        columns: those that are there.
    """
    given: Any = _check.instance((list, tuple), crosses=pairs)
    listed: list[Any] = [_check.instance((list, tuple), crosses=pair) for pair in given]
    places = {column.name: column.places for column in columns}
    for pair in listed:
        for name in pair:
            _check.one_of(places, **{"name in crosses": name})
        if len(pair) != 2 or pair[0] == pair[1] or [set(other) for other in listed].count(set(pair)) > 1:
            _check.fail("crosses", list(pair), "to be two different columns, and each pair to be there once")
        if places[pair[0]] * places[pair[1]] > _MOST:
            _check.fail("crosses", list(pair), f"to have at most {_MOST} places together", "Declare fewer bins or buckets.")
    return tuple((str(one), str(other)) for one, other in listed)


def _pairs(one: np.ndarray, many: int, other: np.ndarray, more: int) -> tuple[np.ndarray, int]:
    return np.where((one < 0) | (other < 0), -1, one * more + other), many * more


def _block(places: np.ndarray, count: int) -> np.ndarray:
    block = np.zeros((len(places), count))
    known = places >= 0
    block[known] = -1.0 / count
    block[known, places[known]] += 1.0
    return block

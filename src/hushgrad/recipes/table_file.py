"""Records as read from a file, and the cells of a CSV table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.recipes.files import lines


@dataclass(frozen=True, kw_only=True)
class Records:
    """The content of a file of records: rows for an encoder, and their labels, owners and own files if it has them.

    >>> records = Records(rows=[[35, "clerk"], [52, "boss"]], labels=["no", "yes"])
    >>> records.labels, records.owners
    (['no', 'yes'], None)
    """

    rows: list[Any]
    labels: list[str] | None = None
    owners: list[str] | None = None
    files: list[Path] | None = None


def cells_of(rows: Sequence[Any], names: Sequence[str]) -> list[Sequence[Any]]:
    """The cells of each row in the order of ``names``; a row is a list of cells, or a mapping by name."""
    listed = [[row.get(name, "") for name in names] if isinstance(row, Mapping) else row for row in rows]
    for number, row in enumerate(listed, 1):
        if len(row) != len(names):  # errors go to logs: they say where a record is, not what it holds
            _check.fail(f"the number of cells in row {number}", len(row), f"to be {len(names)}: {', '.join(names)}")
    return listed


def require_form(*, header: bool, delimiter: str, label: str | None = None, user: str | None = None) -> None:
    """Check the form of a table: header, delimiter, and the columns of labels and owners.

    Raises:
        ArgumentError: for anything else, whether a recipe, a codebook or a model file declares it.
    """
    _check.flag(header=header)
    if len(_check.instance(str, delimiter=delimiter)) != 1 or delimiter in '"\r\n':
        _check.fail("delimiter", delimiter, "to be one character, and neither a quotation mark nor the end of a line")
    for role, name in (("label", label), ("user", user)):
        _check.optional(
            partial(_check.instance, str, "Give the column's name; without a header that is its position, '0' the first.")
        )(**{role: name})
    if label is not None and label == user:
        _check.fail("user", user, "to be another column than the label", "It says whose a record is.")


def read_cells(
    path: Path, columns: tuple[str, ...], *, header: bool, delimiter: str, label: str | None, user: str | None
) -> Records:
    """The named columns of a CSV file, and its labels and owners if it has such columns.

    Args:
        path: the file.
        columns: the names of the columns, or their positions where there is no header.
        header: whether the first row holds the names.
        delimiter: between two cells.
        label: the column of labels.
        user: the column of owners.
    """
    titles, body = read_table(path, header=header, delimiter=delimiter)
    if not header and len(titles) == len(columns):
        titles = list(columns)  # the same table without its label
    missing = [name for name in columns if name not in titles]
    if missing:
        remedy = "Its first line is taken for their names: a file without such a line is read with header = false."
        if not header:
            remedy = f"Without a header they are named by position, from '0' to '{len(titles) - 1}'."
        elif len(titles) == 1:
            remedy = "Is it separated otherwise? Say delimiter."
        _check.fail(
            "file", str(path), f"to have the columns that are declared or were trained on; it lacks {', '.join(missing)}", remedy
        )
    used = [titles.index(name) for name in columns]
    target, owner = (titles.index(name) if name in titles else None for name in (label, user))
    return Records(
        rows=[tuple(row[i] for i in used) for row in body],
        labels=None if target is None else [row[target].strip() for row in body],
        owners=None if owner is None else [row[owner] for row in body],
    )


def read_table(path: Path, *, header: bool, delimiter: str) -> tuple[list[str], list[list[str]]]:
    """The titles (or positions) of a CSV file's columns, and its rows, which all have as many cells."""
    require_form(header=header, delimiter=delimiter)
    text = (line + "\n" for line in lines(path, exact=True))
    # Strict: a row with a quotation mark left open would else take all rows after it into its last cell.
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        found = f"to be a CSV table (line {reader.line_num}: {error})"
        _check.fail("file", str(path), found, "Is a quotation mark left open, or not doubled?")
    rows = [row for _, row in numbered]
    if len(rows) < 1 + header:
        _check.fail("file", str(path), "to hold at least one row")
    titles = [name.strip() for name in rows[0]] if header else [str(i) for i in range(len(rows[0]))]
    twice = sorted({name for name in titles if titles.count(name) > 1})
    if twice:
        _check.fail("file", str(path), f"to have a title of its own for each column; {', '.join(twice)} is there twice")
    body = rows[1:] if header else rows
    for end, row in numbered:
        if len(row) != len(titles):
            remedy = "Is a quotation mark left open?" if any("\n" in cell for cell in row) else ""
            _check.fail("file", str(path), f"to have {len(titles)} cells in every row; that of line {end} has {len(row)}", remedy)
    return titles, body

"""Encoders: from a record in a file to the input of a model, by a fixed rule that is saved with the model.

An encoder is a frozen value with a JSON form, so a model file carries it, and a prediction needs neither the recipe nor the training
data. Whatever an encoder knows (columns, buckets, sizes) was declared, or learned privately before it was made: nothing is
estimated from records when it is called, and each row is encoded independently of the others.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check
from hushgrad._value import LATER, Value
from hushgrad.recipes.files import files_of_classes, lines, read_npy, read_npz, utf8
from hushgrad.recipes.table_file import Records, cells_of, read_cells, require_form

WORD_BUCKETS = 4096


class Encoder(Value, family="encoder"):
    """From raw records to a batch of inputs; a subclass is a frozen dataclass and so has ``to_json`` and ``from_json``."""

    @abstractmethod
    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """The inputs of a model for ``rows``, one by one."""

    @abstractmethod
    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """The records in a file; ``names`` are the names of the classes, which distinguish labels from content."""

    def undeclared(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        """For each column, the rows (from 1) with cells that were not declared; empty if nothing is declared."""
        return {}


@dataclass(frozen=True, kw_only=True)
class TableEncoder(Encoder):
    """Cells of a table: a number x gives sign(x) ln(1 + |x|) in its column, a word sets one of ``buckets`` hashed features.

    Each row is then scaled to length 1. ``columns`` are the used columns by name (by position where there is no header); in those of
    them that ``numbers`` names a word counts as missing.

        >>> encode = TableEncoder(columns=("age", "job"), buckets=4)
        >>> encode([("30", "clerk"), {"job": "clerk", "age": 30}]).shape
        torch.Size([2, 6])
    """

    columns: tuple[str, ...]
    buckets: int = 64
    header: bool = True
    delimiter: str = ","
    label: str | None = None
    user: str | None = None
    numbers: tuple[str, ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        _check.positive_int(buckets=self.buckets)
        for name in self.numbers:
            _check.one_of(self.columns, **{"name in numbers": name})
        require_form(header=self.header, delimiter=self.delimiter, label=self.label, user=self.user)

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """One row of ``len(columns) + buckets`` numbers for each record: cells in the columns' order, or a mapping by name."""
        inputs = np.zeros((len(rows), len(self.columns) + self.buckets), np.float32)
        for into, cells in zip(inputs, cells_of(rows, self.columns), strict=True):
            for place, cell in enumerate(cells):
                self._cell(into, place, str(cell).strip())
        inputs /= np.maximum(np.linalg.norm(inputs, axis=1, keepdims=True), 1e-12)
        return torch.from_numpy(inputs)

    def _cell(self, row: np.ndarray, place: int, text: str) -> None:
        x = _finite(text)
        if x is not None:
            row[place] = math.copysign(math.log1p(abs(x)), x)
        elif self.columns[place] not in self.numbers:
            row[len(self.columns) + zlib.crc32(utf8(f"{place}={text}")) % self.buckets] += 1.0

    def undeclared(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        """For each column of ``numbers``, the rows (from 1) whose cell holds something else; it counts as missing."""
        cells = {name: [str(row[i]).strip() for row in cells_of(rows, self.columns)] for i, name in enumerate(self.columns)}
        found = {name: [i for i, cell in enumerate(cells[name], 1) if cell and _finite(cell) is None] for name in self.numbers}
        return {name: numbers for name, numbers in found.items() if numbers}

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """The rows of a CSV file; columns are found by name, so a file for prediction may lack the label or have more."""
        about = {"header": self.header, "delimiter": self.delimiter, "label": self.label, "user": self.user}
        return read_cells(path, self.columns, **about)  # type: ignore[arg-type]


def unit_rows(rows: Tensor) -> Tensor:
    """Each row divided by its length; rows of 0 stay so."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-6)


def _finite(text: str) -> float | None:
    try:
        x = float(text)
    except ValueError:
        return None
    return x if math.isfinite(x) else None


def text_ids(text: str, length: int) -> list[int]:
    """The words of ``text`` as hashed ids 1..4095, cut or padded with 0 to ``length``."""
    ids = [1 + zlib.crc32(utf8(word)) % (WORD_BUCKETS - 1) for word in text.lower().split()[:length]]
    return ids + [0] * (length - len(ids))


@dataclass(frozen=True, kw_only=True)
class TextEncoder(Encoder):
    """Words of a text, hashed into 4,095 ids, cut or padded to ``length``.

    >>> TextEncoder(length=3)(["Now now"]).shape
    torch.Size([1, 3])
    """

    length: int
    expected = _check.each(length=_check.positive_int)

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """Ids of the words, (rows, length)."""
        return torch.tensor([text_ids(str(row), self.length) for row in rows], dtype=torch.int64).reshape(-1, self.length)

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """Lines of a file (``text``, or ``label<TAB>text``), or the .txt files of a folder (in folders of their labels, or not)."""
        return read_texts(path, names)


def read_texts(path: Path, names: Sequence[str]) -> Records:
    """Lines of a file (``text``, or ``label<TAB>text``), or the .txt files of a folder (in folders of their labels, or not)."""
    return _text_folder(path, names) if path.is_dir() else _text_lines(path, names)


def _text_lines(path: Path, names: Sequence[str]) -> Records:
    parts = [line.partition("\t") for line in lines(path)]
    labelled = [bool(tab) and label in names for label, tab, _ in parts]
    if not any(labelled):
        return Records(rows=["".join(part) for part in parts])
    if not all(labelled):
        _check.fail("line", labelled.index(False) + 1, f"to begin with one of {list(names)} and a tab")
    return Records(rows=[text for _, _, text in parts], labels=[label for label, _, _ in parts])


def _text_folder(path: Path, names: Sequence[str]) -> Records:
    files, labels = files_of_classes(path, names, (".txt",))
    if not files:
        _check.fail("folder", str(path), "to hold .txt files")
    return Records(rows=["\n".join(lines(file)) for file in files], labels=labels, files=files)


@dataclass(frozen=True, kw_only=True)
class ByteEncoder(Encoder):
    """Bytes of a text for next-byte prediction, at most ``length`` of them.

    >>> ByteEncoder(length=4)(["hushed"]).tolist()
    [[115, 104, 101, 100]]
    """

    length: int
    expected = _check.each(length=_check.positive_int)

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """The last ``length`` bytes of each row; rows of one call are equally long."""
        ids = [list((row if isinstance(row, bytes) else utf8(str(row)))[-self.length :]) for row in rows]
        if len({len(row) for row in ids}) > 1:
            _check.fail("rows", [len(row) for row in ids], "to be equally long", "Encode texts of different lengths one by one.")
        return torch.tensor(ids, dtype=torch.int64)

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """The lines of a text."""
        return Records(rows=lines(path))

    def windows(self, path: Path) -> tuple[Tensor, Tensor]:
        """Windows that do not overlap, and for each byte of them the next one."""
        content = "\n".join(lines(path)).encode()
        count = len(content) // (self.length + 1)
        if not count:
            _check.fail("file", str(path), f"to hold at least one window of {self.length + 1} bytes")
        flat = np.frombuffer(content, np.uint8)[: count * (self.length + 1)]
        ids = torch.from_numpy(flat.reshape(count, self.length + 1).astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class TensorEncoder(Encoder):
    """Numbers as they are: records of one ``shape`` that your program has encoded.

    >>> TensorEncoder(shape=(2,))([[1.0, 2.0]]).tolist()
    [[1.0, 2.0]]
    """

    shape: tuple[int, ...]

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """The rows as one tensor of float32 (whole numbers stay whole numbers)."""
        batch = torch.as_tensor(np.asarray(rows))
        if tuple(batch.shape[1:]) != tuple(self.shape):
            _check.fail("rows", tuple(batch.shape), f"to be records of shape {tuple(self.shape)}")
        return batch.float() if batch.is_floating_point() else batch.long()

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """A .npy file of records, or a .npz file with the arrays ``inputs`` and, if there are labels, ``labels``."""
        return read_arrays(path, names)


def read_arrays(path: Path, names: Sequence[str]) -> Records:
    """A .npy file of records, or a .npz file with the arrays ``inputs`` and, if there are labels, ``labels``."""
    inputs, labels = read_npz(path, "inputs", "labels") if path.suffix == ".npz" else (read_npy(path), None)
    if inputs is None or inputs.dtype.kind == "U":
        _check.fail("file", str(path), "to be a .npy file, or a .npz file with the array inputs of numbers")
    if labels is not None and labels.shape != inputs.shape[:1]:
        _check.fail("file", str(path), f"to hold one label for each of its {len(inputs)} records")
    return Records(rows=list(inputs), labels=None if labels is None else [_name(label, names) for label in labels])


def _name(label: Any, names: Sequence[str]) -> str:
    if isinstance(label, np.integer) and 0 <= int(label) < len(names):
        return names[int(label)]
    return str(label)

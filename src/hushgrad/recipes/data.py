"""The data sets that a recipe can name. All are encoded by fixed rules: nothing is estimated from private records.

Means, vocabularies and class lists that are computed from the data would leak it before the first private step. So pixels are
scaled by constants, words and categories are hashed, rows are normalised one by one, and class names come from the recipe.
"""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad.recipes.files import find, lines, read_cifar10, read_idx

__all__ = ["DATA", "Data", "text_ids"]

_SPLIT_SEED = 20_000  # the split of data that come in one piece; public, and the same in every run


@dataclass(frozen=True, kw_only=True)
class Data:
    """A training set, a test set that the guarantee does not cover, and what a model has to know of them."""

    train: TensorDataset
    test: TensorDataset
    classes: int
    vocabulary: int = 0  # number of token ids; 0 for numbers
    groups: tuple[str, ...] | None = None  # owner of each training record, for privacy of whole users

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.tensors[0].shape[1:])


def _images(images: np.ndarray, labels: np.ndarray, top: float) -> TensorDataset:
    if len(images) != len(labels):
        _check.fail("labels", len(labels), f"to be as many as the images ({len(images)})")
    pixels = torch.from_numpy(images.astype(np.float32)) / top
    return TensorDataset(pixels if pixels.dim() == 4 else pixels.unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


def _split(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Record numbers for training and for the test, in the same way in every run."""
    _check.between(0, 1, test_fraction=fraction)
    if count < 2:
        _check.fail("records", count, "to be at least 2: one to train on and one to test on")
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    cut = min(max(1, round(fraction * count)), count - 1)
    return np.sort(order[cut:]), np.sort(order[:cut])


def digits(*, test_fraction: float = 0.2) -> Data:
    """The embedded 8 x 8 hand-written digits (1,797 images; see digits.LICENSE.txt)."""
    with resources.as_file(resources.files("hushgrad.recipes") / "digits.npz") as path, np.load(path, allow_pickle=False) as f:
        images, labels = f["images"], f["labels"]
    train, test = _split(len(images), test_fraction)
    return Data(train=_images(images[train], labels[train], 16.0), test=_images(images[test], labels[test], 16.0), classes=10)


def mnist(*, path: str) -> Data:
    """MNIST, or Fashion-MNIST, or anything else in its four idx files (plain or .gz)."""
    sets = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images = read_idx(find(Path(path), f"{prefix}-images-idx3-ubyte", f"{prefix}-images.idx3-ubyte"), dims=3)
        labels = read_idx(find(Path(path), f"{prefix}-labels-idx1-ubyte", f"{prefix}-labels.idx1-ubyte"), dims=1)
        if labels.max() > 9:
            _check.fail("labels", int(labels.max()), "to lie in 0..9")
        sets[part] = _images(images, labels, 255.0)
    return Data(train=sets["train"], test=sets["test"], classes=10)


def cifar10(*, path: str) -> Data:
    """CIFAR-10, binary version: as many of data_batch_1..5.bin as there are, and test_batch.bin (plain, .gz or .xz)."""
    folder = Path(path)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    there = [name for name in names if any((folder / (name + end)).is_file() for end in ("", ".gz", ".xz"))]
    parts = [read_cifar10(find(folder, name)) for name in there or names[:1]]
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Data(
        train=_images(images, labels, 255.0), test=_images(*read_cifar10(find(folder, "test_batch.bin")), 255.0), classes=10
    )


def table(
    *,
    path: str,
    label: str | int,
    classes: list[str],
    test_path: str | None = None,
    test_fraction: float = 0.2,
    header: bool = True,
    delimiter: str = ",",
    drop: list[str] | None = None,
    user: str | int | None = None,
    buckets: int = 64,
) -> Data:
    """A CSV file, encoded cell by cell.

    A cell that is a number x gives sign(x) ln(1 + |x|) in its column's place; any other cell sets one of ``buckets`` places
    that its column and text hash to. Then each row is scaled to length 1.
    """
    encode = _Rows(label, classes, header, delimiter, tuple(drop or ()), user, _check.positive_int(buckets=buckets))
    inputs, labels, owners = encode(Path(path))
    if test_path is not None:
        test_inputs, test_labels, _ = encode(Path(test_path))
        train = np.arange(len(labels))
    else:
        train, test = _split(len(labels), test_fraction)
        test_inputs, test_labels = inputs[test], labels[test]
    if test_inputs.shape[1:] != inputs.shape[1:]:
        _check.fail("test_path", test_path, "to have the same columns as the training file")
    return Data(
        train=TensorDataset(inputs[train], labels[train]),
        test=TensorDataset(test_inputs, test_labels),
        classes=len(classes),
        groups=None if user is None else tuple(owners[i] for i in train),
    )


@dataclass(frozen=True)
class _Rows:
    label: str | int
    classes: list[str]
    header: bool
    delimiter: str
    drop: tuple[str, ...]
    user: str | int | None
    buckets: int

    def __call__(self, path: Path) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        rows = [row for row in csv.reader(lines(path), delimiter=self.delimiter, skipinitialspace=True) if row]
        if len(rows) < 1 + self.header:
            _check.fail("file", str(path), "to hold at least one row")
        names = [name.strip() for name in rows[0]] if self.header else [str(i) for i in range(len(rows[0]))]
        label = self._column(self.label, names, "label")
        user = None if self.user is None else self._column(self.user, names, "user")
        used = [i for i, name in enumerate(names) if i not in (label, user) and name not in self.drop]
        body = rows[1:] if self.header else rows
        inputs = np.zeros((len(body), len(used) + self.buckets), np.float32)
        labels = np.empty(len(body), np.int64)
        owners = []
        for r, row in enumerate(body):
            if len(row) != len(names):
                _check.fail("row", r + 1, f"to have {len(names)} cells as the first one; it has {len(row)}")
            labels[r] = self._class(row[label].strip())
            owners.append("" if user is None else row[user])
            for place, column in enumerate(used):
                self._cell(inputs[r], place, len(used), row[column].strip())
        inputs /= np.maximum(np.linalg.norm(inputs, axis=1, keepdims=True), 1e-12)
        return torch.from_numpy(inputs), torch.from_numpy(labels), owners

    def _cell(self, row: np.ndarray, place: int, used: int, text: str) -> None:
        try:
            x = float(text)
        except ValueError:
            x = math.nan
        if math.isfinite(x):
            row[place] = math.copysign(math.log1p(abs(x)), x)
        else:
            row[used + zlib.crc32(f"{place}={text}".encode()) % self.buckets] += 1.0

    def _class(self, text: str) -> int:
        if text not in self.classes:
            _check.fail("label", text, f"to be one of data.classes={self.classes}", "Name every label in the recipe.")
        return self.classes.index(text)

    @staticmethod
    def _column(column: str | int, names: list[str], what: str) -> int:
        if isinstance(column, int) and -len(names) <= column < len(names):
            return column % len(names)
        if column not in names:
            _check.fail(what, column, f"to be one of the columns {', '.join(names)}")
        return names.index(str(column))


_WORD_BUCKETS = 4096


def text_ids(text: str, length: int) -> list[int]:
    """The words of ``text`` as hashed ids 1..4095, cut or padded with 0 to ``length``."""
    ids = [1 + zlib.crc32(word.encode()) % (_WORD_BUCKETS - 1) for word in text.lower().split()[:length]]
    return ids + [0] * (length - len(ids))


def labelled_text(*, path: str, classes: list[str], length: int = 40, test_fraction: float = 0.2) -> Data:
    """Lines ``label<TAB>text``; words are hashed into 4,095 ids, so the vocabulary tells nothing about the data."""
    length = _check.positive_int(length=length)
    ids, labels = [], []
    for number, line in enumerate(lines(Path(path)), start=1):
        label, tab, text = line.partition("\t")
        if not tab or label not in classes:
            _check.fail("line", number, f"to begin with one of {classes} and a tab")
        ids.append(text_ids(text, length))
        labels.append(classes.index(label))
    inputs, targets = torch.tensor(ids), torch.tensor(labels)
    train, test = _split(len(labels), test_fraction)
    return Data(
        train=TensorDataset(inputs[train], targets[train]),
        test=TensorDataset(inputs[test], targets[test]),
        classes=len(classes),
        vocabulary=_WORD_BUCKETS,
    )


def text(*, path: str, length: int = 64, test_fraction: float = 0.1) -> Data:
    """Plain text for next-byte prediction: windows of ``length`` bytes that do not overlap; each one is a record."""
    length = _check.positive_int(length=length)
    content = "\n".join(lines(Path(path))).encode()
    windows = len(content) // (length + 1)
    if windows < 2:
        _check.fail("file", path, f"to hold at least two windows of {length + 1} bytes")
    ids = torch.from_numpy(
        np.frombuffer(content, np.uint8)[: windows * (length + 1)].reshape(windows, length + 1).astype(np.int64)
    )
    train, test = _split(windows, test_fraction)
    sets = [TensorDataset(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in (ids[train], ids[test])]
    return Data(train=sets[0], test=sets[1], classes=256, vocabulary=256)


DATA: dict[str, Callable[..., Data]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": mnist,
    "cifar10": cifar10,
    "csv": table,
    "labelled-text": labelled_text,
    "text": text,
}
"""The data sets by the name that a recipe uses."""

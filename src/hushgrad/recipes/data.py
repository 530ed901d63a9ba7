"""The data sets that a recipe can name. All are encoded by fixed rules: nothing is estimated from private records.

Means, vocabularies and class lists computed from the data would leak information before the first private step. So pixels are
scaled by constants, words and categories are hashed, rows are normalised one by one, and class names come from the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.column import columns_of
from hushgrad.recipes.columns import Columns
from hushgrad.recipes.dataset import AugmentedImages, Data, Learn, labelled
from hushgrad.recipes.encoders import WORD_BUCKETS, ByteEncoder, Encoder, TableEncoder, TextEncoder
from hushgrad.recipes.files import find, read_cifar10, read_idx
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.table_file import Records, read_table
from hushgrad.recipes.text_features import TextFeatures
from hushgrad.recipes.train_test_split import train_test_split

_DIGITS = tuple("0123456789")
_DIGITS_SEED = 20_000
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _of_images(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], names: tuple[str, ...], top: float = 255.0
) -> Data:
    channels, height, width = train[0].shape[1:] if train[0].ndim == 4 else (1, *train[0].shape[1:])
    encoder = ImageEncoder(channels=channels, height=height, width=width, top=top)
    parts = [_images(encoder, *part) for part in (train, test)]
    return Data(train=parts[0], test=parts[1], classes=len(names), encoder=encoder, names=names)


def _images(encoder: ImageEncoder, images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    if len(images) != len(labels):
        _check.fail("labels", len(labels), f"to be as many as the images ({len(images)})")
    return TensorDataset(encoder(list(images)), torch.from_numpy(labels.astype(np.int64)))


def digits(*, test_fraction: float = 0.2) -> Data:
    """The embedded 8 x 8 hand-written digits (1,797 images; see digits.LICENSE.txt)."""
    with resources.as_file(resources.files("hushgrad.recipes") / "digits.npz") as path, np.load(path, allow_pickle=False) as f:
        images, labels = f["images"], f["labels"]
    _check.between(0, 1, test_fraction=test_fraction)
    order = np.random.default_rng(_DIGITS_SEED).permutation(len(images))  # always the same ones, and public
    cut = min(max(1, round(test_fraction * len(images))), len(images) - 1)
    train, test = np.sort(order[cut:]), np.sort(order[:cut])
    return _of_images((images[train], labels[train]), (images[test], labels[test]), _DIGITS, 16.0)


def mnist(*, path: str) -> Data:
    """MNIST, or Fashion-MNIST, or anything else in its four idx files (plain or .gz)."""
    sets = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images = read_idx(find(Path(path), f"{prefix}-images-idx3-ubyte", f"{prefix}-images.idx3-ubyte"), dims=3)
        labels = read_idx(find(Path(path), f"{prefix}-labels-idx1-ubyte", f"{prefix}-labels.idx1-ubyte"), dims=1)
        if labels.max() > 9:
            raise ArgumentError(f"Expected labels to lie in 0..9; that of record {1 + int(labels.argmax())} does not.")
        sets[part] = images, labels
    return _of_images(sets["train"], sets["test"], _DIGITS)


def cifar10(*, path: str, shift: int = 0, mirrored: bool = False) -> Data:
    """CIFAR-10, binary version: as many of data_batch_1..5.bin as there are, and test_batch.bin (plain, .gz or .xz).

    Training pictures are moved by up to ``shift`` pixels and ``mirrored`` at random, as often as they are read.
    """
    folder = Path(path)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    there = [name for name in names if any((folder / (name + end)).is_file() for end in ("", ".gz", ".xz"))]
    parts = [read_cifar10(find(folder, name)) for name in there or names[:1]]
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    data = _of_images((images, labels), read_cifar10(find(folder, "test_batch.bin")), _OBJECTS)
    if not shift and not mirrored:
        return data
    return replace(data, train=AugmentedImages(*data.train.tensors, shift=shift, mirrored=mirrored))


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
    buckets: int | None = None,
    columns: dict[str, Any] | None = None,
    crosses: list[list[str]] | None = None,
    numbers: list[str] | None = None,
    learn: Learn | None = None,
    placed: bool = False,
) -> Data:
    """A CSV file, encoded cell by cell (:class:`~hushgrad.recipes.encoders.TableEncoder`), or as ``columns`` declares."""
    titles, _ = read_table(Path(path), header=header, delimiter=delimiter)
    target = _column(label, titles, "label")
    owner = None if user is None else _column(user, titles, "user")
    about: dict[str, Any] = {"header": header, "delimiter": delimiter, "label": target, "user": owner}
    encoder: Encoder
    if columns is None:
        if crosses is not None:
            _check.fail("data.crosses", crosses, "to be left out", "Only columns that [data.columns] declares can be crossed.")
        dropped = [_column(name, titles, "drop") for name in drop or ()]  # a misspelt one would be trained on
        used = tuple(name for name in titles if name not in (target, owner, *dropped))
        if not used:
            _check.fail("path", path, f"to have a column beside {target!r} to learn from")
        about |= {} if buckets is None else {"buckets": buckets}
        encoder = TableEncoder(columns=used, numbers=tuple(_check.instance(list, numbers=numbers or [])), **about)
    else:
        _require_alone(columns, titles, drop=drop, buckets=buckets, numbers=numbers)
        encoder = Columns(columns=columns_of(columns), crosses=tuple(crosses or ()), **about)  # type: ignore[arg-type]  # looked at there
    return labelled(encoder, path, classes, test_path=test_path, test_fraction=test_fraction, learn=learn, placed=placed)


def _require_alone(columns: dict[str, Any], titles: list[str], **others: Any) -> None:
    """Refuse options that contradict declared columns: these alone say which columns are used, and how."""
    for name, value in others.items():
        if value is not None:
            remedy = "A column that is not declared is not used; each column of words has values or buckets of its own."
            _check.fail(f"data.{name}", value, "to be left out beside [data.columns]", remedy)
    for name in columns:
        _column(name, titles, "data.columns")


_RECORDS = (Columns, ImageEncoder, ImageFeatures, TableEncoder, TextEncoder, TextFeatures)


def encoded(
    *,
    path: str,
    encoder: dict[str, Any],
    classes: list[str],
    test_path: str | None = None,
    test_fraction: float = 0.2,
    learn: Learn | None = None,
    placed: bool = False,
) -> Data:
    """Records of any kind with an encoder that the recipe describes in its JSON form."""
    described: Any = _check.instance(_RECORDS, encoder=Encoder.from_json(encoder))
    return labelled(described, path, classes, test_path=test_path, test_fraction=test_fraction, learn=learn, placed=placed)


def _column(column: str | int, titles: list[str], what: str) -> str:
    if isinstance(column, int) and -len(titles) <= column < len(titles):
        return titles[column]
    if column not in titles:
        remedy = "Is it separated otherwise? Say [data] delimiter." if len(titles) == 1 else ""
        _check.fail(what, column, f"to be one of the columns {', '.join(titles)}", remedy)
    return str(column)


def labelled_text(
    *,
    path: str,
    classes: list[str],
    length: int = 40,
    test_path: str | None = None,
    test_fraction: float = 0.2,
    placed: bool = False,
) -> Data:
    """Lines ``label<TAB>text``; words are hashed into 4,095 ids, so the vocabulary reveals nothing about the data."""
    encoder = TextEncoder(length=length)
    if encoder.read(Path(path), classes).labels is None:
        _check.fail("line", 1, f"to begin with one of {classes} and a tab")
    return labelled(
        encoder, path, classes, test_path=test_path, test_fraction=test_fraction, vocabulary=WORD_BUCKETS, placed=placed
    )


def text_files(
    *,
    path: str,
    classes: list[str],
    length: int = 200,
    test_path: str | None = None,
    test_fraction: float = 0.2,
    placed: bool = False,
) -> Data:
    """A folder of .txt files that lie in folders of their classes; encoded like labelled text."""
    _require_folders(path, classes)
    encoder = TextEncoder(length=length)
    return labelled(
        encoder, path, classes, test_path=test_path, test_fraction=test_fraction, vocabulary=WORD_BUCKETS, placed=placed
    )


def image_files(
    *,
    path: str,
    classes: list[str],
    height: int,
    width: int,
    channels: int = 3,
    test_path: str | None = None,
    test_fraction: float = 0.2,
    placed: bool = False,
) -> Data:
    """A folder of pictures that lie in folders of their classes, each scaled to ``height`` x ``width``."""
    _require_folders(path, classes)
    encoder = ImageEncoder(channels=channels, height=height, width=width)
    return labelled(encoder, path, classes, test_path=test_path, test_fraction=test_fraction, placed=placed)


def _require_folders(path: str, classes: list[str]) -> None:
    missing = [name for name in classes if not (Path(path) / name).is_dir()]
    if missing:
        _check.fail("data.path", path, f"to hold one folder for each class; it lacks {', '.join(missing)}")


def text(*, path: str, length: int = 64, test_fraction: float = 0.1, placed: bool = False) -> Data:
    """Plain text for next-byte prediction: windows of ``length`` bytes that do not overlap; each one is a record."""
    encoder = ByteEncoder(length=length)
    inputs, targets = encoder.windows(Path(path))
    windows = Records(rows=list(torch.cat([inputs, targets[:, -1:]], dim=1).numpy()))
    train, test = train_test_split(windows, test_fraction, placed=placed)
    sets = [TensorDataset(inputs[part], targets[part]) for part in (train, test)]
    return Data(train=sets[0], test=sets[1], classes=256, vocabulary=256, encoder=encoder)


DATA: dict[str, Callable[..., Data]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": mnist,
    "cifar10": cifar10,
    "csv": table,
    "encoded": encoded,
    "images": image_files,
    "labelled-text": labelled_text,
    "text-files": text_files,
    "text": text,
}
"""The data sets by the name that a recipe uses."""

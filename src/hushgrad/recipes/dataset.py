"""A training set and a test set with what a model must know about them, how labelled records become one, and augmented pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from hushgrad import _check
from hushgrad.recipes.encoders import Encoder, TensorEncoder
from hushgrad.recipes.learning import LearningEncoder
from hushgrad.recipes.table_file import Records
from hushgrad.recipes.train_test_split import train_test_split

Learn = Callable[[LearningEncoder, Any, np.ndarray, Sequence[str] | None], LearningEncoder]
"""From an encoder, all prepared rows, the numbers of the private ones and their owners to the encoder that has learned from these."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A training set, a test set that the guarantee does not cover, and what a model must know about them.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> people = TensorDataset(torch.randn(10, 3), torch.randint(2, (10,)))
    >>> Data(train=people, test=people, classes=2, names=("yes", "no")).classes
    2
    """

    train: TensorDataset
    test: TensorDataset
    classes: int
    vocabulary: int = 0  # number of token ids; 0 for numbers
    groups: tuple[str, ...] | None = None  # owner of each training record, for privacy of whole users
    encoder: Encoder | None = None  # from a raw record to an input; saved with the model
    names: tuple[str, ...] = ()  # of the classes
    learned: float | None = None  # noise multiplier of what the encoder learned from the training records, if it did

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.tensors[0].shape[1:])


def labelled(
    encoder: Encoder,
    path: str,
    classes: Sequence[str],
    *,
    test_path: str | None = None,
    test_fraction: float = 0.2,
    vocabulary: int = 0,
    learn: Learn | None = None,
    placed: bool = False,
) -> Data:
    """The records of a file with labels from ``classes``, encoded by ``encoder`` and split.

    Args:
        encoder: how a record becomes an input; it is saved with the model.
        path: the file, or the folder, that ``encoder`` reads.
        classes: the names of the classes, in the order of the model's outputs.
        test_path: records to test on; without it a part of ``path`` is split off.
        test_fraction: the size of that part.
        vocabulary: the number of token ids, for text.
        learn: how an encoder learns privately, if it has something to learn; provided by the session.
        placed: whether a record keeps its position in every neighbouring file, so that positions may decide what is tested on.
    """
    names = _class_names(classes)
    records = encoder.read(Path(path), names)
    targets = label_numbers(records, names, path)
    tested = None if test_path is None else encoder.read(Path(test_path), names)
    train, test = train_test_split(records, test_fraction, placed=placed) if tested is None else (np.arange(len(targets)), None)
    groups = None if records.owners is None else tuple(records.owners[i] for i in train)
    inputs, fitted, learned = _encoded(encoder, records.rows, train, groups, learn)
    if tested is None:
        tests = TensorDataset(inputs[test], targets[test])
    else:
        tests = TensorDataset(fitted(tested.rows), label_numbers(tested, names, str(test_path)))
    return Data(
        train=TensorDataset(inputs[train], targets[train]) if tested is None else TensorDataset(inputs, targets),
        test=tests,
        classes=len(names),
        vocabulary=vocabulary,
        groups=groups,
        encoder=fitted,
        names=names,
        learned=learned,
    )


def _encoded(
    encoder: Encoder, rows: Sequence[Any], train: np.ndarray, groups: Sequence[str] | None, learn: Learn | None
) -> tuple[Tensor, Encoder, float | None]:
    """The inputs for all rows, the encoder when it has learned, and the noise multiplier of that."""
    if not isinstance(encoder, LearningEncoder) or encoder.learns is None:
        return encoder(rows), encoder, None
    if learn is None:
        remedy = "Train with a session (hushgrad train), or declare what it would learn."
        _check.fail("encoder", type(encoder).__name__, "to have nothing to learn here", remedy)
    prepared = encoder.prepared(rows)
    fitted = learn(encoder, prepared, train, groups)
    return fitted.finished(prepared), fitted, encoder.learns


def _class_names(classes: Sequence[str]) -> tuple[str, ...]:
    names = tuple(str(name) for name in classes)
    if len(set(names)) < max(2, len(names)):
        _check.fail("data.classes", list(classes), "to be two or more different names", "Name every label once.")
    return names


def label_numbers(records: Records, names: Sequence[str], path: str | Path) -> Tensor:
    """The labels of records as the numbers of their classes.

    Args:
        records: from an encoder's ``read``.
        names: the classes, in the order of the model's outputs.
        path: where the records are from, for the message.

    >>> from hushgrad.recipes import Records
    >>> label_numbers(Records(rows=[[35], [52]], labels=["no", "yes"]), ("yes", "no"), "people.csv")
    tensor([1, 0])

    Raises:
        ArgumentError: where there are no labels, or one that ``names`` lacks.
    """
    if records.labels is None:
        remedy = "A table needs its column of labels, a line of text a label and a tab, a picture a folder that names its class."
        _check.fail("file", str(path), "to have labels", remedy)
    places = {name: number for number, name in enumerate(names)}
    for number, label in enumerate(records.labels, 1):
        if label not in places:  # errors go to logs: they say where a record is, not what it holds
            remedy = "Name every label in the recipe. Numbers to be predicted are no classes: see hushgrad.estimators."
            _check.fail(
                "file", str(path), f"to have labels of data.classes={list(names)}; that of record {number} is none", remedy
            )
    return torch.tensor([places[label] for label in records.labels], dtype=torch.int64)


def from_datasets(train: Dataset[Any], test: Dataset[Any], *, classes: Sequence[str], vocabulary: int = 0) -> Data:
    """Two torch data sets of pairs (input, number of the class) as the data of a recipe.

    Args:
        train: the private records; all inputs have one shape.
        test: records that the guarantee does not cover.
        classes: the names of the classes, in the order of the numbers. They are declared, not looked up in the records.
        vocabulary: the number of token ids, where inputs are ids.

        >>> pairs = [(torch.zeros(3), 0), (torch.ones(3), 1)]
        >>> from_datasets(pairs, pairs, classes=["no", "yes"]).shape
        (3,)
    """
    names = tuple(str(name) for name in classes)
    parts = [_stacked(part, len(names)) for part in (train, test)]
    encoder = TensorEncoder(shape=tuple(parts[0].tensors[0].shape[1:]))
    return Data(train=parts[0], test=parts[1], classes=len(names), vocabulary=vocabulary, encoder=encoder, names=names)


def _stacked(part: Dataset[Any], classes: int) -> TensorDataset:
    pairs = [part[i] for i in range(len(part))]  # type: ignore[arg-type]
    if not pairs:
        _check.fail("dataset", part, "to hold at least one record")
    inputs = torch.stack([torch.as_tensor(pair[0]) for pair in pairs])
    targets = torch.tensor([int(pair[1]) for pair in pairs])
    if int(targets.min()) < 0 or int(targets.max()) >= classes:
        _check.fail(
            "labels", (int(targets.min()), int(targets.max())), f"to lie in 0..{classes - 1}, one for each name in classes"
        )
    return TensorDataset(inputs, targets)


class AugmentedImages(TensorDataset):
    """Pictures and labels; each picture is moved by up to ``shift`` pixels, its border reflected, and mirrored half of the time.

    It draws from torch's generator, which the loader seeds for every step and copy. For ``Plan(..., augmentations=K)``, which
    clips the mean gradient of K such copies (De et al. 2022), and for plain training.

    >>> images = AugmentedImages(torch.arange(16.0).view(1, 1, 4, 4), torch.tensor([3]), shift=0, mirrored=False)
    >>> torch.equal(images[0][0], images.tensors[0][0]), int(images[0][1])
    (True, 3)
    """

    def __init__(self, images: Tensor, labels: Tensor, *, shift: int = 4, mirrored: bool = True) -> None:
        super().__init__(images, labels)
        self.shift = _check.integer(0, shift=shift)
        self.mirrored = _check.instance(bool, mirrored=mirrored)
        if images.dim() != 4 or min(images.shape[2:]) <= self.shift:
            _check.fail("shift", shift, f"to be less than the sides of pictures, whose shape is {tuple(images.shape)}")

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """One picture, as it is drawn now, and its label."""
        image, label = super().__getitem__(index)
        if self.shift:
            down, right = torch.randint(2 * self.shift + 1, (2,)).tolist()
            height, width = image.shape[1:]
            image = F.pad(image, (self.shift,) * 4, mode="reflect")[:, down : down + height, right : right + width]
        if self.mirrored and bool(torch.rand(()) < 0.5):
            image = image.flip(-1)
        return image, label

    def part(self, chosen: Tensor) -> AugmentedImages:
        """Some of the pictures, read in the same way."""
        images, labels = (t[chosen] for t in self.tensors)
        return AugmentedImages(images, labels, shift=self.shift, mirrored=self.mirrored)

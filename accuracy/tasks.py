"""The tasks of ``make accuracy``: where their files are, how they are split, what they are compared with.

Splits are fixed by ``_SPLIT``, another one than that of ``hushgrad.recipes``, on which encodings and rules were compared with each other.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch.utils.data import TensorDataset

from accuracy import images
from hushgrad.advice import Codebook, advise, read_codebook
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.learning import LearningEncoder, learn
from hushgrad.recipes.metrics import area

__all__ = ["TASKS", "Task"]

HERE = Path(__file__).parent
_SPLIT = 27
_FIFTH = 0.2
Loaded = tuple[Callable[[int, float], Data], "dict[str, float] | None"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One data set: its codebook, the file that tells whether it is there, its anchors by epsilon."""

    title: str
    codebook: str
    needs: str
    epsilons: tuple[float, ...]
    load: Callable[[Path], Loaded]
    figure: str = "accuracy"
    floors: tuple[float, ...] = ()
    anchor: str = ""
    minutes: float = 5.0


def _opened(path: Path) -> list[str]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return content.decode("utf-8", "replace").rstrip("\n").split("\n")  # texts may hold other characters that end a line


def loaded(book: Codebook, rows: list[Any], labels: list[str], train: np.ndarray, test: np.ndarray) -> Loaded:
    """Encode as advised for an epsilon; fit without privacy for comparison. What is learned first has the noise of the seed."""
    numbers = {name: i for i, name in enumerate(book.classes)}
    y = torch.tensor([numbers[label] for label in labels])

    @lru_cache(maxsize=1)
    def prepared(epsilon: float) -> tuple[LearningEncoder, Any]:
        advice = advise(book, epsilon=epsilon, delta=1e-5, records=len(train), minutes=5.0)
        encoder = Encoder.from_json(advice.tables["data"]["encoder"])
        assert isinstance(encoder, LearningEncoder)
        return encoder, encoder.prepared(rows)

    def encoded(seed: int, epsilon: float) -> Data:
        encoder, known = prepared(epsilon)
        fitted = learn(encoder, known, train, records=len(train), secret=f"seed {seed}".encode().ljust(16))
        inputs = fitted.finished(known)
        parts = [TensorDataset(inputs[part], y[part]) for part in (train, test)]
        learned = {"encoder": fitted, "learned": encoder.learns}
        return Data(train=parts[0], test=parts[1], classes=len(numbers), names=book.classes, **learned)  # type: ignore[arg-type]

    return encoded, not_private(encoded(0, 3.0))


def not_private(data: Data) -> dict[str, float]:
    """Accuracy and AUC of scikit-learn's logistic regression on the same rows (C = 10)."""
    (x, y), (tx, ty) = (
        tuple(t.float().numpy() if t.is_floating_point() else t.numpy() for t in p.tensors) for p in (data.train, data.test)
    )
    model = LogisticRegression(C=10.0, max_iter=300).fit(x, y)
    scores = model.predict_proba(tx)
    areas = [area(scores[:, k], ty == k) for k in range(data.classes)]
    return {"accuracy": float((scores.argmax(axis=1) == ty).mean()), "auc": float(np.mean(areas))}


def _fifth(count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(_SPLIT).permutation(count)
    cut = round(_FIFTH * count)
    return np.sort(order[cut:]), np.sort(order[:cut])


def table_rows(path: Path, label: str) -> tuple[list[Any], list[str]]:
    """The rows of a CSV file, by name, and their labels."""
    rows = list(csv.DictReader(io.StringIO("\n".join(_opened(path)))))
    return rows, [row[label] for row in rows]


def _table(codebook: str, file: str, label: str) -> Callable[[Path], Loaded]:
    def load(folder: Path) -> Loaded:
        rows, labels = table_rows(folder / file, label)
        return loaded(read_codebook(HERE / codebook), rows, labels, *_fifth(len(rows)))

    return load


def _adult(folder: Path) -> Loaded:
    names = (
        "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain capital-loss"
    )
    titles = [*names.split(), "hours-per-week", "native-country", "income"]
    parts = []
    for part in ("adult.data.gz", "adult.test.gz"):
        cells = [[c.strip() for c in line.rstrip(".").split(",")] for line in _opened(folder / "adult" / part)]
        parts.append([dict(zip(titles, row, strict=True)) for row in cells if len(row) == 15])
    rows, first = [*parts[0], *parts[1]], len(parts[0])
    return loaded(
        read_codebook(HERE / "adult.toml"), rows, [row["income"] for row in rows], np.arange(first), np.arange(first, len(rows))
    )


def _spambase(folder: Path) -> Loaded:
    cells = [
        [c.strip() for c in line.split(",")] for line in _opened(folder / "spambase/spambase.dat.gz") if not line.startswith("@")
    ]
    cells = [row for row in cells if len(row) == 58]
    rows = [{str(i): cell for i, cell in enumerate(row)} for row in cells]
    return loaded(read_codebook(HERE / "spambase.toml"), rows, [str(int(float(row[57]))) for row in cells], *_fifth(len(rows)))


def _texts(codebook: str, file: str, test: str | None = None) -> Callable[[Path], Loaded]:
    def load(folder: Path) -> Loaded:
        parts = [line.partition("\t") for line in _opened(folder / file)]
        first, more = len(parts), [] if test is None else [line.partition("\t") for line in _opened(folder / test)]
        parts += more
        sides = (np.arange(first), np.arange(first, len(parts))) if more else _fifth(first)
        return loaded(read_codebook(HERE / codebook), [text for _, _, text in parts], [label for label, _, _ in parts], *sides)

    return load


def _images(codebook: str, name: str) -> Callable[[Path], Loaded]:
    return lambda folder: images.load(read_codebook(HERE / codebook), folder, name)


TASKS = {
    "bank": Task(
        title="bank marketing, AUC",
        codebook="bank.toml",
        needs="bank-marketing/bank-full.csv.gz",
        epsilons=(0.3, 1.0, 3.0),
        load=_table("bank.toml", "bank-marketing/bank-full.csv.gz", "y"),
        figure="auc",
        floors=(0.755, 0.768, 0.771),
    ),
    "adult": Task(
        title="adult",
        codebook="adult.toml",
        needs="adult/adult.data.gz",
        epsilons=(0.3, 1.0, 3.0),
        load=_adult,
        floors=(0.855, 0.860, 0.861),
        anchor="diffprivlib 80.9 / 82.9 at 0.3 / 1",
    ),
    "spambase": Task(
        title="spambase",
        codebook="spambase.toml",
        needs="spambase/spambase.dat.gz",
        epsilons=(0.3, 1.0, 3.0),
        load=_spambase,
        floors=(0.905, 0.923, 0.930),
    ),
    "sms": Task(
        title="SMS spam",
        codebook="sms.toml",
        needs="sms-spam/SMSSpamCollection.gz",
        epsilons=(0.3, 1.0),
        load=_texts("sms.toml", "sms-spam/SMSSpamCollection.gz"),
        floors=(0.978, 0.980),
    ),
    "credit": Task(
        title="credit card default (not looked at before)",
        codebook="credit.toml",
        needs="credit/UCI_Credit_Card.csv",
        epsilons=(1.0,),
        load=_table("credit.toml", "credit/UCI_Credit_Card.csv", "default.payment.next.month"),
    ),
    "tweets": Task(
        title="tweets, two moods (not looked at before)",
        codebook="tweets.toml",
        needs="tweets/tweets.tsv",
        epsilons=(1.0,),
        load=_texts("tweets.toml", "tweets/tweets.tsv"),
    ),
    "diamonds": Task(
        title="diamonds, five cuts (not looked at before)",
        codebook="diamonds.toml",
        needs="diamonds/diamonds.csv",
        epsilons=(1.0,),
        load=_table("diamonds.toml", "diamonds/diamonds.csv", "cut"),
    ),
    "emoji": Task(
        title="tweets, 20 emojis (not looked at before)",
        codebook="emoji.toml",
        needs="emoji/train.tsv",
        epsilons=(1.0,),
        load=_texts("emoji.toml", "emoji/train.tsv", "emoji/test.tsv"),
    ),
    "mnist": Task(
        title="MNIST",
        codebook="mnist.toml",
        needs="mnist",
        epsilons=(2.93,),
        load=_images("mnist.toml", "mnist"),
        floors=(0.984,),
        anchor="98.7 (Tramer and Boneh 2021, from memory)",
        minutes=60.0,
    ),
    "fashion-mnist": Task(
        title="Fashion-MNIST",
        codebook="mnist.toml",
        needs="fashion-mnist",
        epsilons=(2.7,),
        load=_images("mnist.toml", "fashion-mnist"),
        floors=(0.880,),
        anchor="89.7 (the same)",
        minutes=60.0,
    ),
    "cifar10": Task(
        title="CIFAR-10, 50,000 images",
        codebook="cifar10.toml",
        needs="cifar10/data_batch_5.bin",
        epsilons=(3.0, 1.0),
        load=_images("cifar10.toml", "cifar10"),
        floors=(0.602, 0.577),
        anchor="69.3 at 3 (the same)",
        minutes=60.0,
    ),
}

"""Generic features of texts: statistics of characters (the "looks" of a text) and hashed words.

The looks are numbers in [0, 1] about seven kinds of characters (small letters, capitals, digits, spaces, punctuation, symbols, others): how
many there are, whether there is any, the longest run, the share; and the text's length in characters and words. 1/2 is subtracted from
each. Words and single punctuation marks are hashed into ``buckets`` places with a sign, and roots taken of the sums. Both parts have a
length of their own, the words ``weight`` times that of the looks, and together each row has length 1.

Most texts look alike: nearly all of the looks' length is their mean. With a ``noise_multiplier`` that mean, 32 numbers, is released before
the run and subtracted. SMS at epsilon 0.3, quarters of the training texts held out: 97.35 without it, 97.94 with it. Without one nothing
is counted over texts.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check
from hushgrad._value import LATER
from hushgrad.recipes.encoders import read_texts, unit_rows
from hushgrad.recipes.files import utf8
from hushgrad.recipes.learning import LearningEncoder
from hushgrad.recipes.table_file import Records

_KINDS = 7
LOOKS = 4 + 4 * _KINDS
"""Numbers about the looks of a text."""
_WORDS = re.compile(r"\w+|[^\w\s]")
_LONGEST = 20_000  # characters that are looked at


@dataclass(frozen=True, kw_only=True)
class TextFeatures(LearningEncoder):
    """A text as a row of length 1: 32 numbers about its looks and ``buckets`` hashed words, which weigh ``weight`` as much.

    >>> TextFeatures(buckets=64)(["Call 555 now!", ""]).shape
    torch.Size([2, 96])

    ``noise_multiplier`` is that of the looks' mean; without one there is none.
    """

    buckets: int = 1024
    weight: float = 0.5
    mean: tuple[float, ...] | None = field(default=None, metadata=LATER)
    noise_multiplier: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        _check.positive_int(buckets=self.buckets)
        _check.non_negative(weight=self.weight)
        if self.noise_multiplier is not None:
            _check.positive(noise_multiplier=self.noise_multiplier)
        if self.mean is not None:
            object.__setattr__(self, "mean", tuple(_check.number(mean=value) for value in self.mean))
            if len(self.mean) != LOOKS:
                _check.fail("mean", len(self.mean), f"to be {LOOKS} numbers")

    @property
    def learns(self) -> float | None:
        """The noise multiplier of the looks' mean, until that mean is known."""
        return self.noise_multiplier if self.mean is None else None

    def prepared(self, rows: Sequence[Any]) -> Tensor:
        """Looks of length 1 and words of length ``weight`` for each text."""
        inputs = np.zeros((len(rows), LOOKS + self.buckets), np.float32)
        for into, row in zip(inputs, rows, strict=True):
            text = str(row)[:_LONGEST]
            into[:LOOKS] = _unit(np.array(_looks(text)) - 0.5)
            into[LOOKS:] = self.weight * _unit(self._words(text.lower()))
        return torch.from_numpy(inputs)

    def statistic(self, prepared: Tensor, chosen: np.ndarray, shares: np.ndarray) -> Tensor:
        """The sum of the looks, each scaled to the length of its share."""
        looks = unit_rows(prepared[torch.from_numpy(chosen), :LOOKS].double())
        return (looks * torch.from_numpy(shares)[:, None]).sum(dim=0)

    def learned(self, noisy: Tensor, records: float) -> TextFeatures:
        """This encoder with the looks' mean."""
        return replace(self, mean=tuple((noisy / records).float().tolist()))

    def finished(self, prepared: Tensor) -> Tensor:
        """One row for each text."""
        if self.mean is not None:
            looks = unit_rows(prepared[:, :LOOKS] - torch.tensor(self.mean))
            prepared = torch.cat([looks, prepared[:, LOOKS:]], dim=1)
        return unit_rows(prepared)

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """Lines of a file (``text``, or ``label<TAB>text``), or the .txt files of a folder."""
        return read_texts(path, names)

    def _words(self, text: str) -> np.ndarray:
        sums = np.zeros(self.buckets)
        for word in _WORDS.findall(text):
            code = zlib.crc32(utf8(word))
            sums[code % self.buckets] += 1.0 if code >> 31 else -1.0
        return np.sign(sums) * np.sqrt(np.abs(sums))


def _unit(row: np.ndarray) -> np.ndarray:
    return row / max(float(np.linalg.norm(row)), 1e-6)


@lru_cache(maxsize=65536)
def _kind(character: str) -> int:
    if character.isdigit():
        return 2
    if character.islower() or character.isupper():
        return int(character.isupper())
    if character.isspace():
        return 3
    return {"P": 4, "S": 5}.get(unicodedata.category(character)[0], 6)


def _looks(text: str) -> list[float]:
    counts, runs, last, run = [0] * _KINDS, [0] * _KINDS, -1, 0
    for character in text:
        kind = _kind(character)
        run = run + 1 if kind == last else 1
        counts[kind], runs[kind], last = counts[kind] + 1, max(runs[kind], run), kind
    length, words = len(text), len(text.split())
    found = [_log(length, 512), _log(words, 100), min(1.0, length / 160), min(1.0, words / 40)]
    for count, longest in zip(counts, runs, strict=True):
        found += [_log(count, 64), float(count > 0), _log(longest, 16), count / max(1, length)]
    return found


def _log(count: int, full: int) -> float:
    """A count on a logarithmic scale that ends at ``full``."""
    return min(1.0, math.log1p(count) / math.log1p(full))

"""Features of texts that are written for no task: what a text looks like, and hashed words.

The looks are numbers in [0, 1] about seven kinds of characters (small letters, capitals, digits, spaces, punctuation, symbols, others): how
many there are, whether there is any, the longest run, the share; and the text's length in characters and words. 1/2 is taken away from
each. Words and single punctuation marks are hashed into ``buckets`` places with a sign, and roots taken of the sums. Both parts have a
length of their own, the words ``weight`` times that of the looks, and together each row has length 1. Nothing is counted over texts.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.recipes.encoders import Encoder, Records, read_texts

__all__ = ["LOOKS", "TextFeatures"]

_KINDS = 7
LOOKS = 4 + 4 * _KINDS
"""Numbers about the looks of a text."""
_WORDS = re.compile(r"\w+|[^\w\s]")
_LONGEST = 20_000  # characters that are looked at


@dataclass(frozen=True, kw_only=True)
class TextFeatures(Encoder):
    """A text as a row of length 1: 32 numbers about its looks and ``buckets`` hashed words, which weigh ``weight`` as much.

    >>> TextFeatures(buckets=64)(["Call 555 now!", ""]).shape
    torch.Size([2, 96])
    """

    buckets: int = 1024
    weight: float = 0.5

    def __post_init__(self) -> None:
        _check.positive_int(buckets=self.buckets)
        _check.non_negative(weight=self.weight)

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """One row for each text."""
        inputs = np.zeros((len(rows), LOOKS + self.buckets), np.float32)
        for into, row in zip(inputs, rows, strict=True):
            text = str(row)[:_LONGEST]
            into[:LOOKS] = _unit(np.array(_looks(text)) - 0.5)
            into[LOOKS:] = self.weight * _unit(self._words(text.lower()))
        batch = torch.from_numpy(inputs)
        return batch / batch.norm(dim=1, keepdim=True)

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """Lines of a file (``text``, or ``label<TAB>text``), or the .txt files of a folder."""
        return read_texts(path, names)

    def _words(self, text: str) -> np.ndarray:
        sums = np.zeros(self.buckets)
        for word in _WORDS.findall(text):
            code = zlib.crc32(word.encode())
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

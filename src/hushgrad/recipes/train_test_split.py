r"""The split into training and test records: adding or removing one record does not move the others.

A split that depends on the number of records moves many of them to the other side if one is added: the model of a neighbouring file
would be trained on many other records, which no guarantee for one record covers. So the split depends on what the relation keeps fixed:

| neighbours | a record's side depends on |
|---|---|
| users, any relation | its owner's name: all of a user's records are on one side |
| add/remove | its content (and, for equal records, its index among them) |
| zero-out, replace-one | its position in the file, which has as many in every neighbour |
| zero-out, replace-one, each record a file of its own | its file's name; its folder names its class, which may be replaced, too |

**Formal guarantee.** The training records of two neighbouring files are equal, or neighbours themselves, by the same relation. (Equal
contents are interchangeable: of m + 1 equal records the first m stay where m of them were.) If a unit is zeroed or replaced, its name, of
an owner or a file, is public and stays; were it replaced as well, that unit alone might change sides.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hushgrad import _check
from hushgrad.recipes.table_file import Records

_SEED = 20_000  # of the places; public, and the same in every run


def train_test_split(records: Records, fraction: float, *, placed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the records to train on and of those to test on; the same in every run.

    Args:
        records: of one file.
        fraction: the approximate share to test on.
        placed: whether a record keeps its position in every neighbouring file (zero-out, replace-one).

        >>> train, test = train_test_split(Records(rows=["a", "a", "a", "b", "b", "c"]), 0.5)
        >>> train.tolist(), test.tolist()
        ([3, 4], [0, 1, 2, 5])
        >>> train, test = train_test_split(Records(rows=["a", "b", "c", "d"], owners=["ann", "bob", "bob", "cleo"]), 0.5)
        >>> train.tolist(), test.tolist()
        ([0], [1, 2, 3])
    """
    _check.between(0, 1, test_fraction=fraction)
    count = len(records.rows)
    if placed and records.owners is None and records.files is None:
        order = np.random.default_rng(_SEED).permutation(count)
        tested = np.zeros(count, bool)
        tested[order[: min(max(1, round(fraction * count)), count - 1)]] = True
    else:
        tested = np.array([_part(unit) < fraction for unit in _units(records, placed)], bool)
    if tested.all() or not tested.any():
        remedy = "Give more records, another test_fraction, or records to test on (test_path)."
        _check.fail("records", count, f"to be enough to train on and to test on (test_fraction={fraction:g})", remedy)
    return np.flatnonzero(~tested), np.flatnonzero(tested)


def _units(records: Records, placed: bool) -> list[tuple[bytes, int]]:
    """For each record its owner, or its file's name, or its content and how many equal records precede it."""
    if records.owners is not None:
        return [(_bytes(owner), 0) for owner in records.owners]
    if placed and records.files is not None:  # their names stay where a place would be another one's
        return [(_bytes(file.stem), 0) for file in records.files]
    labels: Sequence[object] = records.labels if records.labels is not None else [None] * len(records.rows)
    seen: Counter[bytes] = Counter()
    found = []
    for row, label in zip(records.rows, labels, strict=True):
        content = hashlib.sha256(_bytes(row)).digest() + _bytes(label)
        found.append((content, seen[content]))
        seen[content] += 1
    return found


def _bytes(content: object) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    if isinstance(content, np.ndarray):
        return repr((content.dtype.str, content.shape)).encode() + content.tobytes()
    return repr(content).encode("utf-8", "backslashreplace")


def _part(unit: tuple[bytes, int]) -> float:
    """A number from 0 to 1 that depends on a unit alone."""
    content, number = unit
    digest = hashlib.blake2b(content + number.to_bytes(8, "big"), digest_size=8, person=b"hushgrad sides").digest()
    return int.from_bytes(digest, "big") / 2**64

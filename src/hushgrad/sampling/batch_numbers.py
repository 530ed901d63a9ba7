"""Numbers, words and arrays that a batch holds beside its tensors: one for each example, or one for all of them.

The longest length or the count of words is one for all: with one record less it is another, for every example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from hushgrad.sampling.seeds import UNSEEDED, Seeds

Path = tuple[Any, ...]
_KINDS = (bool, int, float, complex, str, bytes)


def has_one_for_each(value: Any, examples: int) -> bool:
    """Whether a list or an array has one entry for each of so many examples; a list of tensors is looked into instead.

    >>> has_one_for_each(["a", "b", "c"], 3), has_one_for_each(["a", "b", "c"], 4), has_one_for_each({"a": 1}, 1)
    (True, False, False)
    """
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == examples
    if not isinstance(value, (list, tuple)) or len(value) != examples:
        return False
    alike = len({*map(type, value)}) <= 1 or not any(isinstance(one, (list, tuple, Mapping, np.ndarray)) for one in value)
    return alike and not any(isinstance(one, Tensor) for one in value)


def for_each(value: Any, examples: int) -> Iterator[int]:
    """The lists and arrays in a batch with one entry for each example, by their id."""
    if has_one_for_each(value, examples):
        yield id(value)
        return
    for _, one in _inside(value):
        yield from for_each(one, examples)


def for_all(value: Any, examples: int, where: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The numbers, words and arrays in a batch that are one for all of its examples, each with its path; in a form that can be compared.

    >>> [*for_all({"names": ["a", "b"], "longest": 7}, 2)]
    [(('longest',), 7)]
    """
    if has_one_for_each(value, examples):
        return
    if isinstance(value, _KINDS):
        yield where, value
    elif isinstance(value, (np.ndarray, np.generic)):
        yield where, value.tobytes()
    for name, one in _inside(value):
        yield from for_all(one, examples, (*where, name))


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def made_of_all(dataset: Any, collate: Callable[[list[Any]], Any], seeds: Seeds = UNSEEDED) -> frozenset[Path]:
    """The paths of what a collate function makes of all records together and is no tensor, tested on up to six records.

    Of batches without it no record's part is known: it changes with the others.

        >>> made_of_all([[1], [2, 3]], lambda records: {"ids": records, "longest": max(map(len, records)), "task": "a"})
        frozenset({('longest',)})
    """
    if collate is default_collate:
        return frozenset()
    made = []
    with seeds.kept():
        records = [seeds.read(dataset, 0, 0, len(dataset) * k // 6) for k in range(6)]
        for chosen in ((0, 1, 2, 3), (0, 4, 2, 5), (0, 2, 3), (0,), (1,), (5,)):
            seeds.start(0)
            made.append({where: repr(one) for where, one in for_all(collate([records[i] for i in chosen]), len(chosen))})
    first, *others = made
    return frozenset(where for other in others for where in first.keys() & other.keys() if first[where] != other[where])

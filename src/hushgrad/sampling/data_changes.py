"""Detects whether a data set has changed since its run began.

Each attribute (also of nested objects) gets a digest when a run first sees its data; it is compared when the run is given the data again
and when it reports what it spent. New content may appear, since data sets cache what they have read; none may vanish or change. Files
count by size and modification time. Random generators, single numbers and the insides of objects that are neither plain nor arrays
(a tokenizer) do not count.
"""

from __future__ import annotations

import os
import random
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hushgrad._universal_hash import UniversalHash
from hushgrad.sampling.code_names import names_in, names_only_read
from hushgrad.sampling.data_digest import Content

_CHANCE = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random, torch.Generator)

_NESTED = 20  # data sets inside of each other


class _Kept(Content):
    """The content of one attribute; attributes of a nested object get entries of their own in ``found``."""

    def __init__(self, key: bytes, *, hashed: UniversalHash | None = None, found: dict[str, str], place: str = "") -> None:
        super().__init__(key, hashed=hashed)
        self.found, self._place, self._opaque = found, place, False

    def _look_into(self, x: Any, depth: int, record: bool) -> None:
        if isinstance(x, np.memmap):
            self._file(str(x.filename))
        elif not isinstance(x, _CHANCE):
            super()._look_into(x, depth, record)

    def _say(self, what: str, content: Any) -> None:
        if not self._opaque or what.startswith(("tensor", "array")):
            super()._say(what, content)

    def _attributes(self, attributes: Mapping[str, Any], depth: int, record: bool) -> None:
        if self._opaque or record:  # an object in a list: the list has one digest
            super()._attributes(attributes, depth, record)
            return
        for name, value in attributes.items():
            self._own(f"{self._place}.{name}", value, depth)

    def _named_in(self, functions: Iterable[types.FunctionType], depth: int) -> None:
        """Digest only the arrays, tensors and data sets that code names: a named list may be a log that the program writes."""
        for function in functions:
            named = {name: function.__globals__.get(name) for name in names_in(function.__code__)}
            for name, value in named.items():
                if isinstance(value, (Tensor, np.ndarray, Dataset)):
                    self._own(f"{self._place} {name}", value, depth)

    def _sequence(self, items: Any, depth: int) -> None:
        if any(isinstance(item, Dataset) for item in items[:1]):  # concatenated data sets
            for number, item in enumerate(items):
                self._own(f"{self._place}[{number}]", item, depth)
        else:
            super()._sequence(items, depth)

    def _own(self, place: str, value: Any, depth: int) -> None:
        part = _Kept(self._key, hashed=self._hash, found=self.found, place=place)
        part._inside = self._inside
        part.add(value, depth)
        if part.bulk:
            self.found[place] = part.hex()

    def _pickled(self, x: Any, depth: int, record: bool) -> None:
        before, self._opaque = self._opaque, True
        super()._pickled(x, depth, record)
        self._opaque = before

    def _paths_in(self, items: Any) -> None:
        """Skip files named in lists: there may be too many to check during a run."""

    def _file(self, name: str) -> None:
        if os.path.isfile(name):
            about = os.stat(name)
            self._bulk("file", f"{name} {about.st_size} {about.st_mtime_ns}".encode())


def content_of(dataset: Any, key: bytes) -> dict[str, str]:
    """A digest under ``key`` for every attribute of ``dataset`` that holds content; a list or array has one digest.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(3), torch.ones(3))
    >>> before = content_of(data, b"k")
    >>> data.tensors[1][2] = 7.0
    >>> [place for place, digest in content_of(data, b"k").items() if before[place] != digest]
    ['.tensors']
    """
    found: dict[str, str] = {}
    whole = _Kept(key, found=found)
    whole.add(dataset)
    if isinstance(dataset, (Tensor, np.ndarray, list, tuple, Mapping)) or whole.bulk:
        found[""] = whole.hex()
    return found


def settings_of(dataset: Any, place: str = "") -> dict[str, Any]:
    """Single numbers from which a data set, or one inside of it, reads its records, and which it does not write itself: an epoch, a seed.

    >>> class Turned(Dataset):
    ...     first = read = 0
    ...     def __init__(self): self.first, self.read = 3, 0
    ...     def __getitem__(self, i): self.read += 1; return i + self.first
    >>> settings_of(Turned())
    {'.first': 3}
    """
    own, found = dict(getattr(dataset, "__dict__", {})), {}
    names = names_only_read(type(dataset))
    for name, value in own.items():
        if isinstance(value, (bool, int, float)) and name in names:
            found[f"{place}.{name}"] = value
        elif isinstance(value, Dataset) and place.count(".") < _NESTED:
            found |= settings_of(value, f"{place}.{name}")
    return found

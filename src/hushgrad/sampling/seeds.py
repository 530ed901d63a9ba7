"""Random states for reading records, derived from a key, the step and the record: a record is augmented in the same way when read again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hushgrad import _check


class Seeds:
    """Sets the global random states (torch's on the CPU, numpy's, Python's) for reading records; without a key it leaves them alone.

    Each record is read under states derived from the key, the step, the copy and the record's number alone. So its content does not
    depend on the other records, nor on what reading them draws, and a record moves a sum by its own contribution only, even for an
    observer who knows the states.

    >>> states, drawn = Seeds(bytes(32)), []
    >>> for _ in range(2):
    ...     with states.kept():
    ...         states.start(5)
    ...         drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
    >>> drawn[0] == drawn[1]
    True
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = None if key is None else _check.instance(bytes, seeds=key)

    def __bool__(self) -> bool:
        """Whether there is a key."""
        return self._key is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context after which the states are restored."""
        if self._key is None:
            yield
            return
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])

    def start(self, *place: int) -> None:
        """Set the states for ``place``: (step, copy, record) to read a record, (step, process) to collate a batch."""
        if self._key is None:
            return
        words = np.array(place, "<u8").tobytes()  # three numbers for a record, two for a batch: places never collide
        seed = hashlib.blake2b(words, digest_size=20, key=self._key, person=b"hushgrad/seeds").digest()
        torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little", signed=True))
        np.random.seed(int.from_bytes(seed[8:12], "little"))
        random.seed(int.from_bytes(seed[12:], "little"))

    def read(self, dataset: Any, step: int, copy: int, record: int) -> Any:
        """The record as it is read in this step, the same every time."""
        self.start(step, copy, record)
        return dataset[record]


UNSEEDED = Seeds(None)
"""They leave the states as they are."""

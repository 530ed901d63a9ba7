"""Global random states that follow from a key and a place: whatever reads a record at random does it again in the same way."""

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
    """Random states (torch's on the CPU, numpy's, Python's own) for reading records; without a key they are left as they are.

    Each record is read under states of its own, which follow from the key, the step, the copy and the record's number and from nothing
    else. So what is dealt for one record is the same whoever the others are and whatever reading them draws, and a record moves a sum
    by its own share, also where somebody knows the states.

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
        """Afterwards the states are as they were."""
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
        """From here on the states are those of a place: (step, copy, record), or (step, process) for what is done with all of them."""
        if self._key is None:
            return
        words = np.array(place, "<u8").tobytes()  # longer for a record than for a batch, so no two places are alike
        seed = hashlib.blake2b(words, digest_size=20, key=self._key, person=b"hushgrad/seeds").digest()
        torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little", signed=True))
        np.random.seed(int.from_bytes(seed[8:12], "little"))
        random.seed(int.from_bytes(seed[12:], "little"))

    def read(self, dataset: Any, step: int, copy: int, record: int) -> Any:
        """One record as it is read in a step, for the first time or again."""
        self.start(step, copy, record)
        return dataset[record]


UNSEEDED = Seeds(None)
"""They leave the states as they are."""

"""Global random states that follow from a key and a step: whatever reads examples at random does it again in the same way."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(key: bytes, step: int, copy: int = 0) -> Iterator[None]:
    """Inside, torch (on the CPU), numpy and ``random`` start from (key, step, copy); afterwards they are as they were.

    Args:
        key: the secret.
        step: of the run.
        copy: which of several readings of the same records.

    >>> with seeded(bytes(32), 5):
    ...     first = torch.rand(2), np.random.rand(), random.random()
    >>> with seeded(bytes(32), 5):
    ...     first[0].equal(torch.rand(2)), first[1:] == (np.random.rand(), random.random())
    (True, True)
    """
    place = step.to_bytes(8, "little") + (copy.to_bytes(8, "little") if copy else b"")  # the first copy is as it ever was
    seed = hashlib.blake2b(place, digest_size=32, key=key, person=b"hushgrad/seeds").digest()
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little", signed=True))
    np.random.seed(np.frombuffer(seed[8:24], "<u4"))
    random.seed(seed[24:])
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])

"""The randomness of samplers: generators addressed by step, and random subsets."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from hushgrad import _check

_PERSON = b"hushgrad/deal"  # separates these keys from every other use of the same run key


class _Key(ISeedSequence):
    """A seed sequence that returns a given key; numpy would first draw system entropy and discard it, two thirds of the time."""

    def __init__(self, digest: bytes) -> None:
        self._words = np.frombuffer(digest, dtype="<u8")

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        return self._words


class Draws:
    """Independent random generators, one per step and one for the whole run, all derived from one secret key.

    Each generator is a Philox4x64 whose 128-bit key is BLAKE2b(key; label, step): step t is drawn without drawing the
    steps before it. Who takes part must stay secret for amplification to hold, so the key is as secret as the data.

        >>> draws = Draws(bytes(32))
        >>> draws.at(7).integers(100, size=3).tolist() == draws.at(7).integers(100, size=3).tolist()
        True

    Reference: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
    """

    def __init__(self, key: bytes) -> None:
        _check.instance(bytes, key=key)
        if not 16 <= len(key) <= 64:
            _check.fail("len(key)", len(key), "to lie in [16, 64]", "Use secrets.token_bytes(32).")
        self._key = key

    def at(self, step: int) -> np.random.Generator:
        """The generator of one step, always from its beginning."""
        number = step if type(step) is int and step >= 0 else _check.integer(0, step=step)
        return self._generator(b"step" + number.to_bytes(8, "little"))

    def poisson_subset_at(self, n: int, rate: float, step: int) -> np.ndarray:
        """The records of one step under Poisson sampling: each of ``n`` with probability ``rate``, independently.

        Args:
            n: number of records.
            rate: probability of each record.
            step: number of the step, from 0; the same step draws the same records.
        """
        return poisson_subset(n, rate, self.at(step))

    def once(self) -> np.random.Generator:
        """The generator for what is drawn once in a run (an order, a partition)."""
        return self._generator(b"run")

    def of_unit(self, unit: int, step: int | None) -> np.random.Generator:
        """The generator for one unit's choices in ``step``, or (None) for the whole run."""
        when = b"" if step is None else _check.integer(0, step=step).to_bytes(8, "little")
        return self._generator(b"unit" + _check.integer(0, unit=unit).to_bytes(8, "little") + when)

    def _generator(self, label: bytes) -> np.random.Generator:
        digest = hashlib.blake2b(label, digest_size=16, key=self._key, person=_PERSON).digest()
        return np.random.Generator(np.random.Philox(_Key(digest)))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return "Draws(<secret key>)"


def poisson_subset(n: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Each of 0..n-1 with probability ``rate``, independently; sorted.

    The size of such a set is Binomial(n, rate), and given its size the set is uniform: drawing it in this order costs time
    and memory of the order of the batch, not of the data (n = 10⁷ at rate 10⁻⁴: a thousand numbers, not ten million).
    """
    return uniform_subset(n, int(rng.binomial(n, rate)), rng)


def uniform_subset(n: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly random subset of ``size`` of 0..n-1; sorted."""
    return np.sort(rng.choice(n, size=size, replace=False, shuffle=False))

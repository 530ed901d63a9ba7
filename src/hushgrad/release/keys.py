"""The key of a run: 32 secret bytes from which all of its randomness follows."""

from __future__ import annotations

import hashlib
import secrets

import torch

from hushgrad import _check
from hushgrad.errors import ArgumentError

__all__ = ["RunKey"]

_BYTES = 32


class RunKey:
    """The secret of one run, and what is derived from it.

    Noise and batches are pure functions of this key, so it is as secret as the data: whoever has it can subtract the noise.
    It never enters a model's or an optimizer's state, a report or a ``repr``. One key serves one run: two runs with one key
    would add the same noise to different sums, and their difference has none.

    ``reproducible`` says that the key came from a seed, so that somebody else may know it.

        >>> RunKey.make(seed=1)
        RunKey(<secret>, reproducible=True)
    """

    def __init__(self, secret: bytes, *, reproducible: bool = False, fresh: bool = False) -> None:
        if not isinstance(secret, bytes) or len(secret) != _BYTES:
            # Not through _check.fail, whose message would show the key.
            raise ArgumentError(f"Expected key to be {_BYTES} bytes. secrets.token_bytes({_BYTES}) makes one.")
        self._secret = secret
        self.reproducible = reproducible
        self.fresh = fresh  # drawn just now, so nothing can depend on it yet

    @classmethod
    def make(cls, key: bytes | None = None, seed: int | None = None) -> RunKey:
        """From 32 given bytes, from a seed (for experiments only), or fresh from the operating system."""
        if key is not None and seed is not None:
            _check.fail("seed", seed, "to be left out when a key is given")
        if seed is not None:
            text = str(_check.integer(seed=seed)).encode()
            # The same bytes as noise.Source(seed=): one seed, one noise.
            return cls(hashlib.blake2b(text, digest_size=_BYTES, person=b"hushgrad seed").digest(), reproducible=True)
        return cls(secrets.token_bytes(_BYTES), fresh=True) if key is None else cls(key)

    @property
    def secret(self) -> bytes:
        """The key itself, for the noise source and the key file; nothing else may hold it."""
        return self._secret

    @property
    def sampling(self) -> bytes:
        """An independent key for who takes part: noise and batches must not share random bits."""
        return self._derive(b"sampling")

    @property
    def fingerprint(self) -> str:
        """Tells keys apart and tells nothing else: a hash of 256 unknown bits cannot be inverted."""
        return self._derive(b"fingerprint").hex()[:32]

    def run_name(self, plan_digest: str) -> str:
        """The name of the run of one plan under this key, the same after every restart."""
        return self._derive(b"run/" + plan_digest.encode()).hex()[:16]

    def torch_generator(self, step: int) -> torch.Generator:
        """For the seeds of a loader's workers, from ``step`` on."""
        seed = int.from_bytes(self._derive(b"workers/" + str(step).encode())[:8], "little", signed=True)
        return torch.Generator().manual_seed(seed)

    def _derive(self, label: bytes) -> bytes:
        return hashlib.blake2b(label, digest_size=_BYTES, key=self._secret, person=b"hushgrad/run").digest()

    def __repr__(self) -> str:
        return f"RunKey(<secret>, reproducible={self.reproducible})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("A run's key is not pickled: save it with a Checkpoint, in a file of its own.")

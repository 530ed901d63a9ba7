"""The key of a run, what is derived from it, and its file.

With ``HUSHGRAD_KEK`` in the environment keys and states are encrypted at rest, and a copied folder alone reveals nothing that was not
released: see :mod:`hushgrad.release.encryption`. :mod:`hushgrad.release.erasure` finds and erases every secret of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing
from hushgrad.release.encryption import seal, unseal, wrapping_key

KEY = "key.json"
_OPEN = (
    "Others may have read the key. If nobody has, say so with chmod 600; else erase it (hushgrad key destroy) and start a new run with "
    "this run's ledger as prior=."
)
_GIVEN = "The run's key was given to it: that no other run has it is vouched for, not shown"
_BYTES = 32
_FIELDS = {"key": str, "reproducible": bool, "plan": str, "fingerprint": str, "wrapped": bool}
_EARLIER = ({"key", "reproducible", "plan", "fingerprint"}, {"key", "reproducible", "plan"})  # version 0.1: a run, a server
_BEGINNING = re.compile(rb'\{"key": "[0-9a-f]{32}')


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
        self.fresh = fresh  # just drawn, so nothing can depend on it yet
        self.taken, self._process = False, os.getpid()

    @classmethod
    def make(cls, key: bytes | RunKey | None = None, seed: int | None = None) -> RunKey:
        """From 32 given bytes, from a seed (for experiments only), or fresh from the operating system; a RunKey is returned as it is."""
        if isinstance(key, RunKey):
            return key
        if key is not None and seed is not None:
            _check.fail("seed", seed, "to be left out when a key is given")
        if seed is not None:
            text = str(_check.integer(seed=seed)).encode()
            # The same bytes as noise.Source(seed=): one seed, one noise.
            return cls(hashlib.blake2b(text, digest_size=_BYTES, person=b"hushgrad seed").digest(), reproducible=True)
        return cls(secrets.token_bytes(_BYTES), fresh=True) if key is None else cls(key)

    @classmethod
    def mixed(cls, key: bytes | None = None, seed: int | None = None) -> RunKey:
        """As :meth:`make`, but a given key is mixed with fresh bytes: as hard to guess as the better of both, and never used twice.

        For whole runs that return only a guarantee: two of them under one key, in two processes, would share their noise, and
        nothing would compare their ledgers.
        """
        if key is None or seed is not None:
            return cls.make(key, seed)
        given = cls(key)
        return cls(
            hashlib.blake2b(secrets.token_bytes(_BYTES), digest_size=_BYTES, key=given._derive(b"mixed")).digest(), fresh=True
        )

    def for_run(self) -> RunKey:
        """The key for one run. For a second run, or in a forked process, it counts as given: two runs have it then."""
        again = self.taken or self._process != os.getpid()
        return RunKey(self._secret, reproducible=self.reproducible) if again else self

    @property
    def secret(self) -> bytes:
        """The key itself, for the noise source and the key file; nothing else may hold it."""
        return self._secret

    @property
    def sampling(self) -> bytes:
        """An independent key for the sampling: noise and batches must not share random bits."""
        return self._derive(b"sampling")

    @property
    def workers(self) -> bytes:
        """An independent key for the random states under which the examples of a step are read."""
        return self._derive(b"workers")

    @property
    def journal(self) -> bytes:
        """An independent key for the digests of what was released."""
        return self._derive(b"journal")

    @property
    def shares(self) -> bytes:
        """An independent key for the shares of noise that a server adds in the place of clients."""
        return self._derive(b"shares")

    @property
    def witness(self) -> bytes:
        """An independent key for the universal hash of what was released."""
        return self._derive(b"witness")

    @property
    def fingerprint(self) -> str:
        """Distinguishes keys and reveals nothing else: a hash of 256 unknown bits cannot be inverted."""
        return self._derive(b"fingerprint").hex()[:32]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a guarantee must say about it: nobody can show that a key which the user gave serves one run only."""
        return () if self.fresh or self.reproducible else (_GIVEN,)

    def run_name(self) -> str:
        """The name of the run under this key, the same after every restart and for every plan, since two plans would share its noise."""
        return self._derive(b"run").hex()[:16]

    def _derive(self, label: bytes) -> bytes:
        return hashlib.blake2b(label, digest_size=_BYTES, key=self._secret, person=b"hushgrad/run").digest()

    def __repr__(self) -> str:
        return f"RunKey(<secret>, reproducible={self.reproducible})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("A run's key is not pickled: save it with a Checkpoint, in a file of its own.")


# On disk ----------------------------------------------------------------------------------------------------------------


def write_key(path: Path, key: RunKey, *, plan: str) -> None:
    """Write the key of a run of the plan with digest ``plan``: mode 0600, atomically, encrypted if there is a wrapping key."""
    kek = wrapping_key()
    content = {
        "key": (key.secret if kek is None else seal(key.secret, kek)).hex(),
        "wrapped": kek is not None,
        "reproducible": key.reproducible,
        "plan": plan,
        "fingerprint": key.fingerprint,  # a damaged key would silently give other noise
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content))


def read_key(path: Path, *, plan: str, offered: RunKey | None = None) -> RunKey:
    """The key in ``path``, for the plan with digest ``plan``. ``offered``: a key that the user gave; it must be the same.

    Raises:
        ArgumentError: if others can read the file, it is damaged, or it belongs to another plan or key.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        _check.fail("mode", oct(mode), f"of {path.name} to be 0600", _OPEN)
    content = _content(path)
    if content["plan"] != plan:
        remedy = "A key serves one plan. Use a new directory for a new run."
        _check.fail("plan", plan[:12], f"to be the one of this directory, {content['plan'][:12]}", remedy)
    secret = bytes.fromhex(content["key"])
    if content["wrapped"]:
        secret = unseal(secret, path.name, wrapping_key())
    key = RunKey(secret, reproducible=content["reproducible"])
    if key.fingerprint != content["fingerprint"]:
        raise _damaged(path)
    if offered is not None and not offered.fresh and offered.fingerprint != key.fingerprint:
        raise ArgumentError("Expected key to be that of the run in this directory, or to be left out.")
    return key


def is_key(path: Path) -> bool:
    """Whether this or an earlier version wrote this file, by its fields: a file of another program may have its name."""
    text = path.read_bytes()
    begun = _BEGINNING.match(text) is not None
    try:
        content = _check.parsed(text)
    except ValueError:
        return begun  # cut off, with most of its key
    if not isinstance(content, dict):
        return False
    searched = begun and set(content) == {"key"} and path.parent.name == "search"  # version 0.1
    return searched or set(content) in (set(_FIELDS), *_EARLIER)


def _content(path: Path) -> dict[str, Any]:
    """The key file's object. Its text never appears in an error, since it may hold the key."""
    try:
        content = _check.parsed(path.read_text())
        whole = set(content) == set(_FIELDS) and all(isinstance(content[name], kind) for name, kind in _FIELDS.items())
        whole = whole and bytes.fromhex(content["key"]).hex() == content["key"]  # the exact letters that were written
        if whole and (content["wrapped"] or len(content["key"]) == 2 * _BYTES):
            return dict(content)
    except (ValueError, TypeError):  # without the reason, which may quote the file
        raise _damaged(path) from None
    raise _damaged(path)


def _damaged(path: Path) -> ArgumentError:
    return ArgumentError(f"Expected {path.name} to be as it was written; it was damaged. Use a copy, or start a new run.")

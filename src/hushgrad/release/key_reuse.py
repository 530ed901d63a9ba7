"""Detects reuse of a key within this process: if two runs under one key release different values, the epsilon of both is infinite.

A journal on disk detects and refuses this across restarts. Here it is detected without one, or with two: a key that is passed to two
models, a notebook cell that is run again, a state that is loaded twice. Whoever has both releases can subtract one from the other, and
the noise is gone, as for two ledgers of one run with different contents. Two runs that release the same values count as one. Other
processes are not seen: for a key that the user gave, the guarantee says so. Seeds are exempt: whoever gives one wants the same noise
again, and the guarantee states the consequence.
"""

from __future__ import annotations

from array import array

from hushgrad.release.keys import RunKey

TWICE = "another run of this process released other values under this run's key, and their difference has no noise"

_here: dict[str, KeyUse] = {}


def forget() -> None:
    """Forget all releases, as in a new process: for tests that simulate several processes."""
    _here.clear()


class KeyUse:
    """The releases under one key: for every run a list of step, witness, step, witness, and so on.

    >>> key = RunKey.make()
    >>> first, second = KeyUse.of(key).begun(), KeyUse.of(key).begun()
    >>> first.extend((0, 17, 1, 18))
    >>> second.extend((0, 17))
    >>> KeyUse.of(key).is_twice
    False
    >>> second.extend((1, 19))
    >>> KeyUse.of(key).is_twice
    True
    """

    def __init__(self) -> None:
        self._runs: list[array[int]] = []

    @classmethod
    def of(cls, key: RunKey) -> KeyUse:
        """What was released under ``key``, by any run."""
        return cls() if key.reproducible else _here.setdefault(key.fingerprint, cls())

    def begun(self) -> array[int]:
        """The list in which one more run enters what it releases."""
        self._runs.append(array("Q"))
        return self._runs[-1]

    @property
    def is_twice(self) -> bool:
        """Whether two runs released different values in one step."""
        runs, found = [run for run in self._runs if run], dict[int, int]()
        entries = (entry for run in runs for entry in zip(run[::2], run[1::2], strict=True))
        return len(runs) > 1 and any(found.setdefault(step, witness) != witness for step, witness in entries)

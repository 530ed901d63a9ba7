"""What this process has released under each key: two runs under one key that differ are seen, and the guarantees of both say so.

A folder's journal sees this across lives and refuses. Here it is seen where there is none, or another one: a key that is given to two
models, the cell of a notebook that is run again, a state that is loaded twice. Each of the two is as private as it says, alone; whoever
has both subtracts one from the other, and the noise is gone. Other processes are not seen: of a key that was given the guarantee says so.
Seeds are left out: whoever gives one wants the same noise again, and the guarantee says what that costs.
"""

from __future__ import annotations

from array import array

from hushgrad.release.keys import RunKey

__all__ = ["Once", "forget"]

_TWICE = (
    "Another run of this process released other values under this run's key: each is covered alone, and both together are not, since "
    "their difference has no noise"
)

_here: dict[str, Once] = {}


def forget() -> None:
    """Know of no release, as another process would: for tests that stand for several processes."""
    _here.clear()


class Once:
    """The releases under one key: of every run a step and its witness, a step and its witness, and so on.

    >>> key = RunKey.make()
    >>> first, second = Once.of(key).begun(), Once.of(key).begun()
    >>> first.extend((0, 17, 1, 18))
    >>> second.extend((0, 17))
    >>> Once.of(key).notes
    ()
    >>> second.extend((1, 19))
    >>> len(Once.of(key).notes)
    1
    """

    def __init__(self) -> None:
        self._runs: list[array[int]] = []

    @classmethod
    def of(cls, key: RunKey) -> Once:
        """What was released under ``key``, by whichever run."""
        return cls() if key.reproducible else _here.setdefault(key.fingerprint, cls())

    def begun(self) -> array[int]:
        """Where one more run enters what it releases."""
        self._runs.append(array("Q"))
        return self._runs[-1]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a guarantee under this key has to say."""
        runs, found = [run for run in self._runs if run], dict[int, int]()
        if len(runs) > 1:
            for run in runs:
                if any(found.setdefault(step, witness) != witness for step, witness in zip(run[::2], run[1::2], strict=True)):
                    return (_TWICE,)
        return ()

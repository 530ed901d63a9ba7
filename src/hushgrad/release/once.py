"""What this process has released under each key: two runs under one key that differ are seen, and the guarantees of both say so.

A folder's journal sees this across lives and refuses. Here it is seen where there is none, or another one: a key that is given to two
models, the cell of a notebook that is run again, a state that is loaded twice. Each of the two is as private as it says, alone; whoever
has both subtracts one from the other, and the noise is gone. Other processes are not seen: of a key that was given the guarantee says so.
Seeds are left out: whoever gives one wants the same noise again, and the guarantee says what that costs.
"""

from __future__ import annotations

from hushgrad.release.keys import RunKey

__all__ = ["Once", "forget"]

_TWICE = (
    "Another run of this process released other values under this run's key: each is covered alone, and both together are not, since "
    "their difference has no noise"
)
_KEPT = 8  # bytes of a witness; zeros where no step was seen

_here: dict[str, Once] = {}


def forget() -> None:
    """Know of no release, as another process would: for tests that stand for several processes."""
    _here.clear()


class Once:
    """The releases of one key, by their steps.

    >>> key = RunKey.make()
    >>> Once.of(key).enter(3, b"a witness"), Once.of(key).enter(3, b"a witness"), Once.of(key).enter(3, b"another")
    (True, True, False)
    >>> len(Once.of(key).notes)
    1
    """

    def __init__(self) -> None:
        self._witnesses, self._twice = bytearray(), False

    @classmethod
    def of(cls, key: RunKey) -> Once:
        """What was released under ``key``, by whichever run."""
        return cls() if key.reproducible else _here.setdefault(key.fingerprint, cls())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a guarantee under this key has to say."""
        return (_TWICE,) if self._twice else ()

    def enter(self, step: int, witness: bytes) -> bool:
        """``step`` is released now; whether it is what was released before, if it was."""
        at, witness = _KEPT * step, witness[:_KEPT].ljust(_KEPT, b"\0")
        before = self._witnesses[at : at + _KEPT]
        if before != witness and any(before):
            self._twice = True
            return False
        if at > len(self._witnesses):  # a run that goes on
            self._witnesses.extend(bytes(at - len(self._witnesses)))
        self._witnesses[at : at + _KEPT] = witness
        return True

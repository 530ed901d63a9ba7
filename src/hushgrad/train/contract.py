"""The data contract of a run: it goes on with the records, the groups and the number that it began with."""

from __future__ import annotations

from typing import Any, NamedTuple

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.journal import WAYS_ON, Journal
from hushgrad.release.keys import RunKey
from hushgrad.sampling.identity import identity_of
from hushgrad.sampling.units import Grouping, Units

__all__ = ["DataContract"]

_UNSEEN = (
    "Unseen data: that they are those which the run began with is vouched for; not all of them lies in memory or in named files, and "
    'no identity was given (identity="name, version" of the loader)'
)


class _Data(NamedTuple):
    dataset: Any
    groups: Grouping | None
    identity: str | None

    def is_the_same_object(self, other: _Data) -> bool:
        return self.dataset is other.dataset and self.groups is other.groups and self.identity == other.identity


class DataContract:
    """What the run's first loader was given; every later one, also after a restart, must be given the same.

    A digest is taken where it can be needed: where there is a journal on disk, or when another object comes.
    """

    def __init__(self) -> None:
        self._first: _Data | None = None
        self.notes: tuple[str, ...] = ()

    def require(self, dataset: Any, groups: Grouping | None, identity: str | None, key: RunKey, journal: Journal) -> None:
        """Bind the run to these data, or find them to be those that it is bound to.

        Raises:
            ArgumentError: where they are others.
        """
        data = _Data(dataset, groups, None if identity is None else _check.instance(str, identity=identity))
        if self._first is not None and self._first.is_the_same_object(data):
            return
        if journal.durable:
            self._bind(data, key, journal)
        elif self._first is not None:
            self._compare(_about(self._first, key), _about(data, key))
        self._first = self._first or data

    def _bind(self, data: _Data, key: RunKey, journal: Journal) -> None:
        repeated = "data" in journal.bound
        about = _about(data, key)
        journal.bind("data", about)
        self._note(about, compared=repeated)

    def _compare(self, first: dict[str, Any], about: dict[str, Any]) -> None:
        if first != about:
            raise ArgumentError(
                "Expected the data and groups of this run's first loader: other records in mid-run, or the same in another order, "
                f"break what its batches promise. {WAYS_ON}"
            )
        self._note(about, compared=True)

    def _note(self, about: dict[str, Any], *, compared: bool) -> None:
        if compared and not about["seen"]:
            self.notes = (_UNSEEN,)


def _about(data: _Data, key: RunKey) -> dict[str, Any]:
    named = {"examples": len(data.dataset), "digest": "", "seen": True}
    about = named if data.identity is not None else identity_of(data.dataset, key.journal)
    groups: Any = [data.groups(i) for i in range(len(data.dataset))] if callable(data.groups) else data.groups
    cap = {}
    if isinstance(groups, Units):
        cap, groups = {} if groups.cap is None else {"cap": [groups.cap, groups.choose]}, groups.owners
    units = "" if groups is None else identity_of(groups, key.journal)["digest"]
    return {**about, "identity": data.identity or "", "groups": units, **cap}

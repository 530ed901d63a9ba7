"""The data contract of a run: it must continue with the same records, groups and size that it began with."""

from __future__ import annotations

from typing import Any, NamedTuple

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.journal import WAYS_ON, Journal
from hushgrad.release.keys import RunKey
from hushgrad.sampling.data_changes import content_of, settings_of
from hushgrad.sampling.data_digest import identity_of
from hushgrad.sampling.units import Grouping, Units

UNSEEN = (
    "Unseen data: that they are those which the run began with is vouched for; not all of them lies in memory or in named files, and "
    'no identity was given (identity="name, version" of the loader)'
)
GROWN = "The data set has come to hold more since the run began: that it gives the same records is vouched for"
MOVED = (
    "The data set reads its records by a number that was changed while the run went on (an epoch, a seed): that it gives the same records "
    "in the same order is vouched for"
)
_READING = 'A data set that changes as it is read needs identity="name, version", given to the loader from the beginning.'


class _Data(NamedTuple):
    dataset: Any
    groups: Grouping | None
    identity: str | None

    def is_the_same_object(self, other: _Data) -> bool:
        return self.dataset is other.dataset and self.groups is other.groups and self.identity == other.identity

    def content(self, key: RunKey) -> dict[str, str]:
        """A digest of what can be seen of the data now; empty if the user vouches for them by name."""
        if self.identity is not None:
            return {}
        groups = {} if self.groups is None else content_of(self.groups, key.journal)
        return {**content_of(self.dataset, key.journal), **{f" groups{place}": digest for place, digest in groups.items()}}


class DataContract:
    """What the run's first loader was given; every later loader, also after a restart, must be given the same, unchanged.

    A digest of all data is taken if there is a journal on disk, or when another object comes; of data in memory, always.
    """

    def __init__(self) -> None:
        self._first: _Data | None = None
        self._latest: _Data | None = None
        self._content: dict[str, str] = {}
        self._settings: dict[str, Any] = {}
        self._key: RunKey | None = None
        self.is_read = False
        self.notes: tuple[str, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether there was no loader yet."""
        return self._first is None

    def require(
        self,
        dataset: Any,
        groups: Grouping | None,
        identity: str | None,
        key: RunKey,
        journal: Journal,
        about: dict[str, Any] | None = None,
    ) -> None:
        """Bind the run to these data, or check that they are those that it is bound to; ``about`` if it is known already.

        Raises:
            ArgumentError: if they are others, or have changed.
        """
        data = _Data(dataset, groups, None if identity is None else _check.instance(str, identity=identity))
        if self._first is None or not self._first.is_the_same_object(data):
            if journal.durable:
                self._bind(_about(data, key) if about is None else about, journal)
            elif self._first is not None:
                self._compare(_about(self._first, key), _about(data, key))
        self._latest, self._key = data, key
        if self._first is None:
            self._first, self._content, self._settings = data, data.content(key), settings_of(data.dataset)
        else:
            self.require_unchanged()

    def read(self) -> None:
        """Before the first step: check that reading alone does not change the data, so that a later change means something.

        Raises:
            ArgumentError: if it does.
        """
        self.require_unchanged()
        self.is_read = True

    def changed(self) -> str:
        """How the data differ from those of the first loader; empty if they do not."""
        if self._latest is None or self._key is None:
            return ""
        now = self._latest.content(self._key)
        if now.keys() - self._content.keys():
            self._remark(GROWN)
        if settings_of(self._latest.dataset) != self._settings:
            self._remark(MOVED)
        places = [place for place, digest in self._content.items() if now.get(place) != digest]
        return "" if not places else f"the data of this run were changed while it went on (data{places[0]})"

    def require_unchanged(self) -> None:
        """Called before a step.

        Raises:
            ArgumentError: if the data have changed since the run's first loader.
        """
        if changed := self.changed():
            raise ArgumentError(
                f"Expected the data of this run's first loader: {changed}, and other records, or the same in another order, break what "
                f"its batches promise. {_READING}"
            )

    def _bind(self, about: dict[str, Any], journal: Journal) -> None:
        repeated = "data" in journal.bound
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
            self._remark(UNSEEN)

    def _remark(self, note: str) -> None:
        if note not in self.notes:
            self.notes = (*self.notes, note)


def about_data(dataset: Any, groups: Grouping | None, identity: str | None, key: RunKey) -> dict[str, Any]:
    """What identifies these data: their number, keyed digests of them and of their groups, and the name that the user gave."""
    return _about(_Data(dataset, groups, identity), key)


def _about(data: _Data, key: RunKey) -> dict[str, Any]:
    named = {"examples": len(data.dataset), "digest": "", "seen": True}
    about = named if data.identity is not None else identity_of(data.dataset, key.journal)
    groups: Any = [data.groups(i) for i in range(len(data.dataset))] if callable(data.groups) else data.groups
    cap = {}
    if isinstance(groups, Units):
        cap, groups = {} if groups.cap is None else {"cap": [groups.cap, groups.choose]}, groups.owners
    units = "" if groups is None else identity_of(groups, key.journal)["digest"]
    return {**about, "identity": data.identity or "", "groups": units, **cap}

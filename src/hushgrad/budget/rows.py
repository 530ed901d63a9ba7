r"""The rows of a ledger and their hash chain.

Row n is stored as a text b_n, canonical JSON that names its own number and h_{n-1}, and its hash h_n = SHA-256(b_n), with
h_0 = 64 zeros. A row that is changed, removed, inserted or moved breaks the chain at that row.

**What a chain cannot show.** Cut off after row m it is still a chain, and anyone who can write the file can compute a whole new
one. A *head* (the last hash) that was recorded elsewhere detects both: ``verify(head=...)`` looks for it in the chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from hushgrad import _check
from hushgrad._value import LATER
from hushgrad.budget.values import Dataset, _Account
from hushgrad.errors import HushgradError
from hushgrad.events import Event

START = "0" * 64
KINDS = ("ledger", "dataset", "reserve", "hold", "begin", "commit", "settle", "cancel", "approve")


class BrokenChain(HushgradError, RuntimeError):
    """A row of the ledger is not what was written, or makes no sense where it stands. Nothing is spent from such a ledger."""


@dataclass(frozen=True, kw_only=True)
class Row(_Account):
    """One line of a ledger; what it means is said by ``kind``.

    | ``kind`` | fields that count |
    |---|---|
    | ``ledger`` | ``note``: the ledger's own random name; always row 1, and only there |
    | ``dataset`` | ``budget`` |
    | ``reserve``, ``hold`` | ``dataset``, ``reservation``, ``run``, ``event`` |
    | ``begin`` | ``reservation``; ``owner``: the token of the life of the run that begins; ``identity``: the run's name |
    | ``cancel`` | ``reservation`` |
    | ``approve`` | ``reservation``, ``note``: who approves |
    | ``commit``, ``settle`` | ``reservation``, ``event``: what it is charged for from now on; ``overrun``; ``model`` |
    """

    number: int
    previous: str
    time: str
    kind: str
    dataset: str = ""
    reservation: str = ""
    run: str = ""
    event: Event | None = None
    budget: Dataset | None = None
    overrun: bool = False
    note: str = ""
    model: str = field(default="", metadata=LATER)  # SHA-256 of the model file that a commit is about
    owner: str = field(default="", metadata=LATER)
    identity: str = field(default="", metadata=LATER)
    expected = _check.each(number=_check.positive_int, kind=partial(_check.one_of, KINDS))

    @property
    def text(self) -> str:
        """The canonical JSON that is stored and hashed."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def hash(self) -> str:
        """SHA-256 of :attr:`text`, in hex."""
        return digest(self.text)


@dataclass(frozen=True)
class Stored:
    """A row as the database holds it, not yet checked."""

    number: int
    text: str
    hash: str


def digest(text: str) -> str:
    """SHA-256 of a row's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def checked(stored: Iterable[Stored], *, number: int = 0, previous: str = START) -> Iterator[Row]:
    """The rows after row ``number``, whose hash is ``previous``.

    Raises:
        BrokenChain: at the first row that does not fit; the message names it.
    """
    for item in stored:
        number += 1
        yield _believed(item, number, previous)
        previous = item.hash


def _believed(item: Stored, number: int, previous: str) -> Row:
    if item.number != number:
        raise BrokenChain(f"Row {number} is missing: row {item.number} follows row {number - 1}.")
    if digest(item.text) != item.hash:
        raise BrokenChain(f"Row {number} was changed: its text does not have its hash.")
    try:
        row = Row.from_json(item.text)
    except HushgradError as error:
        raise BrokenChain(f"Row {number} cannot be read: {error}") from None
    if row.number != number or row.previous != previous:
        raise BrokenChain(f"Row {number} does not follow row {number - 1}: one of them was replaced, moved or removed.")
    return row

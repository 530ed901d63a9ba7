"""Check-ins: who took part when, so that nobody takes part too often or again too soon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from hushgrad import _check


def as_ids(users: Iterable[int] | np.ndarray) -> np.ndarray:
    """User or node numbers as a sorted array without repetitions. Flower's node ids use all 64 bits, unsigned."""
    if not isinstance(users, np.ndarray):
        users = np.fromiter(users, dtype=np.uint64)
    ids = np.sort(users.astype(np.uint64, copy=False).ravel())  # np.unique hashes integers, which takes fifty times as long
    first = np.ones(len(ids), bool)
    first[1:] = ids[1:] != ids[:-1]
    return np.asarray(ids[first])


def pack_ids(ids: np.ndarray) -> torch.Tensor:
    """The same 64 bits as signed integers, for a checkpoint: torch supports few operations on unsigned ones."""
    return torch.from_numpy(ids.view(np.int64).copy())


def unpack_ids(packed: torch.Tensor) -> np.ndarray:
    """The inverse of :func:`pack_ids`.

    Raises:
        ArgumentError: for what it has not packed.
    """
    if packed.dim() != 1 or packed.dtype is not torch.int64:
        _check.fail("ids", tuple(packed.shape), "to be a list of whole numbers")
    return np.asarray(packed.numpy().astype(np.int64).view(np.uint64))


class CheckIns:
    r"""The server's check-in book: at most ``times`` participations per user, any two at least ``gap`` rounds apart.

    **Formal guarantee.** If every cohort is chosen from :meth:`eligible` and entered with :meth:`enter` *before* anyone in it
    is asked, the rounds of each user satisfy ``MinSep(gap, times)``, whatever devices do: a user who is asked and does not answer
    has taken part. The book depends on who was reachable and on the server's random choices, never on anybody's data.

    The book consists of three arrays sorted by user number; a round costs one sorted merge, not one look-up for each user.

        >>> book = CheckIns(gap=2, times=2)
        >>> book.enter([1, 2], round=0)
        >>> [book.eligible([1, 2, 3], round=t).tolist() for t in (1, 2)]
        [[3], [1, 2, 3]]
        >>> book.enter([1], round=2)
        >>> book.eligible([1, 2, 3], round=100).tolist()  # user 1 has had both participations
        [2, 3]

    Reference: Choquette-Choo et al. 2023 (arXiv:2306.08153), section 3 (min-separation and maximum participations in
    federated learning); McMahan et al. 2024 (arXiv:2408.08868), algorithm 1.
    """

    def __init__(self, *, gap: int, times: int) -> None:
        self.gap, self.times = _check.positive_int(gap=gap), _check.positive_int(times=times)
        self._users = np.empty(0, np.uint64)
        self._last = np.empty(0, np.int64)
        self._count = np.empty(0, np.int64)

    def eligible(self, users: Iterable[int] | np.ndarray, *, round: int) -> np.ndarray:
        """Those of ``users`` who may take part in ``round`` (counted from 0): sorted, each once."""
        asked, now = as_ids(users), _check.integer(0, round=round)
        place, known = self._find(asked)
        allowed = np.ones(len(asked), bool)
        allowed[known] = (now - self._last[place[known]] >= self.gap) & (self._count[place[known]] < self.times)
        return np.asarray(asked[allowed])

    def enter(self, users: Iterable[int] | np.ndarray, *, round: int) -> None:
        """Record that ``users`` take part in ``round``.

        Raises:
            ArgumentError: if one of them may not; nothing is then written.
        """
        chosen = as_ids(users)
        refused = len(chosen) - len(self.eligible(chosen, round=round))
        if refused:
            promise = f"at least {self.gap} rounds apart and at most {self.times} times"
            _check.fail("users", refused, f"of them to be none whose turn it is not: {promise}", "Choose from eligible().")
        place, known = self._find(chosen)
        self._last[place[known]] = round
        self._count[place[known]] += 1
        self._users = np.insert(self._users, place[~known], chosen[~known])
        self._last = np.insert(self._last, place[~known], round)
        self._count = np.insert(self._count, place[~known], 1)

    def participations(self, user: int) -> int:
        """How often ``user`` has taken part."""
        place, known = self._find(as_ids([user]))
        return int(self._count[place[0]]) if known[0] else 0

    def knows(self, users: Iterable[int] | np.ndarray) -> np.ndarray:
        """Those of ``users`` who have ever taken part."""
        asked = as_ids(users)
        return np.asarray(asked[self._find(asked)[1]])

    def __len__(self) -> int:
        return len(self._users)

    def __repr__(self) -> str:
        return f"CheckIns(gap={self.gap}, times={self.times}, {len(self)} users)"

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The book as three integer tensors. Sensitive: it says who took part when."""
        return {
            "users": pack_ids(self._users),
            "last": torch.from_numpy(self._last.copy()),
            "count": torch.from_numpy(self._count.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the book of an interrupted server."""
        users, (last, count) = unpack_ids(state["users"]), (state[name].numpy().copy() for name in ("last", "count"))
        whole = last.dtype == count.dtype == np.int64
        if not whole or not users.shape == last.shape == count.shape or np.any(users[1:] <= users[:-1]):
            _check.fail("state", len(users), "users to be sorted, with one last round and one count each")
        self._users, self._last, self._count = users, last, count

    def _find(self, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of the sorted ``asked``: its index in the book, or where it would be inserted, and whether it is there."""
        place = np.searchsorted(self._users, asked)
        known = np.zeros(len(asked), bool)
        inside = place < len(self._users)
        known[inside] = self._users[place[inside]] == asked[inside]
        return place, known

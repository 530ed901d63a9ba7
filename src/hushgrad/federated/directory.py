"""The server's directory: key, state and check-ins on disk, each file replaced atomically.

**Why no round's noise is ever used twice.** Clients are not repeatable: asked again, they give other answers, or none. So a
round that was released must never be repeated, since two sums with the same noise differ by no noise. The new model is
therefore written to disk, with the noise's buffers and the ledger, *before* it leaves the server. A server that is killed
before that has released nothing of the round and may repeat it; one that is killed afterwards continues with the next. The journal
says how many rounds were released: a state that is lost, or older, is refused. One server at a time owns the directory.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing
from hushgrad.release.journal import JOURNAL, WAYS_ON, Journal
from hushgrad.release.journal_history import shown
from hushgrad.release.keys import KEY, RunKey, read_key, write_key
from hushgrad.release.owner import Owner
from hushgrad.train.plan import Plan
from hushgrad.train.tree import read_tree, write_tree

_STATE, _COHORTS, _PUBLIC = "state.safetensors", "cohorts.safetensors", "privacy.json"


class ServerDirectory:
    """The files of one server's run.

    | file | content | mode | written |
    |---|---|---|---|
    | ``key.json`` | the run's key | 0600 | once, before the first round |
    | ``journal`` | rounds that were begun and released, see :mod:`hushgrad.release.journal` | 0600 | before a result is released |
    | ``cohorts.safetensors`` | check-ins and the latest cohort | 0600 | before a cohort is asked |
    | ``state.safetensors`` | model, server optimizer, noise buffers, clip norm, ledger | 0600 | before a round's result is released |
    | ``privacy.json`` | plan, ledger, epsilon so far: public | 0644 | after each round |
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self.path, newest=True)  # two servers would release the same noise with different cohorts
        self._asked = self._counted = ""  # the name of the latest check-ins, and of those that the latest state has counted

    def share_key(self, key: RunKey, plan: Plan) -> tuple[RunKey, Journal]:
        """The key and the journal of the run in this directory; ``key`` becomes it if there is none yet."""
        path, journal = self.path / KEY, self.path / JOURNAL
        if path.exists():
            kept = read_key(path, plan=plan.digest, offered=key)
            if not journal.exists():
                raise ArgumentError(f"Expected the journal beside {KEY}: without it nobody knows what was released. {WAYS_ON}")
            found = Journal.open(journal, kept, self._owner)
            if found.bound.get("key") != kept.fingerprint:
                raise ArgumentError(f"Expected the journal of the key beside it; it is another run's. {WAYS_ON}")
            return kept, found
        later = [name for name in (_STATE, _COHORTS, _PUBLIC) if (self.path / name).exists()]  # than a key
        if later or (journal.exists() and shown(journal).is_begun):
            raise ArgumentError(
                f"Expected {KEY} beside {[*later, JOURNAL][0]}: without its key a killed run cannot go on. {WAYS_ON}"
            )
        made = Journal.create(journal, key, self._owner, {"plan": plan.digest})
        write_key(path, key, plan=plan.digest)  # last: a directory with a key is complete
        return key, made

    def save_state(self, tree: dict[str, Any]) -> None:
        """Replace the state. It names the check-ins of its round."""
        self._write_tree(_STATE, {**tree, "cohorts": self._asked})
        self._counted = self._asked

    def save_cohorts(self, tree: dict[str, Any]) -> None:
        """Replace the check-ins. They have a name, and name those of the state that they follow."""
        asked = secrets.token_hex(8)
        self._write_tree(_COHORTS, {"cohorts": tree, "name": asked, "after": self._counted})
        self._asked = asked

    def save_public(self, content: dict[str, Any]) -> None:
        """Replace the public account of the run."""
        self._write_text(_PUBLIC, json.dumps(content, indent=1), 0o644)

    def read(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """(check-ins, state) as they were saved; None for what a new run has not got yet.

        Raises:
            ArgumentError: where the check-ins are lost or of another time than the state: somebody would be asked too often.
        """
        book, state = self._read(_COHORTS), self._read(_STATE)
        self._counted = "" if state is None else state["cohorts"]
        self._asked = "" if book is None else book["name"]
        if self._asked != self._counted and (book is None or book["after"] != self._counted):
            raise ArgumentError(
                f"Expected the check-ins of {_STATE}; {_COHORTS} is {'lost' if book is None else 'of another time'}, and nobody "
                f"knows who took part when. {WAYS_ON}"
            )
        return None if book is None else book["cohorts"], state

    def require_latest(self, rounds: int) -> None:
        """Refuse a state of ``rounds`` rounds where the public account tells of more: key, journal and state are copies from before.

        Raises:
            ArgumentError: where it does.
        """
        path = self.path / _PUBLIC
        told = _check.parsed(path.read_text(encoding="utf-8"))["rounds"] if path.exists() else 0
        if told > rounds:
            raise ArgumentError(f"Expected the state of {told} rounds, of which {_PUBLIC} tells; it has {rounds}. {WAYS_ON}")

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return read_tree(path) if path.exists() else None

    def _write_tree(self, name: str, tree: dict[str, Any]) -> None:
        self._owner.require()
        with replacing(self.path / name) as new:
            write_tree(new, tree)

    def _write_text(self, name: str, text: str, mode: int) -> None:
        self._owner.require()
        with replacing(self.path / name, mode=mode) as new:
            new.write_text(text)

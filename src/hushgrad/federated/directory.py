"""What a server keeps for a later process: key, state and check-ins on disk, each file replaced atomically.

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
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.cohorts import Cohorts
from hushgrad.federated.optimizers import ServerOptimizer
from hushgrad.federated.shares import ShareSum
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.release.atomic import replacing
from hushgrad.release.journal import JOURNAL, WAYS_ON, Journal
from hushgrad.release.journal_history import shown
from hushgrad.release.keys import KEY, RunKey, read_key, write_key
from hushgrad.release.owner import Owner
from hushgrad.train.books import Books
from hushgrad.train.plan import Plan
from hushgrad.train.tree import read_tree, understood, write_tree

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
        self._owner.require()
        with replacing(self.path / _PUBLIC, mode=0o644) as new:
            new.write_text(json.dumps(content, indent=1))

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


class PersistentStrategy(Strategy):
    """The half of :class:`PrivateStrategy <hushgrad.federated.base.PrivateStrategy>` that saves rounds and resumes them.

    A round is first saved, then entered into the journal, and then released, because clients cannot be asked again.
    """

    plan: Plan
    server: ServerOptimizer
    _directory: ServerDirectory | None
    _journal: Journal
    _books: Books
    _cohorts: Cohorts
    _aggregator: Aggregator | ShareSum
    _server_state: dict[str, Any]
    _arrays: ArrayRecord | None
    _unsaved: bool  # the latest model is not on disk, and must not leave the server
    _witness: tuple[int, bytes] | None  # of a round that is not in the journal yet

    @abstractmethod
    def spent(self, accountant: str = "pld") -> Guarantee:
        """The guarantee for the rounds so far."""

    @property
    def ledger(self) -> Ledger:
        """What happened, earlier phases included."""
        self._books.broken = self._books.broken or self._journal.broken
        return self._books.ledger()

    @property
    def rounds(self) -> int:
        """Rounds taken (charged) so far, those before a restart included."""
        return self._books.taken

    def _settle(self) -> None:
        """After a full disk: save what could not be saved before anybody is sent it."""
        if self._unsaved:
            self._save(self.spent())

    def _save(self, spent: Guarantee) -> None:
        if self._directory is None or self._arrays is None:
            self._unsaved = False
            self._write_down()
            return
        tree = {
            "version": 1,
            "server": self.server.to_json(),
            "server_state": dict(self._server_state),
            "books": self._books.state_dict(),
            "journal": self._link(),
            "aggregator": self._aggregator.state_dict(),
            "arrays": {name: torch.from_numpy(array.numpy()) for name, array in self._arrays.items()},
        }
        self._journal.flush()  # a machine that stops now must not leave a state that is ahead of its journal
        self._directory.save_state(tree)
        self._write_down()
        self._unsaved = False
        public = {"plan": self.plan.to_json(), "ledger": self.ledger.to_json(), "rounds": self.rounds, "spent": spent.to_json()}
        self._directory.save_public(public)

    def _link(self) -> dict[str, Any]:
        """The latest round's place in the journal, which it is not in yet, and how it follows from the one before."""
        assert self._witness is not None
        before, witness = self._journal.chain.hex(), self._witness[1].hex()
        return {"position": self.rounds, "chain": self._books.content, "before": before, "witness": witness}

    def _write_down(self) -> None:
        """Enter the latest round into the journal, after it is saved and before it is released."""
        if self._witness is not None:
            with self._journal:
                self._journal.released(*self._witness)
                self._witness = None

    def _resume(self) -> None:
        if self._directory is None:
            return
        with understood(self._directory.path):
            cohorts, tree = self._directory.read()
            if cohorts is not None:
                self._cohorts.load_state_dict(cohorts)
            if tree is None:
                self._journal.catch_up(0, self._journal.chain, before=b"", witness=b"")
            else:
                self._load(tree)
            self._directory.require_latest(self.rounds)

    def _load(self, tree: dict[str, Any]) -> None:
        if tree["version"] != 1 or tree["server"] != self.server.to_json():
            _check.fail("server", self.server, "and version to be those of the interrupted run", "Use a new directory.")
        link = {name: bytes.fromhex(tree["journal"][name]) for name in ("chain", "before", "witness")}
        self._journal.catch_up(tree["journal"]["position"], **link)
        self._server_state = dict(tree["server_state"])
        self._books.load_state_dict(tree["books"])
        self._aggregator.load_state_dict(tree["aggregator"])
        self._arrays = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in tree["arrays"].items()})

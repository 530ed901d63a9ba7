"""The persistent half of :class:`PrivateStrategy <hushgrad.federated.base.PrivateStrategy>`: what a server keeps for a later process.

A round is first saved, then entered into the journal, and then released, because clients cannot be asked again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from hushgrad import _check
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.cohorts import Cohorts
from hushgrad.federated.directory import ServerDirectory
from hushgrad.federated.optimizers import ServerOptimizer
from hushgrad.federated.shares import ShareSum
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.release.journal import Journal
from hushgrad.train.books import Books
from hushgrad.train.plan import Plan
from hushgrad.train.tree import understood


class PersistentStrategy(Strategy):
    """Saves rounds and resumes them."""

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

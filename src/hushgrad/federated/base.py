"""The private strategy: one round of Flower, from the choice of a cohort to the release of a model."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.clipping.clipper import Clipper
from hushgrad.errors import ArgumentError
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.audited import AuditedRounds
from hushgrad.federated.check_ins import CheckIns, as_ids
from hushgrad.federated.cohorts import Separated, cohorts_of
from hushgrad.federated.contract import messenger_of, require_plan, server_optimizer_of
from hushgrad.federated.directory import PersistentStrategy, ServerDirectory
from hushgrad.federated.grids import CarefulGrid, NarrowGrid
from hushgrad.federated.layout import Layout
from hushgrad.federated.optimizers import ServerOptimizer
from hushgrad.federated.replies import OpenRound, RawRound, collected
from hushgrad.federated.shares import Shares, ShareSum
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.release.journal import Journal
from hushgrad.release.keys import RunKey
from hushgrad.train.books import Books
from hushgrad.train.plan import Plan
from hushgrad.train.spending import guarantee_of

_RAW_EVALUATION = "The clients' evaluation metrics are published without noise and are not covered"


class PrivateStrategy(PersistentStrategy):
    """The base of ``DPFTRL`` and ``DPFedAvg``, which differ only in the noise that they accept."""

    _correlated: ClassVar[bool]

    def __init__(
        self,
        strategy: FedAvg,
        plan: Plan,
        *,
        server: ServerOptimizer | None = None,
        population: Iterable[int] | None = None,
        users: Callable[[int], int] | None = None,
        key: bytes | None = None,
        seed: int | None = None,
        max_epsilon: float | None = None,
        prior: Ledger | None = None,
        directory: str | os.PathLike[str] | None = None,
        raw_evaluation: bool = False,
    ) -> None:
        self.plan = require_plan(plan, correlated=self._correlated)
        self.server = server_optimizer_of(strategy, server)
        self._strategy, self._messenger = strategy, messenger_of(strategy)
        self._users = users
        self._directory = None if directory is None else ServerDirectory(directory)
        fresh = RunKey.make(key, seed).for_run()
        self._key, self._journal = (fresh, Journal(fresh)) if self._directory is None else self._directory.share_key(fresh, plan)
        self._key.taken, self._witness = True, None
        self._books = Books(plan, self._key.run_name(), prior=prior, max_epsilon=max_epsilon)
        self._cohorts = cohorts_of(plan, population, self._key.sampling)
        self._aggregator = (ShareSum if isinstance(plan.noise, Shares) else Aggregator)(plan, self._key)
        self._server_state: dict[str, Any] = {}
        self._arrays: ArrayRecord | None = None
        self._open: OpenRound | None = None
        self._unsaved = False
        self._raw_round: RawRound | None = None
        self._raw_evaluation = _check.instance(bool, raw_evaluation=raw_evaluation)
        self._resume()

    # What an operator does with it -----------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run rounds until ``num_rounds`` (by default the plan's) have been taken in all, including those before a restart.

        ``evaluate_fn`` sees released models only. With ``max_epsilon`` the rounds end when that is reached. The result's
        metrics contain only what the guarantee covers: the epsilon so far and the clip norm.
        """
        self._settle()
        total = self.plan.steps if num_rounds is None else _check.positive_int(num_rounds=num_rounds)
        if total > self.plan.steps:
            _check.fail("num_rounds", total, f"to be at most the plan's steps={self.plan.steps}", "Make a longer plan.")
        if total > self.rounds_allowed:
            log(WARNING, "The budget allows %d of %d rounds; training stops there.", self.rounds_allowed, total)
        done, left = self.rounds, min(total, self.rounds_allowed) - self.rounds
        arrays = initial_arrays if self._arrays is None else self._arrays
        if left <= 0:
            return Result(arrays=arrays)
        evaluate = None if evaluate_fn is None else lambda round, released: evaluate_fn(done + round, released)
        result = super().start(CarefulGrid(grid), arrays, left, timeout, train_config, evaluate_config, evaluate)
        result.train_metrics_clientapp = _later(result.train_metrics_clientapp, done)
        result.evaluate_metrics_clientapp = _later(result.evaluate_metrics_clientapp, done)
        result.evaluate_metrics_serverapp = _later(result.evaluate_metrics_serverapp, done)
        return result

    def audit(self, arrays: ArrayRecord, *, users: int | None = None, **options: Any) -> Any:
        """Audit this server on separate rounds under other keys: nothing of it is changed, released or charged.

        Returns a :class:`hushgrad.audit.DeepReport`, for the operator's eyes.

        Args:
            arrays: the model that is sent to the clients; only its layout counts.
            users: how many there are, where no population was given.
            options: those of :func:`hushgrad.audit.server_audit.audit_rounds`.
        """
        if isinstance(self.plan.noise, Shares):
            _check.fail(
                "plan.noise", "Shares", "not to be drawn by the clients", "What they add never comes to the server alone."
            )
        # The auditor is on the same floor and is called by name: nothing here depends on it.
        server = AuditedRounds(plan=self.plan, layout=Layout.of(arrays))
        count = users if self._cohorts.users is None else self._cohorts.users
        if count is None:
            _check.fail("users", None, "to be how many users there are", "A server without population= does not know.")
        return import_module("hushgrad.audit.server_audit").audit_rounds(self.plan, server, records=count, **options)

    def spent(self, accountant: str = "pld") -> Guarantee:
        """The guarantee for the rounds so far, earlier phases included."""
        guarantee = guarantee_of(self.ledger, self.plan, reproducible=self._key.reproducible, accountant=accountant)
        notes = (*guarantee.notes, *self._journal.notes, *((_RAW_EVALUATION,) if self._raw_evaluation else ()))
        return replace(guarantee, notes=notes)

    @property
    def rounds_allowed(self) -> int:
        """Rounds that the plan and the budget allow in all."""
        return self._books.limit

    @property
    def clip(self) -> Clipper:
        """The clipper of the next round: the plan's, or the current one of adaptive clipping (released, so not sensitive)."""
        return self._aggregator.clip

    @property
    def check_ins(self) -> CheckIns | None:
        """The check-in book; None if the plan's sampler deals a known population. Sensitive."""
        return self._cohorts.book if isinstance(self._cohorts, Separated) else None

    @property
    def raw_round(self) -> RawRound | None:
        """What happened in the latest round. Sensitive: not covered by the guarantee."""
        return self._raw_round

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self._strategy).__name__}, plan {self.plan.digest[:12]}, "
            f"round {self.rounds} of {self.plan.steps}, {self.plan.participation}, noise {type(self.plan.noise).__name__})"
        )

    # Flower's hooks ---------------------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Choose the round's cohort, record it in the check-in book, and ask those who can be reached.

        Raises:
            BudgetExceeded: after the plan's last round, or where the next one would cost more than ``max_epsilon``.
        """
        self._settle()
        self._books.require_room(issued=True)
        step, layout = self.rounds, Layout.of(arrays)
        users, nodes = self._connected(grid)
        chosen = self._cohorts.choose(step, users)
        if self._directory is not None:
            self._directory.save_cohorts(self._cohorts.state_dict())  # before anybody is asked
        asked = nodes[np.isin(users, chosen, assume_unique=True)].tolist()
        self._aggregator.tell(config)
        messages = list(self._messenger.configure_train(step + 1, arrays, config, NarrowGrid(grid, asked)))
        self._require_cohort(messages, asked)
        self._open = OpenRound(step, len(chosen), set(asked), layout, layout.flat(arrays))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, sum, add noise, divide by the plan's constant and run the server optimizer; save, then release."""
        open_round, self._open = self._open, None
        if open_round is None:
            raise ArgumentError("Expected configure_train before aggregate_train: there is no cohort whose replies could count.")
        self._aggregator.begin(open_round.step, open_round.layout, open_round.current)
        self._raw_round = collected(self._aggregator, open_round, replies)
        self._journal.begin(open_round.step)
        with self._journal:
            self._books.charge(issued=True)
            update, state = self._aggregator.release(open_round.step), dict(self._server_state)
            weights = self.server.step(torch.from_numpy(open_round.current), update, open_round.step, state)
            witness = open_round.step, hashlib.blake2b(weights.numpy().tobytes(), digest_size=16).digest()
            made = open_round.layout.record(weights.numpy()), state, self._journal.after(*witness).hex(), witness, True
            self._arrays, self._server_state, self._books.content, self._witness, self._unsaved = made
        spent = self.spent()
        self._save(spent)
        log(INFO, "aggregate_train: round %d released, epsilon so far %s", self.rounds, at_most(spent.epsilon))
        released = MetricRecord({"epsilon": spent.epsilon, "delta": spent.delta, "clip-norm": self._aggregator.clip_norm})
        return self._arrays, released

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Nobody, unless ``raw_evaluation``: metrics on clients' data are not covered by the guarantee."""
        if not self._raw_evaluation:
            return []
        return self._strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The wrapped strategy's, with ``raw_evaluation``."""
        return self._strategy.aggregate_evaluate(server_round, replies) if self._raw_evaluation else None

    def summary(self) -> None:
        """Log the plan, the guarantee it leads to, and what was overridden in the wrapped strategy."""
        for line in str(self.plan).splitlines():
            log(INFO, "\t%s", line)
        log(INFO, "\t├──> %s", self.plan.guarantee())
        log(INFO, "\t├──> Every user counts the same: weights by number of examples are private, and are not used.")
        log(INFO, "\t├──> Cohorts are chosen by the plan; the strategy's fraction_train and minimum of nodes are not used.")
        if not self._raw_evaluation:
            log(INFO, "\t└──> Metrics on clients' data are not released. raw_evaluation=True releases them, uncovered.")

    def _connected(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """(users, their nodes), one node for each user; waits for the strategy's ``min_available_nodes``, as Flower does."""
        while len(nodes := as_ids(grid.get_node_ids())) < self._strategy.min_available_nodes:
            log(INFO, "Waiting for nodes: %d of %d are connected.", len(nodes), self._strategy.min_available_nodes)
            time.sleep(1)
        if self._users is None:
            return nodes, nodes
        users, first = np.unique(np.array([self._users(node) for node in nodes.tolist()], dtype=np.uint64), return_index=True)
        return users, nodes[first]

    def _require_cohort(self, messages: list[Message], asked: list[int]) -> None:
        """Require that a user's own strategy asks only the cohort, and nobody twice."""
        receivers = [message.metadata.dst_node_id for message in messages]
        if sorted(receivers) != sorted(asked):
            remedy = "Ask every node of grid.get_node_ids() once: the grid shows the cohort only."
            _check.fail("strategy", type(self._strategy).__name__, "to ask the chosen cohort", remedy)


def _later(metrics: dict[int, MetricRecord], rounds: int) -> dict[int, MetricRecord]:
    """Renumber rounds: Flower counts the rounds of one start, this server those of the whole run."""
    return {rounds + number: record for number, record in metrics.items()}

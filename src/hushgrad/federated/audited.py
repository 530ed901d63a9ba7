"""A server as an audit runs it: separate rounds, under keys of the audit, without a network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import RecordDict

from hushgrad.clipping.clipper import Clipper
from hushgrad.federated.aggregate import _MODEL, Aggregator
from hushgrad.federated.layout import Layout
from hushgrad.federated.wire import Unusable
from hushgrad.release.keys import RunKey
from hushgrad.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class AuditedRounds:
    """The rounds of a server with this plan and this model."""

    plan: Plan
    layout: Layout

    @property
    def size(self) -> int:
        """The number of model parameters."""
        return self.layout.size

    def take(self, key: RunKey, step: int, updates: list[np.ndarray], *, restart: bool) -> tuple[np.ndarray, Clipper]:
        """The release of round ``step`` for these flat updates, times the batch size, and the next clipper.

        Args:
            key: of the audit.
            step: the round; those before it are drawn and dropped.
            updates: one for each client.
            restart: save the server and load it before the round.
        """
        server = Aggregator(self.plan, key)
        server._release.placement.params[_MODEL] = torch.zeros(self.size, dtype=torch.float64)
        server._release.replay(step)
        if restart:
            saved, server = server.state_dict(), Aggregator(self.plan, key)
            server.load_state_dict(saved)
        self._add(server, updates, step)
        released = server.release(step).numpy() * float(self.plan.batch_size)
        return released, server.clip

    def as_sent(self, update: np.ndarray) -> np.ndarray:
        """The update in the precision in which clients send it."""
        with np.errstate(over="ignore"):
            return self.layout.flat(self.layout.record(update))

    def lengths(self, updates: list[np.ndarray]) -> list[float]:
        """How far each update by itself moves the sum of the others."""
        others, found = updates[:2], []
        for update in updates:
            server = Aggregator(self.plan, RunKey.make())
            self._add(server, others)
            before = server._sum.copy()
            self._add(server, [update], None)
            found.append(float(np.linalg.norm(server._sum - before)))
        return found

    def _add(self, server: Aggregator, updates: list[np.ndarray], step: int | None = 0) -> None:
        if step is not None:
            server.begin(step, self.layout, np.zeros(self.size))
        for update in updates:
            try:
                server.add(RecordDict({"arrays": self.layout.record(update)}))
            except Unusable:
                continue  # it counts as zero

"""The replies of one round: unsolicited or unusable ones count as zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING

import numpy as np
from flwr.app import Message
from flwr.supercore import log

from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.grids import UNREADABLE
from hushgrad.federated.layout import Layout
from hushgrad.federated.shares import ShareSum
from hushgrad.federated.wire import Unusable


@dataclass
class OpenRound:
    """A round that was configured and not yet aggregated."""

    step: int
    chosen: int
    nodes: set[int]
    layout: Layout
    current: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RawRound:
    """What happened in one round, before any noise. Sensitive: for the operator's log, not for publication.

    ``chosen`` users were entitled to take part, ``asked`` of them could be reached, ``accepted`` sent a usable update and
    ``clipped`` of those had a norm above the clip norm. ``rejected`` gives, for each unusable reply, the reason; it counted
    as zero. The divisor is the plan's in every case.
    """

    round: int
    chosen: int
    asked: int
    accepted: int
    clipped: int
    rejected: tuple[str, ...] = ()

    @property
    def dropped(self) -> int:
        """Chosen users without a usable update: unreachable, silent, failed or rejected."""
        return self.chosen - self.accepted

    def __str__(self) -> str:
        reasons = "".join(f"; {reason}" for reason in self.rejected)
        return (
            f"round {self.round}: {self.chosen} chosen, {self.asked} asked, {self.accepted} accepted, {self.clipped} clipped"
            f"{reasons}"
        )


def collected(aggregator: Aggregator | ShareSum, open_round: OpenRound, replies: Iterable[Message]) -> RawRound:
    """Sum the clipped updates of the round's cohort, and describe the round. Sensitive."""
    accepted = clipped = 0
    rejected: list[str] = []
    waiting = set(open_round.nodes)
    # Sorted, so that the sum does not depend on who was faster.
    for reply in sorted(replies, key=lambda message: message.metadata.src_node_id):
        node = reply.metadata.src_node_id
        if reply.has_error() and reply.error.code != UNREADABLE:
            continue  # a drop-out
        try:
            if node not in waiting:
                raise Unusable("not in this round's cohort, or answered already")
            waiting.discard(node)
            if reply.has_error():
                raise Unusable(reply.error.reason)
            clipped += aggregator.add(reply.content)
            accepted += 1
        except Unusable as reason:
            rejected.append(f"node {node}: {reason}")
            log(WARNING, "aggregate_train: node %d counts as zero: %s", node, reason)
    return RawRound(
        round=open_round.step,
        chosen=open_round.chosen,
        asked=len(open_round.nodes),
        accepted=accepted,
        clipped=clipped,
        rejected=tuple(rejected),
    )

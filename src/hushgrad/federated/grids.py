"""Grids: Flower's view of the connected clients; narrowed to a cohort, or all in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from hushgrad import _check

_FAILED = 1  # what a client's exception is reported as; any code makes an error reply
UNREADABLE = 68_001  # the code of an error reply in place of one that could not be unpacked; none of Flower's own
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 3.0  # seconds between two looks for replies


def _own(name: str) -> Callable[..., Any]:
    """A method that is the other grid's own."""
    return lambda self, *given, **named: getattr(self._grid, name)(*given, **named)


class _OtherGrid(Grid):
    """Another grid, seen through this one."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    get_node_ids, set_run, create_message = _own("get_node_ids"), _own("set_run"), _own("create_message")
    push_messages, pull_messages, send_and_receive = _own("push_messages"), _own("pull_messages"), _own("send_and_receive")

    @property
    def run(self) -> Run:
        """The grid's own."""
        return self._grid.run


class NarrowGrid(_OtherGrid):
    """A grid on which only the chosen nodes exist: a strategy that configures its round on it can ask nobody else."""

    def __init__(self, grid: Grid, nodes: Iterable[int]) -> None:
        super().__init__(grid)
        self._nodes = list(nodes)

    def get_node_ids(self) -> Iterable[int]:
        """The chosen ones."""
        return list(self._nodes)


class CarefulGrid(_OtherGrid):
    """A grid whose replies are pulled one by one, so that what one client sends ends nobody's round.

    Flower unpacks a reply's objects in the server's process, and all that were asked for together are lost with the first that cannot be
    unpacked. Here that reply becomes an error reply of its node, which counts as zero. What the network raises is raised: it is not a
    client's fault.
    """

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As Flower's own grids do it: push, then pull until all have answered or ``timeout`` seconds have passed."""
        sent = list(messages)
        waiting = {number: message for number, message in zip(self.push_messages(sent), sent, strict=False) if number}
        until, pause, replies = time.monotonic() + (math.inf if timeout is None else timeout), _FIRST_PAUSE, list[Message]()
        while waiting:
            for number in list(waiting):
                if found := self._pulled(number, waiting[number]):
                    del waiting[number]
                    replies += found
            if not waiting or time.monotonic() >= until:
                break
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return replies

    def _pulled(self, number: str, message: Message) -> list[Message]:
        """The reply to ``message``, if there is one by now."""
        try:
            return list(self._grid.pull_messages([number]))
        except (OSError, httpx.HTTPError):
            raise
        except Exception as error:  # noqa: BLE001  (unpacking a stranger's bytes may raise anything)
            return [
                Message(Error(code=UNREADABLE, reason=f"its reply cannot be unpacked ({type(error).__name__})"), reply_to=message)
            ]


class LocalGrid(Grid):
    """All clients in this process, one after the other: the same ClientApp and strategy as on Flower's engine, without its cost.

    For experiments and tests with small models, where starting a round on the simulation engine takes longer than training.
    Node i (1, 2, ..., ``clients``) is partition i - 1, and keeps its number in every run, so a killed server's check-ins hold.
    A client that raises is answered for by an error reply, as on Flower's engine: a drop-out.

        >>> from flwr.app import ArrayRecord, Message, RecordDict
        >>> app = ClientApp()
        >>> @app.train()
        ... def train(message, context):
        ...     return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)
        >>> list(LocalGrid(app, clients=3).get_node_ids())
        [1, 2, 3]
    """

    def __init__(self, client_app: ClientApp, *, clients: int) -> None:
        n = _check.positive_int(clients=clients)
        self._app = client_app
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": n},
                state=RecordDict(),
                run_config={},
            )
            for node in range(1, n + 1)
        }
        self._replies: dict[str, Message] = {}
        self._numbers = count()
        # Who sends a message is a property of the process in Flower; its own engines set it in the same way.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0

    def get_node_ids(self) -> Iterable[int]:
        """1, 2, ..., clients."""
        return list(self._contexts)

    def set_run(self, run: Run) -> None:
        """There is one run only."""

    @property
    def run(self) -> Run:
        """An empty description."""
        return Run.create_empty(1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to one node.

        Args:
            content: what is sent.
            message_type: Flower's word for what the node shall do.
            dst_node_id: the node.
            group_id: the round.
            ttl: seconds that the message is good for.
        """
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients now; their replies wait to be pulled."""
        numbers = []
        for message in messages:
            numbers.append(str(next(self._numbers)))
            self._replies[numbers[-1]] = self._run(message)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages, once."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run the clients and return their replies."""
        return self.pull_messages(self.push_messages(messages))

    def _run(self, message: Message) -> Message:
        try:
            return self._app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # noqa: BLE001  (a client's code may raise anything; the server goes on without it)
            return Message(Error(code=_FAILED, reason=f"{type(error).__name__}: {error}"), reply_to=message)

"""Connections before their token is checked: each has a deadline, and each client a limited number.

Anyone may connect, send half a request and wait. Until a request is complete nothing is known about its sender, so it has little time and
little room: a client that opens more than its share loses its oldest connection. A visitor who sends a whole request at once is
never affected.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

DEADLINE = 5.0  # seconds for the whole head of a request
WAITING = 32  # connections in all that may have sent no whole request: half of what the server takes
SHARE = 16  # of one address


def waiting_room(*, deadline: float = DEADLINE, waiting: int = WAITING, share: int = SHARE) -> type[asyncio.Protocol]:
    """The protocol of one server's connections, with one waiting room for all of them."""
    return type("Connection", (_Connection,), {"room": {}, "deadline": deadline, "waiting": waiting, "share": share})


class _Connection(H11Protocol):
    room: ClassVar[dict[Any, None]]  # in the order in which they began to wait
    deadline: ClassVar[float]
    waiting: ClassVar[int]
    share: ClassVar[int]
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _watch(self) -> None:
        between = self.cycle is None or self.cycle.response_complete
        if not (between and self.conn.their_state is h11.IDLE):
            self._leave()
        elif self not in self.room and not self.transport.is_closing():
            self.room[self] = None
            self._timer = self.loop.call_later(self.deadline, self._end)
            self._make_place()

    def _leave(self) -> None:
        self.room.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._leave()
        self.transport.abort()

    def _make_place(self) -> None:
        own = [one for one in self.room if one._address == self._address]
        if len(own) > self.share:
            own[0]._end()
        elif len(self.room) > self.waiting:  # many addresses: the oldest of whoever has most
            counts: dict[str, list[Any]] = {}
            for one in self.room:
                counts.setdefault(one._address, []).append(one)
            max(counts.values(), key=len)[0]._end()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

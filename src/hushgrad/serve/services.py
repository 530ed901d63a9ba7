"""The shared state of all pages: the settings, the runs and the two worker queues for expensive requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from hushgrad.serve.files import RunFolder
from hushgrad.serve.rules import Rules
from hushgrad.serve.runs import CONTRADICTED, NOT_ALLOWED, VERIFIED, Run, Shelf
from hushgrad.serve.settings import Settings
from hushgrad.serve.views import NotThere
from hushgrad.serve.worker_queue import Refused, RefusedByPolicy, WorkerQueue

T = TypeVar("T")
_MOMENT = 2.0  # seconds that a look at the ledger is good for


class Services:
    """One per application. ``planner`` answers questions about plans, ``reader`` reads cards and the ledger."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rules = Rules(settings.policy)
        self.shelf = Shelf(settings.runs, raw=settings.raw, rules=self.rules)
        self.planner = WorkerQueue(seconds=20, modules=("hushgrad.planner",))
        self.reader = WorkerQueue(seconds=30, modules=("hushgrad.report.card", "jinja2"))

    def warm_up(self) -> None:
        """Start both worker processes now, so that no visitor waits for imports; otherwise they start with their first request."""
        self.planner.start()
        self.reader.start()

    def close(self) -> None:
        """Stop both worker processes."""
        self.planner.stop()
        self.reader.stop()

    async def plan(self, question: dict[str, Any]) -> dict[str, Any]:
        """The ranking that answers a question."""
        return await self.planner.ask("plan", question=question)

    async def curves(self, question: dict[str, Any], show: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The candidate of that name (else the best one) and its curves."""
        ranked = (await self.plan(question))["candidates"]
        chosen = next((one for one in ranked if one["name"] == show), ranked[0])
        found = await self.planner.ask(
            "curves", question=question, name=chosen["name"], noise_multiplier=chosen["noise_multiplier"]
        )
        return chosen, found

    async def card(self, name: str) -> dict[str, Any]:
        """The privacy card of a finished run, in all its forms."""
        run, folder = await self._finished(name)
        policy = await asyncio.to_thread(self.rules.policy)
        arguments = {"root": str(folder.root), "parts": list(folder.parts), "raw": self.settings.raw}
        paid = policy is not None and policy.ledger  # then the card says what the ledger says at this moment
        try:
            found = await self.reader.ask(
                "card",
                version=f"{run.version} {_moment()}" if paid else run.version,
                policy=None if policy is None else policy.to_json(),
                ledger=self.settings.ledger if paid else None,
                **arguments,
            )
        except Refused as error:
            self.shelf.note(run, NOT_ALLOWED if isinstance(error, RefusedByPolicy) else CONTRADICTED)
            raise
        self.shelf.note(run, VERIFIED)
        return found

    async def _finished(self, name: str) -> tuple[Run, RunFolder]:
        run, folder = await asyncio.to_thread(self.run, name)
        if run.state != "finished":
            raise NotThere(f"The run {name[:80]} has no card yet: a card states what a finished run promises.")
        return run, folder

    async def compare(self, first: str, second: str) -> dict[str, Any]:
        """Two finished runs side by side."""
        (a, here), (b, there) = [await self._finished(name) for name in (first, second)]
        arguments = {"root": str(here.root), "first": list(here.parts), "second": list(there.parts)}
        return await self.reader.ask("compare", version=f"{a.version} {b.version}", **arguments)

    async def ledger(self) -> dict[str, Any]:
        """The budgets as they are, or were a moment ago."""
        if self.settings.ledger is None:
            raise NotThere("No ledger was given. Start the page with one: hushgrad serve --ledger budget.db")
        return await self.reader.ask("ledger", version=_moment(), place=self.settings.ledger)

    def run(self, name: str) -> tuple[Run, RunFolder]:
        """The run of that name.

        Raises:
            NotThere: no scan has found it.
        """
        found = self.shelf.get(name)
        if found is None:
            raise NotThere("There is no such run in the folder that is served.")
        return found, self.shelf.folders()[name]


def _moment() -> str:
    return str(int(time.monotonic() / _MOMENT))


def services(request: Request) -> Services:
    """The services that a request is for."""
    found: Services = request.app.state.services
    return found


async def while_wanted(request: Request, question: Coroutine[Any, Any, T]) -> T:
    """The answer to ``question``, unless the visitor goes away: then the question leaves the queue."""
    asking = asyncio.ensure_future(question)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise NotThere("Nobody is waiting for this answer any more.")
        return asking.result()
    finally:
        for task in (asking, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

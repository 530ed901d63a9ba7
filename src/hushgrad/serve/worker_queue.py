"""A queue of requests to one child process, which answers one at a time, each with a time limit.

If a request takes too long, its child is killed and replaced; the page itself never waits for one.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import subprocess
import time
from collections import OrderedDict
from typing import Any

from hushgrad.errors import HushgradError
from hushgrad.serve.worker import COMMAND

_QUEUE = 8  # questions that may wait
_REMEMBERED = 128  # answers
_CLOCK = 4.0  # seconds by the clock for one of processor time
_START = 60.0  # seconds that a child may take to begin: it imports torch
_LARGEST = 64 << 20  # bytes of one answer
_KEPT = 2 << 20  # bytes of an answer that is remembered


class Refused(HushgradError):
    """The request was refused; the message says why."""


class RefusedByPolicy(Refused):
    """The policy does not allow it."""


class TooLong(HushgradError):
    """The request took more time or memory than allowed."""


class Busy(HushgradError):
    """Too many requests are waiting."""


class WorkerQueue:
    """Questions to one child process.

    ``seconds`` is what one of them may take of the processor; by the clock it may take four times that, as the machine may have
    other things to do. ``modules`` is what the child imports beforehand.
    """

    def __init__(self, *, seconds: float, modules: tuple[str, ...] = ()) -> None:
        self.seconds, self._modules, self._patience = seconds, modules, _CLOCK * seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._waiting, self._over = 0, False
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def start(self) -> None:
        """Start the child in the background, so that the first request does not wait for its imports."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._child = subprocess.Popen(  # a session of its own: Ctrl-C is for the server, which then ends its children
            [*COMMAND, *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._answered = False

    def stop(self) -> None:
        """Stop the child for good. A running request notices and cleans up; its pipe must not be closed while it waits."""
        self._over = True
        if not self._turn.locked():
            self._clear()
        elif self._child is not None:
            self._child.kill()

    def _clear(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None

    async def ask(self, job: str, *, version: str = "", **arguments: Any) -> dict[str, Any]:
        """The answer of one of ``JOBS``. Equal questions (at equal ``version``) are answered from memory.

        Raises:
            Refused: the job says why.
            TooLong: the time limit was reached.
            Busy: too many are waiting.
        """
        key = json.dumps([job, version, arguments], sort_keys=True)
        if key in self._known:
            return self._remembered(key)
        if self._waiting >= _QUEUE:
            raise Busy("Too many questions are waiting. Try again in a few seconds.")
        self._waiting += 1
        try:
            await self._turn.acquire()  # whoever gives up while waiting (a closed page, a moved slider) leaves the queue here
        finally:
            self._waiting -= 1
        if key in self._known:  # the one before asked the same
            self._turn.release()
            return self._remembered(key)
        # Shielded: a question that has begun is finished, and its answer kept, whoever is still interested.
        return _opened(await asyncio.shield(asyncio.ensure_future(self._answer(key, job, arguments))))

    async def _answer(self, key: str, job: str, arguments: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps({"job": job, "seconds": self.seconds, "patience": self._patience, "arguments": arguments})
        try:
            reply = await asyncio.to_thread(self._exchange, line)
        finally:
            self._turn.release()
        content: dict[str, Any] = json.loads(reply)
        if "failed" not in content and len(reply) <= _KEPT:
            self._known[key] = content
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return content

    def _remembered(self, key: str) -> dict[str, Any]:
        self._known.move_to_end(key)
        return _opened(self._known[key])

    def _exchange(self, line: str) -> bytes:
        """One line to the child and one back, or the child's end."""
        if self._child is None or self._child.poll() is not None:
            self._clear()
            self.start()
        if self._over:  # asked after the child was there: either stop sees the child, or this sees stop
            return self._failed("The server ends.")
        child = self._child
        assert child is not None and child.stdin is not None
        until = time.monotonic() + self._patience + (0 if self._answered else _START)
        try:
            child.stdin.write(line.encode() + b"\n")
            child.stdin.flush()
            reply = _line(child, until)
        except TimeoutError:
            return self._failed(f"No answer within {self._patience:g} seconds. The command line has no such limit.")
        except (OSError, EOFError, ValueError):  # it died: out of time or memory, a crash in a library; or the server ends
            if child.wait() == -signal.SIGPROF:
                return self._failed(f"No answer within {self.seconds:g} seconds of work. The command line has no such limit.")
            return self._failed("The process that was to answer has ended: the question needs too much memory.")
        self._answered = True
        return reply

    def _failed(self, why: str) -> bytes:
        self._clear()
        return json.dumps({"failed": why}).encode()


def _line(child: subprocess.Popen[bytes], until: float) -> bytes:
    """The child's next line, if it comes before ``until``."""
    assert child.stdout is not None
    pipe, found = child.stdout.fileno(), bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not ready.select(max(0.0, until - time.monotonic())):
                raise TimeoutError
            chunk = os.read(pipe, 1 << 16)
            if not chunk or len(found) > _LARGEST:
                child.kill()  # if it has not ended by itself
                raise EOFError
            found += chunk
    return bytes(found)


def _opened(content: dict[str, Any]) -> dict[str, Any]:
    if "failed" in content:
        raise TooLong(content["failed"])
    if "refused" in content:
        raise (RefusedByPolicy if content.get("by_policy") else Refused)(content["refused"])
    answer: dict[str, Any] = content["answer"]
    return answer

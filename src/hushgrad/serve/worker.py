"""The child process that answers expensive requests: one JSON line in, one JSON line out.

It has limits of memory and processor time, and an alarm that ends it even if its parent is gone. JSON, not pickle: what it is told
to do by its input is one of ``JOBS`` and nothing else.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
from typing import Any

from hushgrad._printed import plain, reason
from hushgrad.errors import HushgradError, PolicyRefused

# Not -m, which would let a module in the working directory go before the library's.
COMMAND = (
    sys.executable,
    "-c",
    "import sys; sys.path[:] = [p for p in sys.path if p]; from hushgrad.serve.worker import main; main()",
)
_MEMORY = 3 << 30  # bytes of data
_GRACE = 10  # seconds beyond the limit that the parent keeps


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    if sys.platform.startswith("linux"):
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    from hushgrad.serve.jobs import JOBS

    for name in sys.argv[1:]:  # what takes long to import, before the first question
        importlib.import_module(name)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])  # of processor time: SIGPROF then ends the process
        signal.alarm(math.ceil(question["patience"]) + _GRACE)
        answer = _answer(JOBS[question["job"]], question["arguments"])
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(plain(answer)) + "\n")
        answers.flush()


def _answer(job: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": job(**arguments)}
    except (HushgradError, OSError) as error:
        return {"refused": f"{reason(error)}.", "by_policy": isinstance(error, PolicyRefused)}
    except (MemoryError, RecursionError, ArithmeticError, ValueError, TypeError, KeyError, AssertionError) as error:
        # A crafted input; its reader gets a sentence, and the next question finds a worker that is well.
        return {"refused": f"This cannot be answered ({type(error).__name__})."}

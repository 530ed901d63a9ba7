"""A status line on the terminal while something takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 1.0  # seconds


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show what is being done, and for how long, after the first second; removed at the end, and never written to a file or a pipe."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(what: str, done: threading.Event) -> None:
    began = time.monotonic()
    if done.wait(_PATIENCE):
        return
    while True:
        print(f"\r{what} ... {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
        if done.wait(_PATIENCE):
            break
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)

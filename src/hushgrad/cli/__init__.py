"""The command line: `hushgrad epsilon | calibrate | train | ...`, each with --json."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


def entry() -> int:
    """What the ``hushgrad`` command calls: from here on an interrupt is one word, while Python is still importing, too."""
    os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL is asked before its first product, see hushgrad.clipping.bits
    try:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller ignores it
            signal.signal(signal.SIGINT, _interrupt)
        from hushgrad.cli.main import main

        return main()
    except KeyboardInterrupt:
        import sys

        print("Interrupted.", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end at once while torch or numpy is first imported, where an exception can abort Python.

    At that time no result exists yet, so that ending loses none.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in ("torch", "numpy"):
            os.write(2, b"Interrupted.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt

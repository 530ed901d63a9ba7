"""The command line: `hushgrad epsilon | calibrate | train | ...`, each with --json."""

from __future__ import annotations

import _signal as signal  # without the enums of the module around it, see below
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def entry() -> int:
    """The entry point of the ``hushgrad`` command: handles interrupts cleanly, also while Python is still importing.

    Before it runs Python would show a traceback, so little is imported first.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # MKL is asked before its first product: hushgrad.clipping.batch_invariance
    try:
        threading = sys.modules.get("threading")  # where nobody has imported it, this is the only thread
        here = threading is None or threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller ignores it
            signal.signal(signal.SIGINT, _interrupt)
        from hushgrad.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end at once while torch or numpy is first imported, where an exception can abort Python.

    At that time there is no result yet that could be lost.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in ("torch", "numpy"):
            os.write(2, b"Interrupted.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt

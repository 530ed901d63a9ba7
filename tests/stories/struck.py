"""Interrupts at any place inside of hushgrad, for the tests of what is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hushgrad

__all__ = ["Strike"]

HOME = str(Path(hushgrad.__file__).parent)


class Strike:
    """Raises KeyboardInterrupt at the k-th place inside of hushgrad where the interpreter would: a call begins, or one in C ends."""

    def __init__(self, k: int) -> None:
        self.left = k

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(HOME):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

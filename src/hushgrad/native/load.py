"""Loads the C libraries once, and refuses a library that was built from other sources."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path
from typing import Any

from hushgrad.native import _abi

_HERE = Path(__file__).parent


class Library:
    """A C library; its attributes are the functions of abi.h, with their types, without the prefix ``hushgrad_``."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.handle = ctypes.CDLL(str(file))
        self._signatures = _abi.SIGNATURES["both"] | _abi.SIGNATURES[name]
        _check(self.handle, file)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._signatures:
            raise AttributeError(name)
        function = self.handle[f"hushgrad_{name}"]
        function.restype, function.argtypes = self._signatures[name]
        setattr(self, name, function)
        return function


def _check(handle: ctypes.CDLL, file: Path) -> None:
    """Refuse a library whose declarations or structs are not those of _abi.py: calls into it would overrun memory."""
    try:
        number = ctypes.c_uint64.in_dll(handle, "hushgrad_abi").value
    except ValueError:
        number = 0  # an old library without a checksum
    sizes = [ctypes.sizeof(struct) for struct in _abi.STRUCTS]
    if number == _abi.ABI:
        found = list((ctypes.c_uint64 * (1 + len(sizes))).in_dll(handle, "hushgrad_abi"))[1:]
        if found == sizes:
            return
    raise ImportError(
        f"The C library {file.name} does not fit this Python code (ABI {number}, expected {_abi.ABI}): it was built from other sources. "
        "Install hushgrad again (in a checkout: `make abi`), or set HUSHGRAD_KERNEL=numpy to do without the C libraries."
    )


def library(name: str, folder: Path = _HERE) -> Library | None:
    """The library ``name``; None if it was not built, or is for another machine: numpy and torch then do its work.

    HUSHGRAD_KERNEL=numpy in the environment disables all of them.
    """
    if os.environ.get("HUSHGRAD_KERNEL") == "numpy":
        return None
    built = sorted(folder.glob(f"_{name}.*.so"))
    if not built:
        if (folder / "abi.h").exists():  # a checkout: not built yet, or no compiler
            warnings.warn(
                f"The C library {name} is not built; numpy and torch do its work, more slowly. "
                "Run `pip install -e .` where there is a compiler, or set HUSHGRAD_KERNEL=numpy.",
                stacklevel=2,
            )
        return None
    try:
        return Library(name, built[0])
    except OSError as error:
        warnings.warn(f"The C library {name} could not be loaded ({error}); the slower way without it is used.", stacklevel=2)
        return None


EXACT = library("exact")
CONTRACTED = library("contracted")

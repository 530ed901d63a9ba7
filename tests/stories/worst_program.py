"""The search for the worst record on every path, in one of two processes: the program that ``test_release_placements`` starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))
import worst

from hushgrad.errors import HushgradError


def one(name: str, place: str, certified: bool, tries: int) -> float | str:
    try:
        return worst.search(name, tries=tries, seed=0, certified=certified, place=place).moved
    except HushgradError as error:
        return f"{type(error).__name__}: {error}"


def main(options: dict[str, Any]) -> dict[str, Any]:
    """What was found, by mode and path."""
    place, tries = options["place"], options["tries"]
    names = [name for name in worst.PATHS if name not in worst.ONE_PROCESS]
    modes = {"ordinary": False, "certified": True}
    return {mode: {name: one(name, place, certified, tries) for name in names} for mode, certified in modes.items()}

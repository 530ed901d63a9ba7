"""What a planted defect is, and how one is put into the real objects and taken out again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Defect:
    """A mistake that somebody could make in this library, and what it breaks.

    Args:
        name: in a few words.
        law: what no longer holds.
        bed: the run in :data:`hushgrad.testing.defects.BEDS` on which it shows.
        plant: a context inside of which the library has it.
    """

    name: str
    law: str
    bed: str
    plant: Plant


DEFECTS: dict[str, Defect] = {}
"""All of them by name."""


def defect(name: str, *, law: str, bed: str = "layers") -> Callable[[Callable[[], Iterator[None]]], Plant]:
    """Register a generator function that plants a defect, yields once and removes it."""

    def register(function: Callable[[], Iterator[None]]) -> Plant:
        plant = contextmanager(function)
        DEFECTS[name] = Defect(name, law, bed, plant)
        return plant

    return register


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """``owner.name`` is ``new`` inside.

    Raises:
        AttributeError: where there is nothing of that name: a defect that changes nothing would look like one that is missed.
    """
    inspect.getattr_static(owner, name)
    own, old = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, old)
        else:  # it was inherited
            delattr(owner, name)

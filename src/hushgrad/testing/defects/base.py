"""Planted defects: how they are put into the real objects and removed again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
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


def defect(name: str, *, law: str, bed: str = "layers") -> Callable[[Plant], Plant]:
    """Register a function that gives the context inside of which the library has a defect."""

    def register(plant: Plant) -> Plant:
        DEFECTS[name] = Defect(name, law, bed, plant)
        return plant

    return register


def wrong(owner: Any, method: str, name: str, *, law: str, bed: str = "layers") -> Callable[[Callable[..., Any]], Plant]:
    """Register a wrong method: it replaces ``owner.method``, which it gets as its first argument."""

    def register(mistaken: Callable[..., Any]) -> Plant:
        return defect(name, law=law, bed=bed)(lambda: replaced(owner, method, mistaken))

    return register


def replaced(owner: Any, method: str, mistaken: Callable[..., Any]) -> AbstractContextManager[None]:
    """``owner.method`` is ``mistaken`` inside, with the right one as its first argument.

    Raises:
        TypeError: if its arguments differ from the right one's: a defect that cannot be called would look like one that is caught.
    """
    right = getattr(owner, method)
    taken = inspect.signature(mistaken).parameters
    lacking = [name for name, one in inspect.signature(right).parameters.items() if not _takes(taken, name, one)]
    if lacking:
        raise TypeError(f"{mistaken} stands for {method} and does not take {lacking}")
    return patched(owner, method, lambda *args, **options: mistaken(right, *args, **options))


def _takes(taken: Mapping[str, inspect.Parameter], name: str, one: inspect.Parameter) -> bool:
    kinds = {parameter.kind for parameter in taken.values()}
    many = {one.VAR_KEYWORD} if one.kind is one.KEYWORD_ONLY else {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    return name in taken or bool(many & kinds)


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """``owner.name`` is ``new`` inside.

    Raises:
        AttributeError: if there is nothing of that name: a defect that changes nothing would look like one that is missed.
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

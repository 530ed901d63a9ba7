"""What the zoo keeps: a model, its records and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["RELATIONS", "Sizes", "Specimen"]


class Sizes(NamedTuple):
    """How many examples are in the batch, and how many tokens in an example (images have a size of their own)."""

    batch: int
    length: int


# Widths are 16 and heads 2 in most models here, so each of these makes sizes coincide that mean different things.
RELATIONS: dict[str, Sizes] = {
    "usual": Sizes(3, 6),
    "B=T": Sizes(4, 4),
    "T=1": Sizes(3, 1),
    "B=heads": Sizes(2, 6),
    "B=width": Sizes(16, 6),
}


@dataclass(frozen=True)
class Specimen:
    """A model as a user would have it; ``build`` is called with a fixed seed, ``records`` makes one list per relation of sizes.

    ``refusal`` says why a private run must refuse it where the gradients of a batch do not show it (a capacity, say).
    """

    name: str
    build: Callable[[], nn.Module]
    records: Callable[[Sizes], list[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    collate: Callable[[list[Any]], Any] | None = None
    batchnorm: bool = False  # replaced by GroupNorm first, as the library tells its users to
    reduction: str = "mean"
    relations: tuple[str, ...] = tuple(RELATIONS)
    refusal: str = ""
    empty: Callable[[], Any] | None = None  # the batch without examples, compared in place of the records

    @property
    def family(self) -> str:
        """The package that it comes from."""
        return self.name.partition("/")[0]

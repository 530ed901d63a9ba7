"""Independent noise: row t is z_t."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from hushgrad.noise._kernel import Piece
from hushgrad.noise.devices import Turn
from hushgrad.noise.source import Source
from hushgrad.noise.streams.ordered import Lane, OrderedStream


@final
class IndependentStream(OrderedStream):
    """Row t = z_t (C = identity): no state but the step.

    >>> import torch
    >>> source = Source(seed=1)
    >>> stream = IndependentStream(source)
    >>> torch.equal(stream.row(0, 0, torch.empty(3)), source.z(0, 0, torch.empty(3)))
    True
    """

    _on_grid = True

    def __init__(self, source: Source, *, steps: int | None = None) -> None:
        super().__init__(source, steps=steps)

    def _sizes(self) -> Mapping[str, int]:
        return {}

    def _turn(self, step: int) -> Turn:
        return Turn(step)

    def _advance_all(self, step: int, lanes: Sequence[Lane], pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        self._source.draw(
            step, pieces, scale, fresh=fresh, finished=True
        )  # nothing to update, so all of a model's tensors take one call

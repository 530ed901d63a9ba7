"""What the examples of batches were seen to differ in: a loss that divides by it shows only where they do.

Class weights show where two classes of different weight meet, and a mean over the labels that count where somebody has fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hushgrad.clipping.proof.inputs import leaves

_CLASSES = 64  # of a tensor that has one whole number for each example; more are no classes

Held = Callable[[Any], Tensor | None]  # of a tensor: how much each example holds of what pads rows; for scalars, the numbers


class Variety:
    """Tensors by their place in a batch: the classes that were seen together, and the least numbers, which pad rows."""

    def __init__(self) -> None:
        self._least: dict[int, float] = {}
        self._together: dict[int, set[int]] = {}  # classes that were seen beside one of these
        self._all: dict[int, set[int]] = {}  # and any

    def shown(self, batch: Any, held: Held) -> set[int]:
        """Examples that differ from others in a new way, one for each way at least."""
        found: set[int] = set()
        for k, t, much in _differing(batch, held):
            if not _has_classes(t):
                found |= {int(much.argmax())} if _least(t, len(much)) < self._least.get(k, float("inf")) else set()
            elif len(self._all.get(k, ())) < _CLASSES:
                known = self._together.get(k, set())
                found |= {int((much == one).nonzero()[0]) for one in set(much.tolist()) - known}
        return found

    def add(self, batch: Any, held: Held) -> None:
        """These were tried."""
        for k, t, much in _differing(batch, held):
            if not _has_classes(t):
                self._least[k] = min(self._least.get(k, float("inf")), _least(t, len(much)))
                continue
            now = set(much.tolist())
            self._all[k] = self._all.get(k, set()) | now
            if k not in self._together or now & self._together[k]:
                self._together[k] = self._together.get(k, set()) | now


def _differing(batch: Any, held: Held) -> Iterator[tuple[int, Tensor, Tensor]]:
    for k, t in enumerate(leaves(batch)):
        much = held(t)
        if much is not None and bool((much != much[0]).any()):
            yield k, t, much


def _has_classes(t: Tensor) -> bool:
    return t.dim() == 1 and not t.is_floating_point()


def _least(t: Tensor, counted: int) -> float:
    return 0.0 if t.dim() == 1 else float(t.detach()[:counted].min())

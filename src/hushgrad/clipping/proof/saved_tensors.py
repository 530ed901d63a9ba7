"""What a forward saves for backward, so that a node can be asked once more with finite numbers in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["Packing"]

_LARGE = 1e15  # products of two such numbers are finite in single precision


class Packing:
    """What a forward saves for backward, kept as it is, and handed out with finite numbers inside :meth:`finite`."""

    def __init__(self) -> None:
        self._finite = self._bounded = False

    def pack(self, t: Tensor) -> tuple[Tensor, int]:
        """Keep a tensor, and how often it was changed so far."""
        t = t.detach()
        return t, t._version

    def unpack(self, kept: tuple[Tensor, int]) -> Tensor:
        """The tensor, if it is as it was: with hooks torch does not look itself."""
        t, version = kept
        if t._version != version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation")
        if not self._finite or not t.is_floating_point():
            return t
        t = t.nan_to_num(0.0, 0.0, 0.0)
        return t.clamp(-_LARGE, _LARGE) if self._bounded else t

    @contextmanager
    def finite(self, *, bounded: bool) -> Iterator[None]:
        """Inside, numbers that are not finite are 0; ``bounded``: and large ones are smaller."""
        self._finite, self._bounded = True, bounded
        try:
            yield
        finally:
            self._finite = self._bounded = False

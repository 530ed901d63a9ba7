"""Intercepts the tensors that a forward saves for backward, so that a node can be called again with finite numbers in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_LARGE = 1e15  # products of two such numbers are finite in single precision


def as_they_are(t: Tensor) -> Tensor:
    """A saved tensor where none is replaced."""
    return t


class Packing:
    """Saved-tensor hooks that keep tensors as they are, and hand out finite versions inside :meth:`finite`."""

    def __init__(self) -> None:
        self._finite = self._bounded = False

    def pack(self, t: Tensor) -> tuple[Tensor, int]:
        """Keep a tensor with its version."""
        t = t.detach()
        return t, t._version

    def unpack(self, kept: tuple[Tensor, int]) -> Tensor:
        """The tensor, if it was not modified in place: torch does not check this for tensors behind hooks."""
        t, version = kept
        if t._version != version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation")
        return self.handed(t)

    def handed(self, t: Tensor) -> Tensor:
        """A saved tensor as a node gets it now."""
        if not self._finite or not t.is_floating_point():
            return t
        t = t.nan_to_num(0.0, 0.0, 0.0)
        return t.clamp(-_LARGE, _LARGE) if self._bounded else t

    @contextmanager
    def finite(self, *, bounded: bool) -> Iterator[None]:
        """Inside, non-finite numbers are replaced by 0; ``bounded``: and large ones are reduced."""
        self._finite, self._bounded = True, bounded
        try:
            yield
        finally:
            self._finite = self._bounded = False

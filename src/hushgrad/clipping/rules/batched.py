"""Layers that torch lets be called on one example without a batch dimension: then there are no rows to tell apart."""

from __future__ import annotations

from hushgrad.clipping.base import Record
from hushgrad.errors import CaptureError

__all__ = ["require_batch"]


def require_batch(record: Record, dims: int) -> None:
    """Refuse an input of fewer than ``dims`` dimensions, of which the first holds the examples."""
    if record.x.dim() < dims:
        raise CaptureError(f"{type(record.module).__name__} got a single example without a batch dimension. Write x[None].")

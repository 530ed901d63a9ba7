"""Properties of a layer's input: whether it has a batch dimension, and whether it is strided."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hushgrad.clipping.base import Record
from hushgrad.errors import CaptureError


def require_batch(record: Record, dims: int) -> None:
    """Refuse an input of fewer than ``dims`` dimensions, of which the first holds the examples."""
    if record.x.dim() < dims:
        raise CaptureError(f"{type(record.module).__name__} got a single example without a batch dimension. Write x[None].")


def is_strided(value: Any, *, bias: bool, turned: bool = False) -> bool:
    """Whether torch multiplies this input batch by batch if the weight requires no gradient; ``turned``: with time first."""
    if not isinstance(value, Tensor) or value.dim() < 3:
        return False
    if turned:
        value = value.transpose(0, 1)
    # A dimension of 1 may have any stride; torch calls that contiguous, and without a bias multiplies as if it were not.
    return not value.is_contiguous() or (not bias and 1 in value.shape)

"""The widest floating-point type of a device: double precision, or single where that is missing (Apple's devices, some of Intel's)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hushgrad.errors import ArgumentError

_TILE = 1024  # numbers summed at a time: a long single-precision sum would lose small terms


@lru_cache(maxsize=64)
def widest_dtype(device: torch.device) -> torch.dtype:
    """float64 if the device has it, else float32."""
    if device.type == "cpu":
        return torch.float64
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # torch raises either
        return torch.float32
    return torch.float64


def widest(t: Tensor) -> Tensor:
    """``t`` in the widest type of its device."""
    return t.double() if t.is_cpu else t.to(widest_dtype(t.device))


def widest_sq_norms(rows: Tensor) -> Tensor:
    """The squared norm of each row, (B, n) -> (B,)."""
    if widest_dtype(rows.device) is torch.float64:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
    tiles = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % _TILE)).unflatten(1, (-1, _TILE))
    return tiles.square().sum(2).sum(1)


def require_double(device: torch.device, what: str) -> None:
    """Refuse ``what`` on a device without double precision.

    Raises:
        ArgumentError: with the remedy.
    """
    if widest_dtype(device) is not torch.float64:
        raise ArgumentError(
            f"Expected device={str(device)!r} to have double precision for {what}. Leave it out, or train in main memory."
        )

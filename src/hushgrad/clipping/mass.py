"""Norms in double precision, and the mass of an example: the size of its parts before they cancel.

A weighted sum adds an example's parts w g_t x_t^T one by one to the sum of all others. Parts that are far larger than their own sum destroy
low-order bits of the others, whatever the norm of that sum is. The *mass* m = sum_t ‖x_t‖ ‖g_t‖ >= ‖G‖ bounds this effect. An example with
w m above a cap times the clip norm is *heavy*: its gradient is formed alone, measured, clipped by the norm of what was formed, and added as
one term (see :mod:`hushgrad.clipping.heavy_units`).
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad._precision import widest, widest_dtype, widest_sq_norms
from hushgrad.clipping import _fused

# Beyond this ‖x‖² or ‖g‖² a row's products are formed separately: w g may be too small for single precision.
WILD = 2.0**160
_LEAST_CAP = 64.0
_CHUNK = 1 << 22  # doubles at a time when torch widens a tensor


class Mass(NamedTuple):
    """Each example's mass for one parameter (B,), where it may exceed the norm, and the number of parts that it sums."""

    rows: Tensor
    parts: int


def cap(parts: int) -> float:
    """The largest w m / C of an example that is added part by part: 4 sqrt(parts); parts of random signs reach a quarter of it."""
    return max(_LEAST_CAP, 4 * sqrt(parts))


def sq_norm(G: Tensor) -> Tensor:
    """The squared norm of each example's part in double precision: (B, ...) -> (B,)."""
    rows = G.reshape(G.shape[0], G.shape[1:].numel())
    if G.numel() == 0:
        return torch.zeros(G.shape[0], dtype=widest_dtype(G.device), device=G.device)
    made = _fused.sq_norms(rows)
    if made is not None:
        return made
    step = max(1, _CHUNK // rows.shape[1])
    return torch.cat([widest_sq_norms(some) for some in rows.split(step)])


def gram(x: Tensor) -> Tensor:
    """x_i x_i^T of each matrix in x (B, T, d), in double precision."""
    made = _fused.gram(x)
    if made is None:
        x = widest(x)
        made = torch.bmm(x, x.transpose(1, 2))
    return made


def outer_mass(sq_x: Tensor, sq_g: Tensor) -> Mass:
    """sum_t ‖x_t‖ ‖g_t‖ from the squares (B, T); infinite where a row is too large for products in single precision."""
    mass = (sq_x * sq_g).sqrt_().sum(1)
    wild = ((sq_x > WILD) | (sq_g > WILD)).any(1)
    return Mass(mass.masked_fill_(wild, inf), sq_x.shape[1])

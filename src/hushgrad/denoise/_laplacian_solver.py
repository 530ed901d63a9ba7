r"""A_σ⁻¹ v for a vector, in O(d) for every length: convolution with the kernel tanh(θ/2) α^|k|, α = exp(-θ).

On an infinite line A_σ⁻¹ is that convolution (Lemma 18 of DP-LSSGD). On a finite one the images of v beyond its ends, periodic
or mirrored, act like one ghost cell on each side, since all that lies to the left of index 0 reaches index i with the factor
α^(i+1). So with the states

    before[i] = Σ_{j<i} α^(i-1-j) v[j]   (forward recursion, started from the left ghost)
    after[i]  = Σ_{j>i} α^(j-i-1) v[j]   (backward recursion, started from the right ghost)

A_σ⁻¹ v = tanh(θ/2) (v + α before + α after). In float32 the two recursions are run in C (native/denoise), a block at a time in the
cache. Without that library, and for float64: torch has no scan, and a loop over d elements is out of the question; so v is cut
into blocks of 48: inside a block the sum is one matrix product, between blocks the states form the same recursion on d / 48
elements, which is cut again. No approximation is made, and no length is slow (an FFT of prime length costs 5 to 50 times a
smooth one, and at 1e7 even a smooth one costs several times this).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad import _aligned_memory
from hushgrad.denoise._c_kernels import FUSED, fits
from hushgrad.denoise.smoothing_factors import decay_rate

_BLOCK = 48  # measured: 24 to 96 are within 20 % of one another in float32
_ROWS = 8192  # blocks per matrix product: 1.6 MB of float32, which the second-level cache holds
_NEGLIGIBLE = 46.0  # exp(-46) = 1e-20: the share of the kernel beyond, invisible in float64; kept, it makes slow subnormals
_UNFELT = 24.0  # exp(-24) = 4e-11: the same for float32
_SHORT = 0.05  # a plain recursion in float32 is off by up to 6e-8 / rate, so kernels that reach farther are left to the products


class _Tables(NamedTuple):
    """Constants of one block: powers of α in the working precision."""

    inside: Tensor  # (B, B): α^|i-j| tanh(θ/2); its outer columns sum a block up for the blocks before and after it
    spread: Tensor  # (2, B): how the states from both sides reach into a block


def _powers(rate: float, exponents: Tensor, like: Tensor) -> Tensor:
    powers = torch.exp(-rate * exponents)
    return powers.masked_fill_(rate * exponents > _NEGLIGIBLE, 0.0).to(device=like.device, dtype=like.dtype)


@lru_cache(maxsize=256)
def _tables(rate: float, size: int, dtype: torch.dtype, device: torch.device) -> _Tables:
    like = torch.empty(0, dtype=dtype, device=device)
    i = torch.arange(size, dtype=torch.float64)
    scale = math.tanh(rate / 2)
    return _Tables(
        inside=_powers(rate, (i[:, None] - i).abs(), like) * scale, spread=_powers(rate, torch.stack([i + 1, size - i]), like)
    )


@lru_cache(maxsize=256)
def _triangle(rate: float, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Strictly upper α^(k-1-j), which maps a block to its size + 1 states, and the row α^k, which adds the starting state."""
    like = torch.empty(0, dtype=dtype, device=device)
    k, j = torch.arange(size + 1, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    return _powers(rate, (k - 1 - j).clamp_min(0), like).triu(1), _powers(rate, k, like)[None]


def _states(x: Tensor, rate: float, start: Tensor) -> Tensor:
    """All n + 1 states of s[0] = start, s[k+1] = x[k] + exp(-rate) s[k]."""
    n = x.numel()
    if n <= _BLOCK:
        inside, spread = _triangle(rate, n, x.dtype, x.device)
        return x @ inside + start * spread[0]
    inside, spread = _triangle(rate, _BLOCK, x.dtype, x.device)
    blocks = n // _BLOCK
    body, tail = x[: blocks * _BLOCK].view(blocks, _BLOCK), x[blocks * _BLOCK :]
    between = _states(body @ inside[:, -1], rate * _BLOCK, start)
    out = x.new_empty(n + 1)
    out_body = out[: blocks * _BLOCK].view(blocks, _BLOCK)
    torch.mm(body, inside[:, :-1], out=out_body)
    out_body.addmm_(between[:-1, None], spread[:, :-1])
    out[blocks * _BLOCK :] = _states(tail, rate, between[-1])
    return out


def _ghosts(v: Tensor, rate: float, boundary: str) -> tuple[Tensor, Tensor]:
    """The cells at -1 and at d that stand for everything beyond the ends, times tanh(θ/2)."""
    d = v.numel()
    reach = int(min(d, _NEGLIGIBLE / rate + 1))
    weights = _powers(rate, torch.arange(reach, dtype=torch.float64), v) * math.tanh(rate / 2)
    from_left, from_right = weights @ v[:reach], weights @ v[d - reach :].flip(0)
    if boundary == "periodic":
        whole = -math.expm1(-rate * d)
        return from_right / whole, from_left / whole
    whole, once = -math.expm1(-2 * rate * d), math.exp(-rate * d)  # mirrored: the images have period 2d
    return (from_left + once * from_right) / whole, (from_right + once * from_left) / whole


def _fresh(v: Tensor) -> Tensor:
    """An uninitialised tensor like ``v``; large pages save a third of the time."""
    return _aligned_memory.empty(v.shape, v.dtype) if v.is_cpu else torch.empty_like(v)


def smooth_vector(v: Tensor, sigma: float, boundary: str) -> Tensor:
    """A_σ⁻¹ v as a fresh tensor, for a contiguous 1-D ``v`` in float32 or float64; ``boundary`` is "periodic" or "neumann"."""
    if sigma == 0 or v.numel() < 2:
        return v.clone()  # with one cell both neighbours are the cell itself: A_σ = 1
    rate = decay_rate(sigma)
    before, after = _ghosts(v, rate, boundary)
    if FUSED is not None and fits(v) and rate >= _SHORT:
        out, scale, reach = _fresh(v), math.tanh(rate / 2), int(_UNFELT / rate) + 1
        ghosts = {"before": float(before) / scale, "after": float(after) / scale}
        FUSED.smooth(v, out, alpha=math.exp(-rate), scale=scale, reach=reach, **ghosts)
        return out
    return _by_products(v, rate, before, after)


def _by_products(v: Tensor, rate: float, before: Tensor, after: Tensor) -> Tensor:
    block = _tables(rate, _BLOCK, v.dtype, v.device)
    blocks = v.numel() // _BLOCK
    cut = blocks * _BLOCK
    out = _fresh(v)
    out_body, out_tail = out[:cut].view(blocks, _BLOCK), out[cut:]
    edges = _locally(v[:cut].view(blocks, _BLOCK), block.inside, out_body)
    last = _tables(rate, out_tail.numel(), v.dtype, v.device)
    torch.mv(last.inside, v[cut:], out=out_tail)
    beyond = math.exp(-rate * out_tail.numel()) * after
    backward = _states(edges[:, 0].flip(0), rate * _BLOCK, out_tail[0] + beyond if out_tail.numel() else beyond)
    forward = _states(edges[:, 1].contiguous(), rate * _BLOCK, before)
    out_body.addmm_(torch.stack([forward[:-1], backward[:-1].flip(0)], dim=1), block.spread)
    out_tail += torch.stack([forward[-1], after]) @ last.spread
    return out


def _locally(body: Tensor, inside: Tensor, out: Tensor) -> Tensor:
    """Each block smoothed as if alone, into ``out``; returns the outer columns, which are the blocks' sums for their neighbours."""
    edges = body.new_empty(len(body), 2)
    for piece, target, edge in zip(*(torch.split(t, _ROWS) for t in (body, out, edges)), strict=True):
        torch.mm(piece, inside, out=target)
        edge.copy_(target[:, :: _BLOCK - 1])  # now, while the rows are in the cache
    return edges

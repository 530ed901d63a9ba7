"""A_σ⁻¹ on a grid: the inverse of I - σ (L_1 + ... + L_k) over the last k axes of a tensor."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_DENSE = 256  # up to this many cells (every convolution kernel in use) one matrix product is the fastest way


def _laplacian(size: int, boundary: str) -> Tensor:
    """The (size, size) matrix -L of one axis; with one or two cells a neighbour may be the cell itself, or the same one twice."""
    out = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in (i - 1, i + 1):
            if boundary == "neumann" and not 0 <= j < size:
                continue
            out[i, i] += 1
            out[i, j % size] -= 1
    return out


@lru_cache(maxsize=64)
def _inverse(sizes: tuple[int, ...], sigma: float, boundary: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    operator = torch.zeros(1, 1, dtype=torch.float64)
    for size in sizes:  # the Kronecker sum, axis by axis
        axis = _laplacian(size, boundary)
        old = operator
        operator = torch.kron(old, torch.eye(size, dtype=torch.float64)) + torch.kron(
            torch.eye(len(old), dtype=torch.float64), axis
        )
    cells = math.prod(sizes)
    inverse: Tensor = torch.linalg.inv(torch.eye(cells, dtype=torch.float64) + sigma * operator)
    return inverse.to(device=device, dtype=dtype)


def _spectrum(sizes: tuple[int, ...], sigma: float, like: Tensor) -> Tensor:
    """Eigenvalues 1 + Σ 2σ (1 - cos(2πi/size)) of A_σ, laid out like the output of ``rfftn``."""
    total = torch.ones((), dtype=torch.float64)
    for size in sizes:
        angles = torch.arange(size, dtype=torch.float64) * (2 * math.pi / size)
        total = total[..., None] + 4 * sigma * torch.sin(angles / 2) ** 2
    return total[..., : sizes[-1] // 2 + 1].to(device=like.device, dtype=like.dtype)


def _mirrored(x: Tensor, axes: int) -> Tensor:
    """Even extension: the periodic operator on twice the grid acts on it as the Neumann operator acts on ``x``."""
    for axis in range(-axes, 0):
        x = torch.cat([x, x.flip(axis)], dim=axis)
    return x


def smooth_grid(x: Tensor, sigma: float, boundary: str, axes: int) -> Tensor:
    """A_σ⁻¹ over the last ``axes`` axes of ``x`` (float32 or float64), as a fresh tensor."""
    sizes = tuple(x.shape[-axes:])
    cells = math.prod(sizes)
    if sigma == 0 or cells < 2 or x.numel() == 0:
        return x.clone()
    if cells <= _DENSE:
        inverse = _inverse(sizes, sigma, boundary, x.dtype, x.device)
        return (x.reshape(-1, cells) @ inverse).view(x.shape)
    extended = x if boundary == "periodic" else _mirrored(x, axes)
    shape = tuple(extended.shape[-axes:])
    dims = tuple(range(-axes, 0))
    spectrum = torch.fft.rfftn(extended, dim=dims) / _spectrum(shape, sigma, x)
    out: Tensor = torch.fft.irfftn(spectrum, s=shape, dim=dims)
    for axis, size in zip(dims, sizes, strict=True):
        out = out.narrow(axis, 0, size)
    return out.contiguous()

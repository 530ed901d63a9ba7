"""Laplacian smoothing of the privatised gradient: DP-LSSGD with SGD, DP-LSAdam with Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise._laplacian_solver import smooth_vector
from hushgrad.denoise.base import Denoiser, NoiseInfo, working_dtype

_SCOPES = ("tensor", "global", "grid")
_BOUNDARIES = ("periodic", "neumann")


@dataclass(frozen=True)
class Laplacian(Denoiser):
    r"""Laplacian smoothing A_σ⁻¹ g, with A_σ = I - σ L and L the discrete Laplacian: it averages neighbouring coordinates.

    **Formal guarantee.** Post-processing, so no privacy is spent. ‖A_σ⁻¹ g‖ <= ‖g‖, the mean over each smoothed signal is kept,
    and of the noise's variance the share :func:`hushgrad.denoise.beta` is left.

    | ``scope`` | what is smoothed |
    |---|---|
    | ``"tensor"`` | each tensor, flattened row by row: neighbours are neighbouring inputs of one unit |
    | ``"global"`` | all tensors as one vector (Algorithm 1 of the paper), in the order of the parameters |
    | ``"grid"`` | convolution weights over their spatial axes; matrices over ``grid``, where it divides their rows |

    One-dimensional tensors (biases, norm gains) pass unchanged unless ``skip_1d=False``, since their neighbours are unrelated
    classes or channels. Under ``"grid"`` a matrix passes unchanged unless ``grid=(height, width)`` says what picture its rows are
    (channels, if any, come first). ``boundary`` is "periodic", as in the paper, or "neumann" (nothing flows over the ends).

    >>> Laplacian(1.0).smooth(torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0]))
    tensor([0.4545, 0.9091, 2.2727, 0.9091, 0.4545])

    Reference: Wang et al., "DP-LSSGD", MSML 2020, Algorithm 1; Osher et al., "Laplacian smoothing gradient descent", 2018.
    """

    papers = (
        _papers.Paper(
            "wang2020lssgd",
            "Wang, Bao and Gu, Quanquan and Boedihardjo, March and Wang, Lingxiao and Barekat, Farzin and Osher, Stanley J.",
            "{DP-LSSGD}: A Stochastic Optimization Method to Lift the Utility in Privacy-Preserving {ERM}",
            "MSML",
            arxiv="1906.12056",
        ),
    )

    sigma: float = 1.0
    scope: str = field(default="tensor", kw_only=True)
    boundary: str = field(default="periodic", kw_only=True)
    grid: tuple[int, ...] | None = field(default=None, kw_only=True)
    skip_1d: bool = field(default=True, kw_only=True)

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(1.0), cls(3.0, scope="global", boundary="neumann"), cls(0.5, scope="grid", skip_1d=False))

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        return (cls(0.0), cls(0.0, scope="global"), cls(0.0, scope="grid", skip_1d=False))

    def __post_init__(self) -> None:
        remedy = "Use sigma=0 for no smoothing; 1 to 3 are common, and beyond 1e12 every signal is its mean."
        object.__setattr__(self, "sigma", _check.between(0, 1e12, closed="both", sigma=self.sigma, remedy=remedy))
        _check.one_of(_SCOPES, scope=self.scope)
        _check.one_of(_BOUNDARIES, boundary=self.boundary)
        _check.instance(bool, skip_1d=self.skip_1d)
        if self.grid is None:
            return
        if self.scope != "grid":
            _check.fail("grid", self.grid, 'to be None unless scope="grid"', 'Add scope="grid".')
        sizes: tuple[int, ...] = _check.instance((tuple, list), grid=self.grid, remedy="Write for example grid=(28, 28).")
        object.__setattr__(self, "grid", tuple(_check.positive_int(grid=size) for size in sizes))
        if not sizes:
            _check.fail("grid", self.grid, "to name at least one axis", "Write for example grid=(28, 28).")

    @property
    def needs_whole_tensor(self) -> bool:
        """Yes, if sigma > 0: neighbours may be in different shards."""
        return self.sigma > 0

    @property
    def needs_all_tensors(self) -> bool:
        """Yes under "global", if sigma > 0: neighbours may be in different tensors."""
        return self.scope == "global" and self.sigma > 0

    def smooth(self, tensor: Tensor) -> Tensor:
        """A_σ⁻¹ of one signal, in its shape and dtype; here no tensor is skipped, and under "grid" a matrix is a picture."""
        with torch.no_grad():
            if self.sigma == 0:
                return tensor.clone()
            if self.scope == "grid" and tensor.ndim >= 2:
                shape, axes = self._picture(tensor) or (tuple(tensor.shape), 2)
                return self._on_grid(tensor, shape, axes)
            return self._on_line(tensor)

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            if self.scope == "global" and self.sigma > 0:
                return self._globally(grads)
            return {name: self._one(grad) for name, grad in grads.items()}

    def _skipped(self, grad: Tensor) -> bool:
        return self.sigma == 0 or (self.skip_1d and grad.ndim < 2)

    def _one(self, grad: Tensor) -> Tensor:
        if self._skipped(grad):
            return grad.clone()
        if self.scope == "tensor" or grad.ndim < 2:
            return self._on_line(grad)
        picture = self._picture(grad)
        return grad.clone() if picture is None else self._on_grid(grad, *picture)

    def _on_line(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().to(working_dtype(tensor)).reshape(-1).contiguous()
        return smooth_vector(flat, self.sigma, self.boundary).view(tensor.shape).to(tensor.dtype)

    def _on_grid(self, tensor: Tensor, shape: tuple[int, ...], axes: int) -> Tensor:
        signal = tensor.detach().to(working_dtype(tensor)).reshape(shape)
        return smooth_grid(signal, self.sigma, self.boundary, axes).view(tensor.shape).to(tensor.dtype)

    def _picture(self, tensor: Tensor) -> tuple[tuple[int, ...], int] | None:
        """The shape in which a weight's last axes are spatial, and how many they are; None for a matrix of unknown layout."""
        if tensor.ndim > 2:  # (out, in, *kernel), as in every convolution of torch
            return tuple(tensor.shape), tensor.ndim - 2
        if self.grid is None or tensor.shape[-1] % math.prod(self.grid) != 0:
            return None
        return (*tensor.shape[:-1], tensor.shape[-1] // math.prod(self.grid), *self.grid), len(self.grid)

    def _globally(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = [grad for grad in grads.values() if not self._skipped(grad)]
        devices = sorted({str(grad.device) for grad in kept})
        if len(devices) > 1:
            _check.fail("scope", self.scope, f"to meet tensors on one device, not on {', '.join(devices)}", 'Use scope="tensor".')
        smoothed = self._pieces(kept)
        return {name: grad.clone() if self._skipped(grad) else next(smoothed) for name, grad in grads.items()}

    def _pieces(self, kept: list[Tensor]) -> Iterator[Tensor]:
        if not kept:
            return
        dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in kept) else torch.float32
        whole = smooth_vector(torch.cat([grad.detach().to(dtype).reshape(-1) for grad in kept]), self.sigma, self.boundary)
        for grad, piece in zip(kept, torch.split(whole, [grad.numel() for grad in kept]), strict=True):
            yield piece.view(grad.shape).to(grad.dtype, copy=True)


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

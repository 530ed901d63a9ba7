"""Convolutions in one, two and three dimensions, with groups, stride, dilation and every padding mode.

With the input padded beforehand and o ranging over the offsets of the kernel's taps,
G_i[:, :, o] = sum_t g[i,:,t] x[i,:,stride t + o]^T. Three exact ways:

| way | squared norm and weighted sum | cheapest where |
|---|---|---|
| offsets | one batched matrix product per offset makes G, which is kept | many channels, large images |
| unfold | one batched matrix product over a chunk of patches that fits the cache makes G, which is kept | few channels |
| Gram | sum_{t,s} <g_t, g_s> sum_o <x_{t+o}, x_{s+o}>, then the native weight gradient of w g | many channels, small images |

The Gram matrix of the patches is a sum of shifted copies of the pixels' Gram matrix: T² C_in + |o| T² multiply-adds instead of
T² C_in |o|, and no patch is ever copied. It needs stride 1.

Reference: Bu, Mao, Xu, "Scalable and efficient training of large convolutional neural networks with differential privacy"
(NeurIPS 2022), for the choice between Gram and kept gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping.base import Record, Rule, add_kept, rule, sq_norm

__all__ = ["Conv", "Geometry", "per_example_kernel"]

_KEEP_AT_MOST = 1 << 26  # floats of per-example gradients that one layer may keep (256 MB in single precision)
_CACHE = 1 << 18  # floats of unfolded patches at a time (1 MB in single precision: they stay in the cache)
_FEW_CHANNELS = 16  # below, a product per offset is too thin to be fast


class Geometry(NamedTuple):
    """A convolution over an input that is already padded."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Where the kernel's taps lie, in input pixels."""
        return list(product(*(range(0, k * d, d) for k, d in zip(self.kernel, self.dilation, strict=True))))


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Rule):
    """Offsets, unfold or shifted Gram, by shape; the weighted sum is the native weight gradient or a matrix-vector product."""

    parameters = frozenset({"weight", "bias"})

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """G_i of the kernel by offsets or patches, of the bias by a sum over positions."""
        made = {}
        if "weight" in record.names:
            made["weight"] = per_example_kernel(_padded(record), record.g, _geometry(record.module))
        if "bias" in record.names:
            made["bias"] = record.g.flatten(2).sum(2)
        return made

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """Make and keep G where that is cheaper than the Gram matrices; the bias' gradient is always kept."""
        if "bias" in record.names:
            record.kept["bias"] = record.g.flatten(2).sum(2)
        norms = {name: sq_norm(G) for name, G in record.kept.items()}
        if "weight" in record.names:
            geometry = _geometry(record.module)
            if _prefers_gram(record.x, record.g, geometry):
                norms["weight"] = _gram_sq_norm(_padded(record), record.g, geometry)
            else:
                record.kept["weight"] = per_example_kernel(_padded(record), record.g, geometry)
                norms["weight"] = sq_norm(record.kept["weight"])
        return norms

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """w^T G of what was kept; else the native weight gradient of w g."""
        for name in record.names:
            if name in record.kept:
                add_kept(out[name], record.kept[name], weights[name])
            elif name == "weight":
                out[name].add_(_native(record, weights[name]))
            else:
                add_kept(out[name], record.g.flatten(2).sum(2), weights[name])


def per_example_kernel(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The kernel's gradient for each example, from the padded input: (B, C_out, C_in / groups, *kernel)."""
    B, channels = x.shape[:2]
    if B == 0 or g.numel() == 0:
        return g.new_zeros(B, g.shape[1], channels // geometry.groups, *geometry.kernel)
    if prod(geometry.kernel) > 1 and channels // geometry.groups < _FEW_CHANNELS:
        return _by_patches(x, g, geometry)
    return _by_offsets(x, g, geometry)


def _by_offsets(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """One product per offset. At stride 1 the input is never copied, only laid out channels-last once.

    The output grid is embedded in the padded input's grid (zeros in between), so that the pixels under one offset are one
    contiguous run of rows, starting at the offset's place.
    """
    B, C_in, *size = x.shape
    C_out, out_size, groups = g.shape[1], g.shape[2:], geometry.groups
    G = g.new_empty(prod(geometry.kernel), B * groups, C_out // groups, C_in // groups)
    dense = all(s == 1 for s in geometry.stride)
    if dense:
        g = F.pad(g, [edge for full, used in zip(size[:0:-1], out_size[:0:-1], strict=True) for edge in (0, full - used)])
    g = g.reshape(B * groups, C_out // groups, -1)
    run = g.shape[2]
    x = x.reshape(B * groups, C_in // groups, *size)
    if dense:
        x = x.flatten(2).transpose(1, 2).contiguous()
        last = sum(o * prod(size[axis + 1 :]) for axis, o in enumerate(geometry.offsets[-1]))
        short = last + run - x.shape[1]  # the last rows meet only zeros of g
        run -= max(0, short)
        g = g[:, :, :run]
    for k, offset in enumerate(geometry.offsets):
        if dense:
            start = sum(o * prod(size[axis + 1 :]) for axis, o in enumerate(offset))
            rows = x[:, start : start + run]
        else:
            taps = (slice(o, o + (n - 1) * s + 1, s) for o, n, s in zip(offset, out_size, geometry.stride, strict=True))
            window = x[(slice(None), slice(None)) + tuple(taps)]  # noqa: RUF005 (Python 3.10 has no star in subscripts)
            rows = window.flatten(2).transpose(1, 2)
        torch.bmm(g, rows, out=G[k])
    return G.view(-1, B, C_out, C_in // groups).permute(1, 2, 3, 0).reshape(B, C_out, C_in // groups, *geometry.kernel)


def _by_patches(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """One product over unfolded patches, a few examples at a time."""
    B, C_in, C_out, groups = x.shape[0], x.shape[1], g.shape[1], geometry.groups
    taps, positions = prod(geometry.kernel), prod(g.shape[2:])
    G = g.new_empty(B * groups, C_out // groups, C_in // groups * taps)
    g = g.reshape(B * groups, C_out // groups, positions)
    step = max(1, _CACHE // (C_in * taps * positions))
    for start in range(0, B, step):
        part = x[start : start + step]
        patches = _patches(part, geometry).reshape(len(part) * groups, -1, positions)
        some = slice(start * groups, (start + len(part)) * groups)
        torch.bmm(g[some], patches.transpose(1, 2), out=G[some])
    return G.view(B, C_out, C_in // groups, *geometry.kernel)


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """A strided view of all patches: (B, C_in, *kernel, *output size)."""
    out = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, d, s in zip(x.shape[2:], geometry.kernel, geometry.dilation, geometry.stride, strict=True)
    ]
    steps = x.stride()[2:]
    taps = [step * d for step, d in zip(steps, geometry.dilation, strict=True)]
    moves = [step * s for step, s in zip(steps, geometry.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *geometry.kernel, *out), (*x.stride()[:2], *taps, *moves), x.storage_offset())


def _prefers_gram(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    """Compare the multiply-adds that each way spends on top of the weighted sum."""
    if any(s != 1 for s in geometry.stride) or geometry.groups != 1:
        return False
    positions, taps = prod(g.shape[2:]), prod(geometry.kernel)
    pixels = prod(x.shape[2:])
    floats = x.shape[1] * g.shape[1] * taps
    gram = positions**2 * g.shape[1] + pixels**2 * x.shape[1] + 4 * taps * positions**2
    return gram < 24 * floats or x.shape[0] * floats > _KEEP_AT_MOST


def _gram_sq_norm(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """sum_{t,s} <g_t, g_s> sum_o <x_{t+o}, x_{s+o}>, example by example in blocks that fit the cache."""
    B, size, out_size = x.shape[0], x.shape[2:], g.shape[2:]
    pixels, positions = prod(size), prod(out_size)
    norms = g.new_zeros(B)
    step = max(1, 4 * _CACHE // (pixels * pixels))
    for start in range(0, B, step):
        flat_x, flat_g = x[start : start + step].flatten(2), g[start : start + step].flatten(2)
        gram_x = torch.bmm(flat_x.transpose(1, 2), flat_x).view(-1, *size, *size)
        gram_g = torch.bmm(flat_g.transpose(1, 2), flat_g).view(-1, *out_size, *out_size)
        shifted = None
        for offset in geometry.offsets:
            window = tuple(slice(o, o + n) for o, n in zip(offset, out_size, strict=True))
            part = gram_x[(slice(None),) + window + window]  # noqa: RUF005
            shifted = part.clone() if shifted is None else shifted.add_(part)
        assert shifted is not None
        norms[start : start + step] = shifted.mul_(gram_g).view(-1, positions * positions).sum(1)
    return norms.clamp_(min=0)


def _native(record: Record, weights: Tensor) -> Tensor:
    """The weight gradient of the batch with g weighted by example, by the library's own kernel."""
    module: Any = record.module
    g = record.g * weights.view(-1, *(1 for _ in record.g.shape[1:]))
    simple = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    x, padding = (record.x, module.padding) if simple else (_padded(record), (0,) * len(module.kernel_size))
    transposed, output_padding = False, [0] * len(padding)
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, module.weight.detach().to(g.dtype), None, module.stride, padding, module.dilation, transposed, output_padding,
        module.groups, [False, True, False],
    )[1]  # fmt: skip


def _geometry(module: Any) -> Geometry:
    return Geometry(module.kernel_size, module.stride, module.dilation, module.groups)


def _padded(record: Record) -> Tensor:
    """The input with the layer's padding made explicit."""
    module: Any = record.module
    edges = module._reversed_padding_repeated_twice
    if not any(edges):
        return record.x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(record.x, edges, mode=mode)

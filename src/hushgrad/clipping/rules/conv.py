"""Convolutions in one, two and three dimensions, with groups, stride, dilation and every padding mode.

With the input padded beforehand and o ranging over the offsets of the kernel's taps,
G_i[:, :, o] = sum_t g[i,:,t] x[i,:,stride t + o]^T. Exact ways:

| way | squared norm and weighted sum | cheapest where |
|---|---|---|
| single | the native weight gradient of each example alone makes G, which is kept | large images |
| offsets | one batched matrix product per offset makes G, which is kept | many channels, middling images |
| fused | in C, a patch matrix of one example at a time, made and used in the cache, makes G and its norm | one example's patches are few |
| patches | one batched matrix product over unfolded patches, a cache full at a time, makes G, which is kept | few channels |
| Gram | sum_{t,s} <g_t, g_s> sum_o <x_{t+o}, x_{s+o}>, then the native weight gradient of w g | many channels, small images |

The Gram matrix of the patches is a sum of shifted copies of the pixels' Gram matrix: pixels² C_in + |o| T² multiply-adds instead of
T² C_in |o|, and no patch is ever copied. Where a stride leaves few positions for many pixels the patches' own is cheaper.

Reference: Bu, Mao, Xu, "Scalable and efficient training of large convolutional neural networks with differential privacy"
(NeurIPS 2022), for the choice between Gram and kept gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad._precision import widest_dtype
from hushgrad.clipping import _fused
from hushgrad.clipping.base import Example, Record, Rule, measured_here, rule
from hushgrad.clipping.mass import Mass, gram, sq_norm
from hushgrad.clipping.rules.gram import gram_sum
from hushgrad.clipping.rules.input_checks import require_batch
from hushgrad.clipping.rules.kernels import CACHE, Geometry, at_once, native_kernel, patches_of, per_example_kernel
from hushgrad.clipping.sums import Sum, weighted_rows

_KEEP_AT_MOST = 1 << 26  # floats of per-example gradients that one layer may keep (256 MB in single precision)
_READ_COST = 24  # making and reading one stored float of G costs about as much as this many multiply-adds of a Gram matrix
_ROWS_AT_ONCE = 4096  # positions of a product in double precision


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Rule):
    """By offsets, patches or shifted Gram matrices, depending on the shape; the weighted sum is the native weight gradient or a product."""

    parameters = frozenset({"weight", "bias"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One to three dimensions."""
        return (
            (nn.Conv1d(2, 3, 3), (torch.randn(4, 2, 7),)),
            (nn.Conv2d(4, 4, 3, stride=2, groups=2), (torch.randn(4, 4, 7, 7),)),
            (nn.Conv3d(1, 2, 2), (torch.randn(4, 1, 3, 3, 3),)),
        )

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """G_i of the kernel by offsets or patches, of the bias by a sum over positions."""
        made = {}
        if "weight" in record.names:
            made["weight"] = self.kernel(record)
        if "bias" in record.names:
            made["bias"] = record.g.flatten(2).sum(2)
        return made

    @staticmethod
    def kernel(record: Record) -> Tensor:
        """G_i of what the input is convolved with, (B, *its shape)."""
        return per_example_kernel(_padded(record), record.g, _geometry(record.module))

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """Form and keep G if that is cheaper than Gram matrices; the bias's gradient is always kept."""
        require_batch(record, 2 + len(_geometry(record.module).kernel))
        if "bias" in record.names:
            record.kept["bias"] = record.g.flatten(2).sum(2)
        norms = measured_here(record.kept)
        if "weight" in record.names:
            geometry = _geometry(record.module)
            if not record.g.is_cpu and record.g.numel() and not _too_large(record, geometry):
                record.kept["weight"] = at_once(_padded(record), record.g, geometry)
            elif _prefers_gram(record, geometry):
                norms["weight"], record.masses["weight"] = _gram_sq_norm(_padded(record), record.g, geometry)
            else:
                record.kept["weight"], norms["weight"] = _measured_kernel(record, geometry)
        return norms

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """w^T G of what was kept; else the native weight gradient of w g."""
        for name in record.names:
            if name in record.kept:
                _add_kept(out[name], record.kept[name], weights[name])
            elif name == "weight":
                _add_native(out[name], record, weights[name])
            else:
                out[name].add_kept(record.g.flatten(2).sum(2), weights[name])


def _too_large(record: Record, geometry: Geometry) -> bool:
    """Whether a batch has more patches, or gradients, than a device should hold at once."""
    x, g = record.x, record.g
    taps, channels = prod(geometry.kernel), x.shape[1] // geometry.groups
    return record.among(x.shape[0]) * channels * taps * max(prod(g.shape[2:]) * geometry.groups, g.shape[1]) > _KEEP_AT_MOST


def _measured_kernel(record: Record, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """G and its squared norm for each example: in one pass where the patches of an example fit into the cache."""
    zeros = record.module.padding_mode == "zeros"
    x, edges = (record.x, _edges(record)) if zeros else (_padded(record), [0] * len(_edges(record)))
    made = _fused.kernel_gradients(x, record.g, edges, geometry)
    if made is None:
        G = per_example_kernel(_padded(record), record.g, geometry)
        made = G, _sq_norm(G)
    return made


def _prefers_gram(record: Record, geometry: Geometry) -> bool:
    """Compares the multiply-adds of each method beyond the weighted sum."""
    if geometry.groups != 1:
        return False
    gram, floats = _costs(record.x.shape, record.g.shape, geometry)
    return gram < _READ_COST * floats or record.among(record.x.shape[0]) * floats > _KEEP_AT_MOST


@lru_cache(maxsize=1024)
def _costs(x: torch.Size, g: torch.Size, geometry: Geometry) -> tuple[int, int]:
    """Multiply-adds of the Gram matrices of an example, and floats of its G."""
    gram = prod(g[2:]) ** 2 * g[1] + min(_cost_of_shifts(x, g, geometry), _cost_of_patches(x, g, geometry))
    return gram, x[1] * g[1] * prod(geometry.kernel)


def _cost_of_shifts(x: torch.Size, g: torch.Size, geometry: Geometry) -> int:
    return prod(x[2:]) ** 2 * x[1] + 4 * prod(geometry.kernel) * prod(g[2:]) ** 2


def _cost_of_patches(x: torch.Size, g: torch.Size, geometry: Geometry) -> int:
    positions = prod(g[2:])
    return (positions + 8) * positions * x[1] * prod(geometry.kernel)


def _gram_sq_norm(x: Tensor, g: Tensor, geometry: Geometry) -> tuple[Tensor, Mass]:
    """sum_{t,s} <g_t, g_s> <patch_t, patch_s> and the mass, a cache full of examples at a time."""
    shifts, patches = _cost_of_shifts(x.shape, g.shape, geometry), _cost_of_patches(x.shape, g.shape, geometry)
    of_patches = _gram_by_shifts if shifts < patches else _gram_by_patches
    positions = prod(g.shape[2:])
    norms, masses = g.new_zeros(2, len(g), dtype=widest_dtype(g.device)).unbind()
    step = max(1, 2 * CACHE // prod(x.shape[2:]) ** 2)
    for start in range(0, len(g), step):
        some = slice(start, start + step)
        gram_x = of_patches(x[some], g.shape[2:], geometry).view(-1, positions, positions)
        norms[some], mass = gram_sum(gram_x, gram(g[some].flatten(2).transpose(1, 2)))
        masses[some] = mass.rows
    return norms, Mass(masses, positions)


def _gram_by_shifts(x: Tensor, out_size: Sequence[int], geometry: Geometry) -> Tensor:
    pixels = gram(x.flatten(2).transpose(1, 2)).view(-1, *x.shape[2:], *x.shape[2:])
    total = pixels.new_zeros(len(x), *out_size, *out_size)
    for offset in geometry.offsets:
        taps = tuple(slice(o, o + (n - 1) * s + 1, s) for o, n, s in zip(offset, out_size, geometry.stride, strict=True))
        total.add_(pixels[(slice(None),) + taps + taps])  # noqa: RUF005 (Python 3.10 has no star in subscripts)
    return total


def _gram_by_patches(x: Tensor, out_size: Sequence[int], geometry: Geometry) -> Tensor:
    return gram(patches_of(x, geometry))


def _add_native(out: Sum, record: Record, weights: Tensor) -> None:
    """The native weight gradient of w g; in double precision for some examples at a time, so that each is rounded few times."""
    x, g = record.x, record.g
    some = len(g) if weights.dtype is g.dtype else max(1, _ROWS_AT_ONCE // max(1, prod(g.shape[2:])))
    for y, h, w in zip(x.split(max(1, some)), g.split(max(1, some)), weights.split(max(1, some)), strict=True):
        h = h * w.view(-1, *(1 for _ in h.shape[1:]))
        out.add(_native_weighted(record, y.to(h.dtype), h))


def _native_weighted(record: Record, x: Tensor, g: Tensor) -> Tensor:
    module: Any = record.module
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):  # the kernel pads by itself
        return native_kernel(x, g, _geometry(module), module.padding)
    return native_kernel(_pad(record, x), g, _geometry(module))


def _sq_norm(G: Tensor) -> Tensor:
    """As ``sq_norm``, reading G in the order of its memory."""
    memory = _in_memory(G)
    if memory[0] == 0:
        return sq_norm(G.permute(memory).flatten(1))
    by_offset = G.flatten(3).permute(3, 0, 1, 2)
    return sq_norm(by_offset.flatten(0, 1)).view(by_offset.shape[:2]).sum(0)


def _add_kept(out: Sum, G: Tensor, weights: Tensor) -> None:
    """``out += sum_i weights[i] G[i]`` in one pass over G, whichever way its memory is laid out."""
    memory = _in_memory(G)
    if memory == sorted(memory):
        out.add_kept(G, weights)
    elif memory[0] == 0:  # by patches: the kernel's taps before the channels
        rows = G.permute(memory)
        total = weighted_rows(rows.flatten(1), weights).view(rows.shape[1:])
        out.add(total.permute([memory.index(axis) - 1 for axis in range(1, G.dim())]))
    else:  # by offsets: (*kernel, B, C_out, C_in) in memory
        taps = G.flatten(3).permute(3, 0, 1, 2).flatten(2)
        wide = weights.dtype is not G.dtype
        sums = torch.stack([weighted_rows(tap, weights) for tap in taps]) if wide else torch.matmul(weights, taps)
        out.add(sums.view(*G.shape[3:], *G.shape[1:3]).movedim((-2, -1), (0, 1)))


def _in_memory(G: Tensor) -> list[int]:
    """The dimensions in the order of memory, slowest first; dimensions of one element stay where they are."""
    if G.is_contiguous():
        return list(range(G.dim()))
    strides = G.stride()
    return sorted(range(G.dim()), key=lambda axis: -strides[axis])


def _geometry(module: Any) -> Geometry:
    return Geometry(tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation), module.groups)


def _edges(record: Record) -> list[int]:
    """The padding on each side, the last dimension first."""
    module: Any = record.module
    return list(module._reversed_padding_repeated_twice)


def _padded(record: Record) -> Tensor:
    """The input with the layer's padding made explicit."""
    return _pad(record, record.x)


def _pad(record: Record, x: Tensor) -> Tensor:
    module: Any = record.module
    edges = _edges(record)
    if not any(edges):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, edges, mode=mode)

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
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad._widest import widest_dtype
from hushgrad.clipping import _fused
from hushgrad.clipping.base import Example, Record, Rule, measured_here, rule
from hushgrad.clipping.mass import Mass, gram, sq_norm
from hushgrad.clipping.rules.batched import require_batch
from hushgrad.clipping.rules.gram import gram_sum
from hushgrad.clipping.sums import Sum, weighted_rows

__all__ = ["Conv", "Geometry", "per_example_kernel"]

_KEEP_AT_MOST = 1 << 26  # floats of per-example gradients that one layer may keep (256 MB in single precision)
_READ_COST = 24  # making and reading one stored float of G costs about as much as this many multiply-adds of a Gram matrix
_CACHE = 1 << 18  # floats of unfolded patches at a time (1 MB in single precision: they stay in the cache)
_SHORT = 32  # floats of a run of memory that are too few to be copied fast
_FEW_CHANNELS = 16  # below, a product per offset is too thin to be fast
_ROWS_AT_ONCE = 4096  # positions of a product in double precision
_LARGE = 8_000_000  # multiply-adds that pay for a native call of their own


class Geometry(NamedTuple):
    """A convolution over an input that is already padded."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def dense(self) -> bool:
        """Stride 1 in every dimension."""
        return all(s == 1 for s in self.stride)

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Where the kernel's taps lie, in input pixels."""
        return list(product(*(range(0, k * d, d) for k, d in zip(self.kernel, self.dilation, strict=True))))


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Rule):
    """Offsets, unfold or shifted Gram, by shape; the weighted sum is the native weight gradient or a matrix-vector product."""

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
        """Make and keep G where that is cheaper than the Gram matrices; the bias' gradient is always kept."""
        require_batch(record, 2 + len(_geometry(record.module).kernel))
        if "bias" in record.names:
            record.kept["bias"] = record.g.flatten(2).sum(2)
        norms = measured_here(record.kept)
        if "weight" in record.names:
            geometry = _geometry(record.module)
            if not record.g.is_cpu and record.g.numel() and not _too_large(record, geometry):
                record.kept["weight"] = _at_once(_padded(record), record.g, geometry)
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


def _at_once(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """G on a device, in as few launches as there are: a copy of all patches, in the order of the kernel, and one product."""
    B, C_in, groups = x.shape[0], x.shape[1], geometry.groups
    x = x.contiguous()
    steps = x.stride()[2:]
    moves = [step * s for step, s in zip(steps, geometry.stride, strict=True)]
    taps = [step * d for step, d in zip(steps, geometry.dilation, strict=True)]
    sizes = (B, groups, *g.shape[2:], C_in // groups, *geometry.kernel)
    strides = (x.stride(0), x.stride(1) * (C_in // groups), *moves, x.stride(1), *taps)
    positions = prod(g.shape[2:])
    patches = x.as_strided(sizes, strides, x.storage_offset()).reshape(B * groups, positions, -1)
    G = torch.bmm(g.reshape(B * groups, g.shape[1] // groups, positions), patches)
    return G.view(B, g.shape[1], C_in // groups, *geometry.kernel)


def _too_large(record: Record, geometry: Geometry) -> bool:
    """More patches, or gradients, of a batch than a device should hold at once."""
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


def per_example_kernel(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The kernel's gradient for each example, from the padded input: (B, C_out, C_in / groups, *kernel)."""
    B, channels = x.shape[:2]
    if B == 0 or g.numel() == 0:
        return g.new_zeros(B, g.shape[1], channels // geometry.groups, *geometry.kernel)
    if _prefers_single(x, g, geometry):
        return torch.stack([_native(x[i : i + 1], g[i : i + 1], geometry) for i in range(B)])
    thin = channels // geometry.groups < _FEW_CHANNELS
    return _by_patches(x, g, geometry) if thin or not geometry.dense else _by_offsets(x, g, geometry)


def _prefers_single(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    """One example is work enough for a native call of its own (measured on a CPU; a GPU wants whole batches)."""
    positions, channels = prod(g.shape[2:]), x.shape[1] // geometry.groups
    work = positions * g.shape[1] * channels * prod(geometry.kernel)
    large = work >= _LARGE and positions >= (512 if geometry.dense else 128)
    return large and channels >= _FEW_CHANNELS and x.device.type == "cpu"


def _by_offsets(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """Stride 1: one product per offset, and the input is not copied but laid out channels-last, once.

    The output grid is embedded in the padded input's grid (zeros in between), so that the pixels under one offset are one
    contiguous run of rows, starting at the offset's place. The result is a view whose memory has the offsets first.
    """
    B, C_in, *size = x.shape
    C_out, groups = g.shape[1], geometry.groups
    g = F.pad(g, [edge for full, used in zip(size[:0:-1], g.shape[:2:-1], strict=True) for edge in (0, full - used)])
    g = g.reshape(B * groups, C_out // groups, -1)
    x = x.reshape(B * groups, C_in // groups, -1).transpose(1, 2).contiguous()
    starts = [sum(o * prod(size[axis + 1 :]) for axis, o in enumerate(offset)) for offset in geometry.offsets]
    run = min(g.shape[2], x.shape[1] - starts[-1])  # beyond it there are only zeros of g
    G = g.new_empty(len(starts), B * groups, C_out // groups, C_in // groups)
    for k, start in enumerate(starts):
        torch.bmm(g[:, :, :run], x[:, start : start + run], out=G[k])
    G = G.view(*geometry.kernel, B, C_out, C_in // groups)
    return G.permute(*range(-3, 0), *range(len(geometry.kernel)))


def _by_patches(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """One product over unfolded patches, a few examples at a time. The result is a view whose memory has the channels last."""
    B, C_in, C_out, groups = x.shape[0], x.shape[1], g.shape[1], geometry.groups
    taps, positions, each = prod(geometry.kernel), prod(g.shape[2:]), C_in // groups
    G = g.new_empty(B * groups, C_out // groups, taps * each)
    g = g.reshape(B * groups, C_out // groups, positions)
    x = x.reshape(B * groups, each, *x.shape[2:])
    step = max(1, _CACHE // (each * taps * positions))
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        torch.bmm(g[some], _patches(x[some], geometry), out=G[some])
    *rest, last = geometry.kernel
    if _in_two_steps(each, geometry):
        return G.view(B, C_out, last, *rest, each).movedim(-1, 2).movedim(3, -1)
    return G.view(B, C_out, *rest, last, each).movedim(-1, 2)


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """A copy of all patches: (B, positions, taps * C_in). Channels-last, so that whole rows of the kernel are one run of memory.

    In two steps where that run is short: unfolded first in every dimension but the last, with the taps innermost, so that then a
    whole patch is one run. The last dimension of the kernel comes first among the taps in that case.
    """
    x = x.movedim(1, -1).contiguous()
    dims, channels = len(geometry.kernel), x.shape[-1]
    shape = zip(x.shape[1:-1], geometry.kernel, geometry.dilation, geometry.stride, strict=True)
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in shape]
    steps = x.stride()[1:-1]
    taps = [step * d for step, d in zip(steps, geometry.dilation, strict=True)]
    moves = [step * s for step, s in zip(steps, geometry.stride, strict=True)]
    if not _in_two_steps(channels, geometry):
        sizes, strides = (len(x), *out, *geometry.kernel, channels), (x.stride(0), *moves, *taps, 1)
        return x.as_strided(sizes, strides, x.storage_offset()).flatten(dims + 1).flatten(1, dims)
    sizes = (len(x), *out[:-1], x.shape[-2], *geometry.kernel[:-1], channels)
    strides = (x.stride(0), *moves[:-1], steps[-1], *taps[:-1], 1)
    half = x.as_strided(sizes, strides, x.storage_offset()).contiguous()
    column = prod(geometry.kernel[:-1]) * channels  # not half.stride(dims): an image of one column may have any stride there
    unfolded = half.view(*sizes[:dims], x.shape[-2] * column).unfold(
        -1, geometry.kernel[-1] * column, geometry.stride[-1] * column
    )
    return unfolded.flatten(1, dims)


def _in_two_steps(channels: int, geometry: Geometry) -> bool:
    return len(geometry.kernel) > 1 and geometry.dilation[-1] == 1 and channels * geometry.kernel[-1] < _SHORT


def _prefers_gram(record: Record, geometry: Geometry) -> bool:
    """Compare the multiply-adds that each way spends on top of the weighted sum."""
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
    step = max(1, 2 * _CACHE // prod(x.shape[2:]) ** 2)
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
    return gram(_patches(x, geometry))


def _native(x: Tensor, g: Tensor, geometry: Geometry, padding: Sequence[int] | None = None) -> Tensor:
    """The weight gradient summed over the batch, by the library's own kernel."""
    shape = (g.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    weight = g.new_empty(1).expand(shape)  # only its shape matters here
    zeros = [0] * len(geometry.kernel)
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, weight, None, geometry.stride, zeros if padding is None else padding, geometry.dilation,
        False, zeros, geometry.groups, [False, True, False],
    )[1]  # fmt: skip


def _add_native(out: Sum, record: Record, weights: Tensor) -> None:
    """The native weight gradient of w g; in double precision some examples at a time, so that few roundings lie on each one's way."""
    x, g = record.x, record.g
    some = len(g) if weights.dtype is g.dtype else max(1, _ROWS_AT_ONCE // max(1, prod(g.shape[2:])))
    for y, h, w in zip(x.split(max(1, some)), g.split(max(1, some)), weights.split(max(1, some)), strict=True):
        h = h * w.view(-1, *(1 for _ in h.shape[1:]))
        out.add(_native_weighted(record, y.to(h.dtype), h))


def _native_weighted(record: Record, x: Tensor, g: Tensor) -> Tensor:
    module: Any = record.module
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):  # the kernel pads by itself
        return _native(x, g, _geometry(module), module.padding)
    return _native(_pad(record, x), g, _geometry(module))


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

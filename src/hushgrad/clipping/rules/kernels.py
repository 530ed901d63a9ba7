"""The per-example gradient of a convolution's kernel, from a padded input: the methods that form it.

See the table of :mod:`hushgrad.clipping.rules.conv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hushgrad.clipping import _fused_products

CACHE = 1 << 18  # floats of unfolded patches at a time (1 MB in single precision: they stay in the cache)
_SHORT = 32  # floats of a run of memory that are too few to be copied fast
_FEW_CHANNELS = 16  # below, a product per offset is too thin to be fast
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


def at_once(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """G on a device, with as few launches as possible: a copy of all patches, in the order of the kernel, and one product."""
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


def per_example_kernel(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The kernel's gradient for each example, from the padded input: (B, C_out, C_in / groups, *kernel)."""
    B, channels = x.shape[:2]
    if B == 0 or g.numel() == 0:
        return g.new_zeros(B, g.shape[1], channels // geometry.groups, *geometry.kernel)
    if _prefers_single(x, g, geometry):
        return torch.stack([native_kernel(x[i : i + 1], g[i : i + 1], geometry) for i in range(B)])
    thin = channels // geometry.groups < _FEW_CHANNELS
    return _by_patches(x, g, geometry) if thin or not geometry.dense else _by_offsets(x, g, geometry)


def _prefers_single(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    """Whether one example is enough work for a native call (measured on a CPU; a GPU needs whole batches)."""
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
    if not _fused_products.offset_gradients(g, x, starts, run, G):
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
    step = max(1, CACHE // (each * taps * positions))
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        patches = patches_of(x[some], geometry)
        if not _fused_products.offset_gradients(g[some], patches, [0], positions, G[some].unsqueeze(0)):
            torch.bmm(g[some], patches, out=G[some])
    *rest, last = geometry.kernel
    if _in_two_steps(each, geometry):
        return G.view(B, C_out, last, *rest, each).movedim(-1, 2).movedim(3, -1)
    return G.view(B, C_out, *rest, last, each).movedim(-1, 2)


def patches_of(x: Tensor, geometry: Geometry) -> Tensor:
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


def native_kernel(x: Tensor, g: Tensor, geometry: Geometry, padding: Sequence[int] | None = None) -> Tensor:
    """The weight gradient summed over the batch, by the library's own kernel."""
    shape = (g.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    weight = g.new_empty(1).expand(shape)  # only its shape matters here
    zeros = [0] * len(geometry.kernel)
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, weight, None, geometry.stride, zeros if padding is None else padding, geometry.dilation,
        False, zeros, geometry.groups, [False, True, False],
    )[1]  # fmt: skip

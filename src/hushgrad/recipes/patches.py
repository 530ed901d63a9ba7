r"""Patches: fixed features of images from small windows of synthetic pictures. No record contributes to them.

A window p of 6 x 6 pixels is made even, z = (p - mean(p)) / sqrt(var(p) + EVEN), and compared with K windows d_k of *dead leaves*
(:mod:`hushgrad.recipes.dead_leaves`), made even in the same way:

    r_k = max(0, <d_k, W^2 z> / |W d_k| - THRESHOLD),    W = (Sigma + FLAT I)^(-1/2),

where Sigma is the second moment of the leaves' windows. The maps r_k are averaged in 3 x 3 cells, and balanced: with mu and S the mean
and the covariance of the leaves' own averages, trace(S) = 1, they become (S + REGULAR I)^(-1/2) (maps - mu) in each cell.

Half of the d_k are mirror images of the others. So the maps of a mirror image are those of the image in another order, exactly, and
*mirrored* maps, the means of both, say the same of an image and of its mirror image and are half as many.

Reference: Coates, Ng and Lee 2011; Coates and Ng 2011 (with windows of the training images, which would leak here).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hushgrad import _check
from hushgrad.recipes.dead_leaves import balance, leaves

PATCHES = 512
"""K: windows that an image is compared with."""
CELLS = 3
"""Cells in a line, across and down."""
SMALLEST = 8
"""Height and width of the smallest image."""
_SIDE, _THRESHOLD, _EVEN, _FLAT = 6, 0.5, 1.5e-4, 0.1
_PICTURES, _SIZE, _WINDOWS, _LEAST = 400, 32, 100_000, 0.03
_CHUNK = 32  # images at a time: larger chunks leave the processor's cache


class _Bank(NamedTuple):
    filters: Tensor  # (patches, channels, side, side)
    mean: Tensor  # mu
    root: Tensor  # (S + REGULAR I)^(-1/2)


def patches(images: Tensor, *, mirrored: bool = False) -> Tensor:
    """Balanced maps of images (n, channels, height, width): (n, 512, 3, 3), or (n, 256, 3, 3) of ``mirrored`` ones.

    Args:
        images: numbers from 0 to 1, at least 8 pixels high and wide.
        mirrored: the means of an image's maps and of its mirror image's.

    >>> picture = torch.rand(1, 3, 16, 20)
    >>> one, other = (patches(x, mirrored=True) for x in (picture, picture.flip(3)))
    >>> one.shape, bool((one - other).abs().max() < 1e-3 * one.abs().max())
    (torch.Size([1, 256, 3, 3]), True)
    """
    if images.dim() != 4 or min(images.shape[2:]) < SMALLEST:
        _check.fail("images", tuple(images.shape), f"to be (n, channels, height, width), both sides at least {SMALLEST}")
    bank = _bank(images.shape[1], mirrored)
    maps = _raw_maps(images, bank.filters, mirrored)
    return (bank.root @ (maps.flatten(2) - bank.mean[:, None])).view_as(maps)


@lru_cache(maxsize=4)
def _bank(channels: int, mirrored: bool) -> _Bank:
    """The windows to compare with, and the balance of their maps, from the same leaves always."""
    pictures = leaves(_PICTURES, channels=channels, size=_SIZE)
    filters = _filters(pictures)
    rows = _raw_maps(pictures, filters, mirrored).permute(0, 2, 3, 1).flatten(0, 2)
    return _Bank(filters, *balance(rows))


def _filters(pictures: Tensor) -> Tensor:
    """W^2 d_k / |W d_k| of windows drawn from the pictures, without their mean; then their mirror images."""
    windows = F.unfold(pictures, _SIDE).permute(0, 2, 1).flatten(0, 1)
    drawn = np.random.default_rng(1).permutation(len(windows))[:_WINDOWS]
    windows = windows[torch.from_numpy(drawn)].double()
    centred = windows - windows.mean(dim=1, keepdim=True)
    length = (centred.square().mean(dim=1, keepdim=True) + _EVEN).sqrt()
    even = (centred / length)[length[:, 0] > _LEAST]  # windows within one leaf say nothing
    values, directions = torch.linalg.eigh(even.T @ even / len(even))
    white = even[: PATCHES // 2] @ directions @ torch.diag((values + _FLAT).rsqrt())
    found = white / white.norm(dim=1, keepdim=True) @ torch.diag((values + _FLAT).rsqrt()) @ directions.T
    filters = (found - found.mean(dim=1, keepdim=True)).float().view(-1, pictures.shape[1], _SIDE, _SIDE)
    return torch.cat([filters, filters.flip(3)])


def _raw_maps(images: Tensor, filters: Tensor, mirrored: bool) -> Tensor:
    # One image alone has other last bits than beside others: it is given its own company.
    pairs = [part.float() if len(part) > 1 else part.float().repeat(2, 1, 1, 1) for part in images.split(_CHUNK)]
    parts = [_averages(part, filters) for part in pairs]
    maps = torch.cat(parts)[: len(images)] if parts else torch.zeros(0, len(filters), CELLS, CELLS)
    if not mirrored:
        return maps
    one, other = maps.chunk(2, dim=1)
    return (one + other.flip(3)) / 2


def _averages(images: Tensor, filters: Tensor) -> Tensor:
    """r_k in each cell, of one chunk."""
    within = torch.full((1, *filters.shape[1:]), 1 / filters[0].numel())
    mean, square = F.conv2d(images, within), F.conv2d(images.square(), within)
    length = ((square - mean.square()).clamp(min=0) + _EVEN).sqrt()
    found = F.conv2d(images, filters).div_(length).sub_(_THRESHOLD).relu_()
    return F.adaptive_avg_pool2d(found, CELLS)

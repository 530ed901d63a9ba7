"""Features that use no private data: fixed formulas, applied to one image at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hushgrad.recipes.encoders import unit_rows


def centred(images: Tensor) -> Tensor:
    """Pixels of each image minus its own mean, scaled to norm 1.

    >>> centred(torch.tensor([[[[0.0, 0.0], [1.0, 1.0]]]]))
    tensor([[-0.5000, -0.5000,  0.5000,  0.5000]])
    """
    rows = images.flatten(1)
    return unit_rows(rows - rows.mean(dim=1, keepdim=True))


def upright(images: Tensor) -> Tensor:
    """Each image sheared so that its own strokes stand upright, its centre of mass in the middle (LeCun et al. 1998: deskewing)."""
    n, _, height, width = images.shape
    mass = images.sum(dim=1)
    total = mass.sum(dim=(1, 2)).clamp(min=1e-6)
    y = torch.linspace(-1 + 1 / height, 1 - 1 / height, height)[None, :, None]
    x = torch.linspace(-1 + 1 / width, 1 - 1 / width, width)[None, None, :]
    y_mean, x_mean = (mass * y).sum(dim=(1, 2)) / total, (mass * x).sum(dim=(1, 2)) / total
    dy, dx = y - y_mean[:, None, None], x - x_mean[:, None, None]
    variance, covariance = (mass * dy * dy).sum(dim=(1, 2)), (mass * dx * dy).sum(dim=(1, 2))
    map_ = torch.zeros(n, 2, 3)
    map_[:, 0, 0] = map_[:, 1, 1] = 1.0
    map_[:, 0, 1] = (covariance / variance.clamp(min=1e-6)).clamp(-1.0, 1.0)
    map_[:, 0, 2], map_[:, 1, 2] = x_mean, y_mean
    return F.grid_sample(images, F.affine_grid(map_, list(images.shape), align_corners=False), align_corners=False)


def oriented_gradients(images: Tensor, *, cell: int = 4, directions: int = 8, part: int = 5000) -> Tensor:
    r"""Histogram of oriented gradients: how much edge of which direction is in which cell; rows of norm 1.

    The gradient is taken by central differences (of the channel where it is steepest) and shared linearly between the two
    nearest of ``directions`` unsigned directions. Its length is averaged over cells of ``cell`` x ``cell`` pixels; of that the
    square root is taken, so that strong edges do not drown weak ones.

    Reference: Dalal and Triggs 2005, without its normalisation of blocks.
    """
    return torch.cat([_histograms(batch, cell, directions) for batch in images.split(part)])


def _histograms(images: Tensor, cell: int, directions: int) -> Tensor:
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    dx, dy = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2], padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    length, channel = (dx * dx + dy * dy).sqrt().max(dim=1, keepdim=True)
    place = torch.atan2(dy.gather(1, channel), dx.gather(1, channel)).remainder(math.pi) * (directions / math.pi)
    low = place.floor()
    share = place - low
    planes = torch.zeros(len(images), directions, *images.shape[2:])
    planes.scatter_(1, low.long() % directions, length * (1 - share))
    planes.scatter_add_(1, (low.long() + 1) % directions, length * share)
    return unit_rows(F.avg_pool2d(planes, cell).sqrt().flatten(1))

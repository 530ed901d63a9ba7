"""Images as rows of length 1: fixed features, balanced with synthetic pictures, minus a private mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hushgrad import _check
from hushgrad.recipes.dead_leaves import balanced
from hushgrad.recipes.encoders import unit_rows
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.learning import LearningEncoder
from hushgrad.recipes.patches import patches
from hushgrad.recipes.scattering import mirror_halves, scattering
from hushgrad.recipes.table_file import Records

LARGEST = 64
"""Height and width of the largest images that are looked at as they are: rows of larger ones would have millions of numbers."""
_CHUNK, _NUMBERS = 1000, 1 << 24  # images at a time, and numbers in them


@dataclass(frozen=True, kw_only=True)
class ImageFeatures(LearningEncoder):
    """Fixed features of images, centred by a mean that is released before the run with noise ``noise_multiplier``.

        >>> pixels = ImageEncoder(channels=1, height=8, width=8)
        >>> ImageFeatures(images=pixels, mean=(0.0,) * 4932)([[[9] * 8] * 8]).shape
        torch.Size([1, 4932])

    Rows are kept in half precision: there are thousands of numbers in each. ``mirrored`` says that an image and its mirror image are of
    one class: their features are averaged, which halves the length of a row. Images of more than 64 x 64 pixels are averaged to
    that size first. Scattering maps
    (:mod:`hushgrad.recipes.scattering`) and patches (:mod:`hushgrad.recipes.patches`) weigh the same.
    """

    images: ImageEncoder
    mirrored: bool = False
    mean: tuple[float, ...] | None = None
    noise_multiplier: float = 30.0

    def __post_init__(self) -> None:
        _check.instance(ImageEncoder, images=self.images)
        _check.positive(noise_multiplier=self.noise_multiplier)
        _check.instance(bool, mirrored=self.mirrored)
        if self.mean is not None:
            object.__setattr__(self, "mean", tuple(_check.number(mean=value) for value in self.mean))

    @property
    def learns(self) -> float | None:
        """The noise multiplier of the mean, until the mean is known."""
        return self.noise_multiplier if self.mean is None else None

    def prepared(self, rows: Sequence[Any]) -> Tensor:
        """Balanced maps of length 1, in half precision."""
        together = max(1, min(_CHUNK, _NUMBERS // (self.images.channels * self.images.height * self.images.width)))
        parts = [self._maps(self.images.pixels(rows[i : i + together], first=i + 1)) for i in range(0, len(rows), together)]
        return torch.cat(parts) if parts else self._maps(self.images(rows))

    def _maps(self, images: Tensor) -> Tensor:
        if images.shape[2] > LARGEST:
            images = F.adaptive_avg_pool2d(images, LARGEST)
        waves = scattering(images, centred=self.mirrored)
        waves = balanced(mirror_halves(waves) if self.mirrored else waves)
        return unit_rows(
            torch.cat([unit_rows(waves), unit_rows(patches(images, mirrored=self.mirrored).flatten(1))], dim=1)
        ).half()

    def statistic(self, prepared: Tensor, chosen: np.ndarray, shares: np.ndarray) -> Tensor:
        """The sum of the rows, each scaled to the length of its share."""
        total = torch.zeros(prepared.shape[1], dtype=torch.float64)
        for part, share in zip(*(torch.from_numpy(of_each).split(_CHUNK) for of_each in (chosen, shares)), strict=True):
            total += (unit_rows(prepared[part].double()) * share[:, None]).sum(dim=0)
        return total

    def learned(self, noisy: Tensor, records: float) -> ImageFeatures:
        """This encoder with the mean."""
        return replace(self, mean=tuple((noisy / records).float().tolist()))

    def finished(self, prepared: Tensor) -> Tensor:
        """Rows minus the mean, scaled to length 1."""
        centre = torch.tensor(self.mean)
        parts = [unit_rows(part.float() - centre).half() for part in prepared.split(_CHUNK)]
        return torch.cat(parts)

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """Read images."""
        return self.images.read(path, names)

"""Pictures that are shifted and mirrored at random as they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad import _check


class AugmentedImages(TensorDataset):
    """Pictures and labels; each picture is moved by up to ``shift`` pixels, its border reflected, and mirrored half of the time.

    It draws from torch's generator, which the loader seeds for every step and copy. For ``Plan(..., augmentations=K)``, which
    clips the mean gradient of K such copies (De et al. 2022), and for plain training.

    >>> images = AugmentedImages(torch.arange(16.0).view(1, 1, 4, 4), torch.tensor([3]), shift=0, mirrored=False)
    >>> torch.equal(images[0][0], images.tensors[0][0]), int(images[0][1])
    (True, 3)
    """

    def __init__(self, images: Tensor, labels: Tensor, *, shift: int = 4, mirrored: bool = True) -> None:
        super().__init__(images, labels)
        self.shift = _check.integer(0, shift=shift)
        self.mirrored = _check.instance(bool, mirrored=mirrored)
        if images.dim() != 4 or min(images.shape[2:]) <= self.shift:
            _check.fail("shift", shift, f"to be less than the sides of pictures, whose shape is {tuple(images.shape)}")

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """One picture, as it is drawn now, and its label."""
        image, label = super().__getitem__(index)
        if self.shift:
            down, right = torch.randint(2 * self.shift + 1, (2,)).tolist()
            height, width = image.shape[1:]
            image = F.pad(image, (self.shift,) * 4, mode="reflect")[:, down : down + height, right : right + width]
        if self.mirrored and bool(torch.rand(()) < 0.5):
            image = image.flip(-1)
        return image, label

    def part(self, chosen: Tensor) -> AugmentedImages:
        """Some of the pictures, read in the same way."""
        images, labels = (t[chosen] for t in self.tensors)
        return AugmentedImages(images, labels, shift=self.shift, mirrored=self.mirrored)

"""Images for ``make accuracy``: the maps, which nothing learned enters, are kept on disk; the private mean is drawn for each seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hushgrad.advice import Codebook, rules
from hushgrad.recipes.data import cifar10, mnist
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.learning import learn

__all__ = ["load"]

_KEPT = Path("build/accuracy")


def load(book: Codebook, folder: Path, name: str) -> tuple[Callable[[int, float], Data], None]:
    """Data for a seed: rows centred by a mean with that seed's noise."""
    encoder = book.encoder(buckets=1, weight=0.0, noise_multiplier=rules.MEAN_NOISE)
    assert isinstance(encoder, ImageFeatures)
    (x, y), (tx, ty) = _maps(encoder, folder / name, name)

    def data_of(seed: int, epsilon: float) -> Data:
        everyone = np.arange(len(x))
        secret = f"seed {seed}".encode().ljust(16)
        fitted = learn(encoder, x, everyone, records=len(x), secret=secret)
        parts = [TensorDataset(fitted.finished(maps), labels) for maps, labels in ((x, y), (tx, ty))]
        return Data(train=parts[0], test=parts[1], classes=10, encoder=fitted, names=book.classes, learned=encoder.learns)

    return data_of, None


def _maps(encoder: ImageFeatures, folder: Path, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    raw = (cifar10 if name == "cifar10" else mnist)(path=str(folder))
    found = []
    for part, pixels in (("train", raw.train), ("test", raw.test)):
        file = _KEPT / f"{name}-{part}.npy"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            images = (pixels.tensors[0] * encoder.images.top).round().numpy()
            np.save(file, encoder.prepared(images).numpy())
        found.append((torch.from_numpy(np.load(file)), pixels.tensors[1]))
    return found

"""Images: pixels divided by a constant, from arrays, from the files of known data sets, or from a folder of pictures."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.encoders import Encoder, read_arrays
from hushgrad.recipes.files import files_of_classes, read_cifar10, read_idx
from hushgrad.recipes.table_file import Records

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
# What Pillow's readers of damaged files raise: errors of their own, and whatever their arithmetic on a header's numbers runs into.
_DAMAGED = (OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, EOFError, struct.error)
_BRIGHTEST = 1e6  # times top: squares and spectra of such images are finite in single precision
_PIXELS = 1 << 26  # of one picture: a small file may unpack to more than there is memory


@dataclass(frozen=True, kw_only=True)
class ImageEncoder(Encoder):
    """Images of one size, pixels divided by ``top``. Pictures of another size are scaled to it.

    >>> ImageEncoder(channels=1, height=2, width=2, top=255.0)([[[0, 255], [0, 0]]]).shape
    torch.Size([1, 1, 2, 2])
    """

    channels: int
    height: int
    width: int
    top: float = 255.0

    def __post_init__(self) -> None:
        _check.one_of((1, 3), channels=self.channels)
        _check.positive_int(height=self.height)
        _check.positive_int(width=self.width)
        _check.positive(top=self.top)

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """(rows, channels, height, width); a row is an array (height, width), (channels, height, width) or a path."""
        return self.pixels(rows)

    def pixels(self, rows: Sequence[Any], *, first: int = 1) -> Tensor:
        """The same for a part of many rows that begins at index ``first``."""
        shape = (self.channels, self.height, self.width)
        batch = np.zeros((len(rows), *shape), np.float32)
        for number, (into, row) in enumerate(zip(batch, rows, strict=True), first):
            image = self._picture(Path(row)) if isinstance(row, (str, Path)) else np.asarray(row)
            if image.shape not in (shape, shape[1:]) or (image.ndim == 2 and self.channels != 1):
                _check.fail("image", image.shape, f"to have the shape {shape}")
            if not (np.abs(image) <= _BRIGHTEST * self.top).all():  # also where one is no number
                told = f"Expected the pixels of image {number} to be numbers from 0 to {self.top:g}."
                raise ArgumentError(f"{told} Mend it, or leave it out.")
            into[:] = image.reshape(shape)
        return torch.from_numpy(batch).div_(self.top)

    def _picture(self, path: Path) -> np.ndarray:
        image = _opened(path)
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            remedy = "Save pictures with 8 bits for each colour: with more, all that is bright would be white."
            _check.fail("picture", str(path), f"to have 8 bits for each colour (its mode is {image.mode})", remedy)
        grey = self.channels == 1
        small = image.convert("L" if grey else "RGB").resize((self.width, self.height))
        pixels = np.asarray(small, np.float32) * (self.top / 255.0)
        return pixels if grey else pixels.transpose(2, 0, 1)

    def read(self, path: Path, names: Sequence[str] = ()) -> Records:
        """A picture, a folder of pictures (in folders of their labels, or not), a .npy or .npz array, an idx file, a CIFAR-10 file."""
        if path.is_dir():
            files, labels = files_of_classes(path, names, _PICTURES)
            if not files:
                _check.fail("folder", str(path), f"to hold pictures ({', '.join(_PICTURES)})")
            return Records(rows=list(files), labels=labels, files=files)
        if path.suffix.lower() in _PICTURES:
            return Records(rows=[path], files=[path])
        if path.suffix in (".npy", ".npz"):
            return read_arrays(path, names)
        if ".bin" in path.suffixes:
            images, numbers = read_cifar10(path)
            return Records(rows=list(images), labels=_named(numbers, names))
        return _idx(path, names)


def _opened(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ArgumentError("Pictures need Pillow. Install it with pip install 'hushgrad[images]'.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path)
            if image.width * image.height > _PIXELS:
                _check.fail("picture", str(path), f"to have at most {_PIXELS} pixels")
            image.load()
            return image
    except (*_DAMAGED, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ArgumentError(f"Expected {str(path)!r} to be a picture: {error}.") from None


def _idx(path: Path, names: Sequence[str]) -> Records:
    """An idx file of images, with the labels next to it if its name is that of MNIST's files."""
    images = read_idx(path, dims=3)
    beside = path.with_name(path.name.replace("images-idx3", "labels-idx1").replace("images.idx3", "labels.idx1"))
    if beside == path or not beside.is_file():
        return Records(rows=list(images))
    numbers = read_idx(beside, dims=1)
    if len(numbers) != len(images):
        _check.fail("labels", len(numbers), f"to be as many as the images ({len(images)})")
    return Records(rows=list(images), labels=_named(numbers, names))


def _named(numbers: np.ndarray, names: Sequence[str]) -> list[str]:
    if len(names) and numbers.max(initial=0) >= len(names):
        raise ArgumentError(
            f"Expected labels to lie in 0..{len(names) - 1}; that of record {1 + int(numbers.argmax())} does not."
        )
    return [names[number] if names else str(number) for number in numbers]

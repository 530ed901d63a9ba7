r"""Scattering: fixed wavelet features of images, two layers deep. Nothing in them is learned, so nothing in them leaks.

Oriented wavelets psi at the scales j = 0, 1 in L = 8 directions, moduli, and a Gaussian low pass phi:

    S0 = x * phi,   S1 = |x * psi_{j,a}| * phi,   S2 = ||x * psi_{0,a}| * psi_{1,b}| * phi,

1 + 16 + 64 = 81 maps for each channel, each a quarter as high and wide as the image. Borders are reflected by four pixels and
convolutions are circular on the padded image. A modulus at scale j is kept at every 2^j-th pixel, where phi has the width 1.6 / 2^j.
This is exact: the Fourier transform of a signal that is kept at every second pixel is the mean of its spectrum's four quarters.

Reference: Mallat 2012; Bruna and Mallat 2013; Oyallon and Mallat 2015. For private learning: Tramer and Boneh 2021.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hushgrad import _check

__all__ = ["MAPS", "normalised_maps", "scattering"]

_DIRECTIONS, _BORDER = 8, 4
MAPS = 1 + 2 * _DIRECTIONS + _DIRECTIONS**2
"""Maps of each channel."""
_CHUNK = 24  # channels at a time: larger chunks leave the processor's cache and take twice as long
_GROUPS = 27


def gabor(size: int, *, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A Gaussian of width ``sigma`` times a plane wave, periodised on a torus of ``size`` x ``size`` pixels; double precision."""
    at = torch.arange(-2 * size, 3 * size, dtype=torch.float64)
    y, x = at[:, None], at[None, :]
    along, across = math.cos(angle) * x + math.sin(angle) * y, -math.sin(angle) * x + math.cos(angle) * y
    wave = torch.polar(torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)), frequency * along)
    return wave.reshape(5, size, 5, size).sum(dim=(0, 2)) * slant / (2 * math.pi * sigma**2)


def morlet(size: int, *, scale: int, direction: int) -> Tensor:
    """The wavelet at one scale and direction: a Gabor function minus the multiple of its envelope that makes its mean 0."""
    about = {"sigma": 0.8 * 2**scale, "angle": direction * math.pi / _DIRECTIONS, "slant": 4.0 / _DIRECTIONS}
    wave, envelope = (gabor(size, frequency=f, **about) for f in (0.75 * math.pi / 2**scale, 0.0))
    return wave - envelope * (wave.sum() / envelope.sum())


def low_pass(size: int, *, sigma: float, stride: int) -> Tensor:
    """The matrix (pixels kept, size) of a circular Gaussian that is read at every ``stride``-th pixel, without the border's own."""
    at = torch.arange(-2 * size, 3 * size, dtype=torch.float64)
    kernel = torch.exp(-(at**2) / (2 * sigma**2)).reshape(5, size).sum(dim=0)
    rows = [torch.roll(kernel / kernel.sum(), shift) for shift in range(0, size, stride)]
    return torch.stack(rows[1:-1]).float()


class _Bank(NamedTuple):
    """Spectra of the wavelets of both scales, and the low pass at full and at half resolution."""

    fine: Tensor
    coarse: Tensor
    whole: Tensor
    half: Tensor


@lru_cache(maxsize=8)
def _bank(size: int) -> _Bank:
    fine, coarse = (
        torch.stack([torch.fft.fft2(morlet(size, scale=j, direction=a)).real for a in range(_DIRECTIONS)]).float() for j in (0, 1)
    )
    return _Bank(fine, coarse, low_pass(size, sigma=1.6, stride=4), low_pass(size // 2, sigma=0.8, stride=2))


def scattering(images: Tensor) -> Tensor:
    """The maps of images (n, channels, size, size): (n, channels x 81, size/4, size/4); ``size`` is a multiple of four.

    >>> scattering(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 243, 2, 2])
    """
    if images.dim() != 4 or images.shape[2] != images.shape[3] or images.shape[2] % 4 or images.shape[2] < 8:
        _check.fail("images", tuple(images.shape), "to be (n, channels, size, size) with a size of 8, 12, 16, ...")
    count, channels, size, _ = images.shape
    if not count:
        return torch.zeros(0, channels * MAPS, size // 4, size // 4)
    padded = F.pad(images.float(), (_BORDER,) * 4, mode="reflect")
    return torch.cat([_maps(part) for part in padded.split(max(1, _CHUNK // channels))])


def _maps(x: Tensor) -> Tensor:
    """The maps of one chunk of padded images."""
    bank = _bank(x.shape[-1])
    spectrum = torch.fft.fft2(x).unsqueeze(2)
    fine = torch.fft.ifft2(spectrum * bank.fine).abs()  # (n, channels, directions, size, size)
    coarse = _kept(spectrum, bank.coarse)
    again = torch.fft.fft2(fine)
    twice = torch.stack([_kept(again, wavelet) for wavelet in bank.coarse], dim=3).flatten(2, 3)  # one by one: stays in the cache
    maps = [_passed(x.unsqueeze(2), bank.whole), _passed(fine, bank.whole), _passed(coarse, bank.half), _passed(twice, bank.half)]
    return torch.cat(maps, dim=2).flatten(1, 2)


def _kept(spectrum: Tensor, wavelet: Tensor) -> Tensor:
    """The modulus of a filtered signal at every second pixel, from the spectra of the signal and of the wavelet."""
    half = spectrum.shape[-1] // 2
    rows = spectrum[..., :half, :] * wavelet[..., :half, :] + spectrum[..., half:, :] * wavelet[..., half:, :]
    return torch.fft.ifft2((rows[..., :half] + rows[..., half:]) / 4).abs()


def _passed(x: Tensor, matrix: Tensor) -> Tensor:
    return matrix @ x @ matrix.T


def normalised_maps(maps: Tensor) -> Tensor:
    """Rows of length at most 1, flat: each image's maps, group-normalised in 27 groups by that image alone."""
    rows = F.group_norm(maps, math.gcd(_GROUPS, maps.shape[1])).flatten(1)
    return rows / math.sqrt(rows.shape[1])

"""The quick scattering transform against its definition: convolutions as sums over all pixels, in double precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hushgrad.advice import Codebook
from hushgrad.errors import ArgumentError
from hushgrad.recipes.dead_leaves import REGULAR, balanced, leaves
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.scattering import MAPS, gabor, morlet, normalised_maps, scattering


def convolved(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Circular convolution by its definition: a sum of shifted copies."""
    total = torch.zeros_like(kernel)
    for i in range(kernel.shape[0]):
        for j in range(kernel.shape[1]):
            total = total + kernel[i, j] * torch.roll(x, (i, j), (0, 1))
    return total


def smoothed(u: torch.Tensor, sigma: float) -> torch.Tensor:
    size = u.shape[0]
    kernel = gabor(size, sigma=sigma, angle=0.0, frequency=0.0, slant=1.0).real
    stride = 4 if sigma > 1 else 2
    return convolved(u, kernel / kernel.sum())[::stride, ::stride][1:-1, 1:-1]


def slow(image: torch.Tensor) -> torch.Tensor:
    """The definition in the module's docstring, word by word."""
    x = torch.nn.functional.pad(image.double()[None, None], (4, 4, 4, 4), mode="reflect")[0, 0]
    waves = {(j, a): morlet(x.shape[0], scale=j, direction=a) for j in (0, 1) for a in range(8)}
    first = [convolved(x, waves[0, a]).abs() for a in range(8)]
    maps = [smoothed(x, 1.6), *(smoothed(u, 1.6) for u in first)]
    maps += [smoothed(convolved(x, waves[1, a]).abs()[::2, ::2], 0.8) for a in range(8)]
    maps += [smoothed(convolved(u, waves[1, b]).abs()[::2, ::2], 0.8) for u in first for b in range(8)]
    return torch.stack(maps)


def test_it_is_the_definition():
    images = torch.rand(3, 2, 8, 8)
    found = scattering(images)
    assert found.shape == (3, 2 * MAPS, 2, 2)
    assert torch.allclose(found[1, MAPS:].double(), slow(images[1, 1]), atol=1e-6)


def test_wavelets_have_mean_zero_and_see_their_own_direction():
    for j in (0, 1):
        for a in range(8):
            assert abs(morlet(20, scale=j, direction=a).sum()) < 1e-12
    x = torch.arange(24)[None, :].expand(24, 24)
    stripes = torch.cos(0.75 * math.pi * x)[None, None].float()
    energy = scattering(stripes)[0, 1:9].mean(dim=(1, 2))
    assert energy.argmax() == 0
    assert energy[0] > 3 * energy[4]


def test_images_do_not_influence_each_other_and_rows_have_length_at_most_one():
    images = torch.rand(60, 1, 12, 12)  # more than a chunk
    rows = normalised_maps(scattering(images))
    alone = torch.cat([normalised_maps(scattering(images[[i]])) for i in (5, 37)])
    assert torch.allclose(rows[[5, 37]], alone, atol=1e-6)
    assert ((rows.norm(dim=1) > 0.3) & (rows.norm(dim=1) <= 1 + 1e-6)).all()
    assert normalised_maps(scattering(torch.zeros(1, 1, 8, 8))).norm() == 0
    assert scattering(torch.zeros(0, 1, 8, 8)).shape == (0, 81, 2, 2)


def test_balanced_maps_of_leaves_vary_alike_in_every_direction_that_varies():
    pictures = leaves(300, channels=1, size=32)
    assert torch.equal(pictures[:3], leaves(3, channels=1, size=32))
    before, after = normalised_maps(scattering(pictures)), balanced(scattering(pictures))
    values = [
        torch.linalg.eigvalsh(torch.cov(rows.view(300, MAPS, -1).permute(0, 2, 1).flatten(0, 1).T.double()))
        for rows in (before, after)
    ]
    total = values[0].sum()
    assert torch.allclose(values[1].flip(0), (values[0] / (values[0] / total + REGULAR)).flip(0), rtol=1e-3, atol=1e-6 * total)


def test_balancing_a_picture_needs_no_other_picture():
    images = torch.rand(60, 3, 12, 12)
    assert torch.allclose(balanced(scattering(images))[[5, 37]], balanced(scattering(images[[5, 37]])), atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 10, 10), (1, 1, 8, 12), (1, 8, 8), (1, 1, 4, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ArgumentError, match="images"):
        scattering(torch.zeros(shape))


@pytest.mark.parametrize(("channels", "size"), [(1, 16), (3, 32), (1, 28), (3, 12)])
def test_mirrored_rows_do_not_know_left_from_right(channels, size):
    """Within a tenth of their length 1; rows that are not mirrored differ by more than a third of it."""
    images = leaves(3, channels=channels, size=size)
    encode = {
        mirrored: ImageFeatures(images=ImageEncoder(channels=channels, height=size, width=size), mirrored=mirrored)
        for mirrored in (True, False)
    }
    pixels = (images * 255).round().numpy()
    for mirrored, encoder in encode.items():
        one, other = (encoder.prepared(x).float() for x in (pixels, pixels[..., ::-1].copy()))
        apart = (one - other).norm(dim=1)
        assert apart.max() < 0.1 if mirrored else apart.min() > 0.33
        across = -(-(size // 4) // 2) if mirrored else size // 4
        assert one.shape == (3, channels * 81 * (size // 4) * across + (2304 if mirrored else 4608))
    book = Codebook(kind="images", classes=("a", "b"), channels=channels, height=size, width_of_image=size, mirrored=True)
    made = book.encoder(buckets=1, weight=0.0, noise_multiplier=30.0)
    assert made == replace(encode[True], noise_multiplier=30.0) and Encoder.from_json(made.to_json()) == made

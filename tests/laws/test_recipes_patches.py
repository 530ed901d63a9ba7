"""Patches of dead leaves against their definition, window by window in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hushgrad.advice import Codebook
from hushgrad.advice.advise import _width
from hushgrad.errors import ArgumentError
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.patches import CELLS, PATCHES, _bank, patches
from hushgrad.recipes.scattering import MAPS


def slow(image: torch.Tensor) -> torch.Tensor:
    """The definition in the module's docstring for one image, before the balance; cells share windows where 3 does not divide."""
    filters = _bank(image.shape[0], False).filters.double()
    height, width = (side - 5 for side in image.shape[1:])
    responses = torch.zeros(len(filters), height, width, dtype=torch.float64)
    for i in range(height):
        for j in range(width):
            p = image[:, i : i + 6, j : j + 6].double()
            z = (p - p.mean()) / (p.var(unbiased=False) + 1.5e-4).sqrt()
            responses[:, i, j] = ((filters * z).sum(dim=(1, 2, 3)) - 0.5).clamp(min=0)
    cells = torch.zeros(len(filters), 3, 3, dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            down = slice(a * height // 3, -(-(a + 1) * height // 3))
            across = slice(b * width // 3, -(-(b + 1) * width // 3))
            cells[:, a, b] = responses[:, down, across].mean(dim=(1, 2))
    return cells


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 13, 16)])
def test_it_is_the_definition(channels, height, width):
    images = torch.rand(2, channels, height, width)
    bank = _bank(channels, False)
    balanced = bank.root.double() @ (slow(images[1]).flatten(1) - bank.mean.double()[:, None])
    found = patches(images)
    assert found.shape == (2, PATCHES, CELLS, CELLS)
    assert torch.allclose(found[1].flatten(1).double(), balanced, atol=1e-3 * float(balanced.abs().max()))


def test_a_constant_image_and_its_brightness_say_nothing():
    dark, bright = (patches(torch.full((1, 1, 12, 12), value)) for value in (0.1, 0.9))
    assert torch.allclose(dark, bright, atol=1e-3)
    images = torch.rand(2, 3, 12, 12) / 2
    assert torch.allclose(patches(images), patches(images + 0.5), atol=0.02 * float(patches(images).abs().max()))


def test_a_mirror_image_has_the_same_maps_in_another_order():
    images = torch.rand(3, 3, 11, 14)
    filters = _bank(3, True).filters
    assert torch.equal(filters[PATCHES // 2 :], filters[: PATCHES // 2].flip(3))
    one, other = (patches(x, mirrored=True) for x in (images, images.flip(3)))
    assert one.shape == (3, PATCHES // 2, 3, 3)
    assert torch.allclose(one, other, atol=1e-4 * float(one.abs().max()))
    assert not torch.allclose(*(patches(x) for x in (images, images.flip(3))), atol=1e-2)


def test_images_do_not_influence_each_other():
    images = torch.rand(40, 1, 12, 12)  # more than a chunk
    rows, alone = patches(images), torch.cat([patches(images[[i]]) for i in (5, 37)])
    assert torch.allclose(rows[[5, 37]], alone, atol=1e-4 * float(rows.abs().max()))
    assert patches(images[:0]).shape == (0, PATCHES, 3, 3)


def test_rows_have_waves_and_patches_of_equal_weight():
    encoder = ImageFeatures(images=ImageEncoder(channels=3, height=12, width=12), mirrored=True)
    rows = encoder.prepared([torch.randint(0, 256, (3, 12, 12)).tolist() for _ in range(4)]).float()
    waves, pieces = rows.split([3 * MAPS * 3 * 2, 9 * PATCHES // 2], dim=1)
    assert torch.allclose(waves.norm(dim=1), torch.full((4,), 0.5**0.5), atol=1e-2)
    assert torch.allclose(pieces.norm(dim=1), torch.full((4,), 0.5**0.5), atol=1e-2)


def test_what_is_no_image_is_refused():
    with pytest.raises(ArgumentError, match="both sides at least 8"):
        patches(torch.rand(2, 1, 7, 12))


@pytest.mark.parametrize(("channels", "count"), [(1, 49), (3, 9), (3, 33)])
def test_a_row_has_the_same_bits_whoever_is_beside_it(channels, count):
    """Alone, at the end of a chunk of its own, and in other places."""
    images = torch.rand(count, channels, 16, 16, generator=torch.Generator().manual_seed(0))
    encoder = ImageFeatures(images=ImageEncoder(channels=channels, height=16, width=16, top=1.0))
    rows = encoder.prepared(images.numpy())
    for i in (0, count - 1):
        assert torch.equal(encoder.prepared(images[i : i + 1].numpy())[0], rows[i])
    assert torch.equal(encoder.prepared(images[1:].numpy()), rows[1:])


@pytest.mark.parametrize("pixel", [float("nan"), float("inf"), 3e37, -1e300])
def test_a_pixel_that_is_no_brightness_is_refused(pixel):
    image = [[[0.0] * 8] * 7 + [[0.0] * 7 + [pixel]]]
    with pytest.raises(ArgumentError, match=r"to be numbers from 0 to 255\. Mend it, or leave it out"):
        ImageFeatures(images=ImageEncoder(channels=1, height=8, width=8)).prepared([image])


def test_sizes_and_users_that_images_cannot_have_are_refused_before_any_advice():
    for sizes in ({"height": 28, "width_of_image": 20}, {"height": 10, "width_of_image": 10}, {"height": 4, "width_of_image": 4}):
        with pytest.raises(ArgumentError, match="as high as wide"):
            Codebook(kind="images", classes=("a", "b"), **sizes)
    with pytest.raises(ArgumentError, match="neither user nor columns"):
        Codebook(kind="images", classes=("a", "b"), user="who")


def test_pictures_of_more_than_eight_bits_are_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "deep.png"
    image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(path)
    with pytest.raises(ArgumentError, match="8 bits for each colour"):
        ImageEncoder(channels=1, height=8, width=8)([path])


@pytest.mark.parametrize("mirrored", [False, True])
def test_large_images_are_averaged_to_64_pixels_first(mirrored):
    images = np.random.default_rng(4).integers(0, 255, (3, 128, 128))
    small = images.reshape(3, 64, 2, 64, 2).mean(axis=(2, 4))
    large, usual = (
        ImageFeatures(images=ImageEncoder(channels=1, height=side, width=side), mirrored=mirrored) for side in (128, 64)
    )
    rows = large.prepared(images)
    assert torch.allclose(rows.float(), usual.prepared(small).float(), atol=2e-3)
    book = Codebook(kind="images", classes=("a", "b"), height=1024, width_of_image=1024, mirrored=mirrored)
    assert _width(book) == rows.shape[1]

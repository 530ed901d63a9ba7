"""The network of De et al. 2022 from a recipe: standardised filters, augmented copies, averaged iterates; small, on made-up pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hushgrad.cli.main import main
from hushgrad.clipping import Flat, WSConv2d, clipped_sum
from hushgrad.errors import ArgumentError
from hushgrad.recipes import AugmentedImages, WideResNet, load_model

RECIPE = """
[model]
name = "wideresnet-groupnorm"
depth = 10
width = 1
standardised = true
[data]
name = "cifar10"
path = "{folder}"
shift = 4
mirrored = true
[plan]
method = "dpsgd"
noise_multiplier = 1.0
delta = 1e-5
batch_size = 8
steps = 3
augmentations = 2
average = "ema"
[optimizer]
name = "sgd"
lr = 0.5
[run]
seed = 1
"""


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("data_batch_1.bin", 32), ("test_batch.bin", 16)):
        rows = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(count) % 10
        (tmp_path / name).write_bytes(rows.tobytes())
    return tmp_path


def test_the_recipe_trains_and_its_model_is_read_back(folder, capsys):
    recipe, out = folder / "wrn.toml", folder / "run"
    recipe.write_text(RECIPE.format(folder=folder))
    assert main(["train", str(recipe), "--out", str(out)]) == 0
    model = load_model(out)
    kinds = {type(layer) for layer in model.modules()}
    assert {WSConv2d, nn.GroupNorm} <= kinds and nn.Conv2d not in kinds


def test_filters_are_standardised_whatever_the_weights():
    model = WideResNet(3, 10, depth=10, width=1, standardised=True)
    x = torch.randn(4, 3, 16, 16)
    before = model(x)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, WSConv2d):
                shape = (len(layer.weight), 1, 1, 1)
                layer.weight.mul_(torch.rand(shape) + 0.5).add_(torch.randn(shape))
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


class Standardised(nn.Module):
    """The same as a parametrisation of an ordinary convolution."""

    def __init__(self, layer: WSConv2d) -> None:
        super().__init__()
        self.gain, self.eps = layer.gain, layer.eps

    def forward(self, w):
        c = w - w.mean(dim=(1, 2, 3), keepdim=True)
        size = c.square().sum(dim=(1, 2, 3), keepdim=True).clamp_min(self.eps)
        return c * size.rsqrt() * self.gain.view(-1, 1, 1, 1)


def test_the_rule_and_a_parametrisation_agree():
    """The fallback runs the parametrisation again for each example; the rule has a formula."""
    torch.manual_seed(0)
    ruled = nn.Sequential(WSConv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 5)).double()
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 5)).double()
    plain.load_state_dict(ruled.state_dict(), strict=False)
    parametrize.register_parametrization(plain[0], "weight", Standardised(ruled[0]))
    batch = torch.randn(6, 3, 4, 4).double(), torch.randint(5, (6,))
    found, expected = (clipped_sum(model, nn.functional.cross_entropy, batch, Flat(0.7)) for model in (ruled, plain))
    torch.testing.assert_close(found.raw_norms, expected.raw_norms)
    other = {"0.weight": "0.parametrizations.weight.original", "0.gain": "0.parametrizations.weight.0.gain"}
    for name, total in found.raw_sums.items():
        torch.testing.assert_close(total, expected.raw_sums[other.get(name, name)])


def test_a_filter_of_one_weight_is_refused():
    with pytest.raises(ArgumentError, match="two weights"):
        WSConv2d(1, 4, 1)


def test_pictures_are_moved_and_mirrored_by_torchs_generator():
    pictures = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    images = AugmentedImages(pictures, torch.tensor([4, 5]), shift=2)
    torch.manual_seed(3)
    first = [images[0][0] for _ in range(200)]
    torch.manual_seed(3)
    assert all(torch.equal(a, images[0][0]) for a in first)
    kinds = {tuple(a.flatten().tolist()) for a in first}
    assert 40 < len(kinds) <= 50  # 25 places, two sides
    assert tuple(pictures[0].flip(-1).flatten().tolist()) in kinds and images[1][1] == 5
    part = images.part(torch.tensor([False, True]))
    assert len(part) == 1 and part.shift == 2 and part.mirrored
    with pytest.raises(ArgumentError, match="less than the sides"):
        AugmentedImages(pictures, torch.tensor([4, 5]), shift=8)

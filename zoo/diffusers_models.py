"""Small denoising networks of diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.losses import draw
from zoo.specimen import Sizes, Specimen

__all__ = ["specimens"]

_RELATIONS = ("usual", "B=heads")


def specimens() -> Iterator[Specimen]:
    """A U-Net, a transformer, an autoencoder; each example has its own time."""
    yield Specimen("diffusers/UNet2DModel", _unet, _pictures, _denoised, relations=_RELATIONS)
    yield Specimen("diffusers/DiTTransformer2DModel", _dit, _pictures, _conditioned, relations=_RELATIONS)
    yield Specimen("diffusers/AutoencoderKL", _vae, _pictures, _rebuilt, relations=_RELATIONS)


def _unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4,
        attention_head_dim=4,
    )  # fmt: skip


def _dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=1, out_channels=1, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000, norm_num_groups=1,
    )  # fmt: skip


def _vae() -> nn.Module:
    return diffusers.AutoencoderKL(
        in_channels=1, out_channels=1, block_out_channels=(8,), latent_channels=2, norm_num_groups=4, sample_size=8
    )


def _pictures(sizes: Sizes) -> list[Any]:
    shape = (1, 8, 8)
    return [
        (
            torch.randn(shape, dtype=torch.float64, generator=draw(i)),
            torch.randn(shape, dtype=torch.float64, generator=draw(100 + i)),
            torch.tensor(10 * i),
        )
        for i in range(sizes.batch)
    ]


def _denoised(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0], batch[2]).sample, batch[1])


def _conditioned(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0], timestep=batch[2], class_labels=batch[2] % 5).sample, batch[1])


def _rebuilt(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).sample, batch[1])

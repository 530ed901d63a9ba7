"""Models of timm, made small; BatchNorm is replaced first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import timm

from zoo.losses import class_of, images
from zoo.specimen import Specimen

__all__ = ["specimens"]

_VIT: dict[str, Any] = dict(img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2)
_MIXER: dict[str, Any] = dict(img_size=32, patch_size=8, num_blocks=2, embed_dim=24)
_SWIN: dict[str, Any] = dict(img_size=32, patch_size=4, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 2))
_STAGES: dict[str, Any] = dict(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))

_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, _VIT),
    "deit_tiny_distilled_patch16_224": (32, _VIT),
    "eva02_tiny_patch14_224": (32, _VIT),
    "beit_base_patch16_224": (32, _VIT),
    "cait_xxs24_224": (32, _VIT),
    "xcit_nano_12_p16_224": (32, _VIT),
    "vit_relpos_small_patch16_224": (32, _VIT),
    "mixer_s32_224": (32, _MIXER),
    "gmlp_ti16_224": (32, _MIXER),
    "resmlp_12_224": (32, _MIXER),
    "swin_tiny_patch4_window7_224": (32, _SWIN),
    "swinv2_tiny_window8_256": (32, _SWIN),
    "convnext_atto": (32, _STAGES),
    "convnextv2_atto": (32, _STAGES),
    "poolformer_s12": (32, _STAGES),
    "convformer_s18": (32, _STAGES),
    "caformer_s18": (32, dict(_STAGES, dims=(8, 8, 16, 32))),
    "inception_next_tiny": (32, _STAGES),
    "mambaout_femto": (32, dict(_STAGES, dims=(16, 16, 16, 32))),
    "focalnet_tiny_srf": (32, dict(depths=(1, 1, 1, 1), embed_dim=8)),
    "davit_tiny": (64, dict(depths=(1,) * 4, embed_dims=(8, 8, 16, 16), num_heads=(2,) * 4, num_groups=(2,) * 4)),
    "pvt_v2_b0": (32, dict(depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2))),
    "twins_pcpvt_small": (
        32,
        dict(img_size=32, depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), mlp_ratios=(2, 2), sr_ratios=(2, 1)),
    ),
    "nest_tiny": (32, dict(img_size=32, patch_size=4, num_levels=2, embed_dims=(8, 16), num_heads=(1, 2), depths=(1, 1))),
    "edgenext_xx_small": (64, dict(dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), heads=(2, 2, 2, 2))),
    "sequencer2d_s": (32, dict(layers=(1,) * 4, embed_dims=(8,) * 4, hidden_sizes=(4,) * 4, patch_sizes=(7, 2, 1, 1))),
    "hiera_tiny_224": (64, dict(img_size=(64, 64), embed_dim=8, num_heads=1, stages=(1, 1, 1, 1))),
    "tnt_s_legacy_patch16_224": (
        32,
        dict(img_size=32, depth=2, embed_dim=24, inner_dim=8, num_heads_outer=2, num_heads_inner=2),
    ),
    "crossvit_tiny_240": (
        48,
        dict(
            img_size=48, embed_dim=(12, 24), depth=((1, 1, 0),), num_heads=(2, 2), mlp_ratio=(2, 2, 1), img_scale=(1.0, 1.0),
            patch_size=(12, 16),
        ),
    ),
    "levit_128s": (64, dict(img_size=64, embed_dim=(16, 16, 16), key_dim=4, depth=(1, 1, 1), num_heads=(2, 2, 2))),
    "coat_lite_tiny": (
        64,
        dict(img_size=64, embed_dims=(8, 8, 16, 16), serial_depths=(1, 1, 1, 1), mlp_ratios=(2, 2, 2, 2), num_heads=2),
    ),
    "mvitv2_tiny": (64, dict(img_size=64, embed_dim=8, depths=(1, 1), num_heads=(1, 2))),
    "visformer_tiny": (64, dict(img_size=64, embed_dim=24, depth=(1, 1, 1), num_heads=2, init_channels=8)),
    "pit_ti_224": (64, dict(img_size=64, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2))),
    "test_vit": (32, dict(img_size=32)),
    "test_vit4": (32, dict(img_size=32)),
    **dict.fromkeys(
        "test_resnet test_efficientnet test_efficientnet_gn test_byobnet test_convnext test_nfnet test_mambaout "
        "test_efficientnet_evos test_efficientnet_ln".split(),
        (32, {}),
    ),
    "volo_d1_224": (
        32,
        dict(
            img_size=32, layers=(1, 1), embed_dims=(12, 24), num_heads=(2, 2), mlp_ratio=2.0, downsamples=(True, False),
            outlook_attention=(True, False),
        ),
    ),
}  # fmt: skip


def specimens() -> Iterator[Specimen]:
    """Each with five classes; a batch of two equals the number of heads in most of them."""
    for name, (side, options) in _MODELS.items():
        build = partial(timm.create_model, name, num_classes=5, **options)
        records = images(side, classes=5)
        yield Specimen(f"timm/{name}", build, records, class_of, batchnorm=True, relations=("usual", "B=heads"))

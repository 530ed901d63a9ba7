"""Models of timm, made small; BatchNorm is replaced first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
from timm.models import coat, davit, focalnet, metaformer, mlp_mixer, mvitv2, nest, volo
from torch import nn

from zoo.losses import class_of, images
from zoo.specimen import Specimen

__all__ = ["specimens"]

_VIT: dict[str, Any] = dict(img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2)
_MIXER: dict[str, Any] = dict(num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=24)
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
    "swin_tiny_patch4_window7_224": (32, _SWIN),
    "swinv2_tiny_window8_256": (32, _SWIN),
    "convnext_atto": (32, _STAGES),
    "convnextv2_atto": (32, _STAGES),
    "inception_next_tiny": (32, _STAGES),
    "mambaout_femto": (32, dict(_STAGES, dims=(16, 16, 16, 32))),
    "pvt_v2_b0": (32, dict(depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2))),
    "twins_pcpvt_small": (
        32,
        dict(img_size=32, depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), mlp_ratios=(2, 2), sr_ratios=(2, 1)),
    ),
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
    "visformer_tiny": (64, dict(img_size=64, embed_dim=24, depth=(1, 1, 1), num_heads=2, init_channels=8)),
    "pit_ti_224": (64, dict(img_size=64, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2))),
    "test_vit": (32, dict(img_size=32)),
    "test_vit4": (32, dict(img_size=32)),
    **dict.fromkeys(
        "test_resnet test_efficientnet test_efficientnet_gn test_byobnet test_convnext test_nfnet test_mambaout "
        "test_efficientnet_evos test_efficientnet_ln".split(),
        (32, {}),
    ),
}  # fmt: skip

_META: dict[str, Any] = dict(num_classes=5, depths=(1, 1, 1, 1), dims=(8, 8, 16, 32))
_POOL: dict[str, Any] = dict(downsample_norm=None, mlp_act=nn.GELU, mlp_bias=True, norm_layers=metaformer.GroupNorm1)
_POOL |= dict(layer_scale_init_values=1e-5, res_scale_init_values=None, use_mlp_head=False)
_MIXED = [metaformer.SepConv] * 2 + [metaformer.Attention] * 2
_MIXED_NORMS = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2

# Those whose published names fix their sizes, built as these do.
_BUILT: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "MlpMixer": (32, lambda: mlp_mixer.MlpMixer(**_MIXER)),
    "gMLP": (
        32,
        lambda: mlp_mixer.MlpMixer(
            **_MIXER, mlp_ratio=6, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=mlp_mixer.GatedMlp
        ),
    ),
    "ResMLP": (
        32,
        lambda: mlp_mixer.MlpMixer(**_MIXER, mlp_ratio=4, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine),
    ),
    "PoolFormer": (32, lambda: metaformer.MetaFormer(**_META, **_POOL)),
    "ConvFormer": (
        32,
        lambda: metaformer.MetaFormer(
            **_META, token_mixers=metaformer.SepConv, norm_layers=metaformer.LayerNorm2dNoBias, use_mlp_head=True
        ),
    ),
    "CAFormer": (32, lambda: metaformer.MetaFormer(**{**_META, "dims": (8, 8, 32, 32)}, token_mixers=_MIXED, norm_layers=_MIXED_NORMS)),
    "FocalNet": (32, lambda: focalnet.FocalNet(num_classes=5, depths=(1,) * 4, embed_dim=8, drop_path_rate=0.0)),
    "DaViT": (
        64,
        lambda: davit.DaVit(num_classes=5, depths=(1,) * 4, embed_dims=(8, 8, 16, 16), num_heads=(2,) * 4),
    ),
    "NesT": (
        32,
        lambda: nest.Nest(
            num_classes=5, img_size=32, num_levels=2, embed_dims=(8, 16), num_heads=(1, 2), depths=(1, 1), drop_path_rate=0.0
        ),
    ),
    "CoaT": (
        64,
        lambda: coat.CoaT(
            num_classes=5, img_size=64, patch_size=4, embed_dims=(16,) * 4, serial_depths=(1,) * 4, mlp_ratios=(2,) * 4
        ),
    ),
    "MViTv2": (
        64,
        lambda: mvitv2.MultiScaleVit(
            mvitv2.MultiScaleVitCfg(depths=(1, 1), embed_dim=8, num_heads=1), img_size=(64, 64), num_classes=5
        ),
    ),
    "VOLO": (
        32,
        lambda: volo.VOLO(
            num_classes=5, img_size=32, layers=[1, 1], embed_dims=[12, 24], num_heads=[2, 2], mlp_ratio=2.0, stem_hidden_dim=8,
            downsamples=(True, False), outlook_attention=(True, False), use_aux_head=False, post_layers=None,
        ),
    ),
}  # fmt: skip


def specimens() -> Iterator[Specimen]:
    """Each with five classes; a batch of two equals the number of heads in most of them."""
    published = {name: (side, partial(timm.create_model, name, num_classes=5, **kw)) for name, (side, kw) in _MODELS.items()}
    for name, (side, build) in (published | _BUILT).items():
        records = images(side, classes=5)
        yield Specimen(f"timm/{name}", build, records, class_of, batchnorm=True, relations=("usual", "B=heads"))

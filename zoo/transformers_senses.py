"""Tiny models of transformers that see or hear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.losses import VOCABULARY, draw, images, texts
from zoo.specimen import Sizes, Specimen
from zoo.transformers_text import transformer

__all__ = ["specimens"]

_PICTURES = ("usual", "B=heads", "B=width")  # the other relations are of text

_VIT: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
_VIT |= dict(image_size=16, patch_size=4)
_BEIT = dict(_VIT, drop_path_rate=0.0, use_relative_position_bias=True, use_absolute_position_embeddings=True)
_WORDS = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
_PAIR: dict[str, Any] = dict(vision_config=dict(_VIT), text_config=_WORDS)

_SMALL: dict[str, dict[str, Any]] = {  # pictures of 16 x 16
    **dict.fromkeys("ViT DeiT ViTMSN IJepa".split(), _VIT),
    "Beit": _BEIT,
    "Data2VecVision": _BEIT,
    "Dinov2": dict(_VIT, mlp_ratio=2, drop_path_rate=0.0),
    "Dinov2WithRegisters": dict(_VIT, mlp_ratio=2, drop_path_rate=0.0, num_register_tokens=2),
    "Siglip": _PAIR,
    "CLIP": _PAIR,
}

_STILL = dict(drop_path_rate=0.0)
_SWIN: dict[str, Any] = dict(_STILL, image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
_NEXT: dict[str, Any] = dict(_STILL, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], image_size=32)
_RES: dict[str, Any] = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
_PVT: dict[str, Any] = dict(
    _STILL, image_size=32, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2] * 4
)
_LARGE: dict[str, dict[str, Any]] = {  # pictures of 32 x 32
    "Swin": _SWIN,
    "Swinv2": _SWIN,
    "ConvNext": _NEXT,
    "ConvNextV2": _NEXT,
    "ResNet": dict(_RES, layer_type="basic"),
    "RegNet": dict(_RES, layer_type="x", groups_width=8),
    "Bit": dict(_RES, layer_type="preactivation", num_groups=4),
    "Hiera": dict(
        _STILL, embed_dim=8, image_size=[32, 32], patch_kernel=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], depths=[1, 1],
        num_heads=[1, 2], query_stride=[2, 2], masked_unit_size=[4, 4], num_query_pool=1, masked_unit_attention=[True, False],
    ),
    "PoolFormer": dict(_STILL, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4),
    "FocalNet": dict(
        _STILL, image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
        hidden_sizes=[8, 16],
    ),
    "Segformer": dict(
        _STILL, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
    ),
    "MobileViT": dict(
        image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], num_attention_heads=2,
        aspp_out_channels=8, mlp_ratio=1.0,
    ),
    "Pvt": dict(_PVT, sequence_reduction_ratios=[2, 2, 1, 1], num_encoder_blocks=4),
    "PvtV2": dict(_PVT, sr_ratios=[2, 2, 1, 1]),
    "Cvt": dict(
        embed_dim=[8, 8, 16], depth=[1, 2, 3], num_heads=[1, 1, 2], patch_sizes=[7, 3, 3], drop_path_rate=[0.0] * 3,
        mlp_ratio=[2.0] * 3, cls_token=[False, False, True],
    ),
    "Levit": dict(
        image_size=32, hidden_sizes=[8, 8, 16], num_attention_heads=[2] * 3, depths=[1] * 3, key_dim=[4] * 3, drop_path_rate=0,
        mlp_ratio=[2] * 3, attention_ratio=[2] * 3, down_ops=[["Subsample", 4, 2, 2, 2, 2], ["Subsample", 4, 2, 2, 2, 2]],
    ),
    "SwiftFormer": dict(_STILL, depths=[1] * 4, embed_dims=[8, 8, 16, 16], image_size=32),
}  # fmt: skip

_SPEECH: dict[str, Any] = dict(
    vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, conv_dim=[8, 8],
    conv_stride=[5, 4], conv_kernel=[8, 4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm="layer",
    layerdrop=0.0, apply_spec_augment=False, num_feat_extract_layers=2, conv_bias=True, feat_proj_dropout=0.0, final_dropout=0.0,
)  # fmt: skip
_LISTENERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys("Wav2Vec2 Hubert WavLM UniSpeech Wav2Vec2Conformer".split(), _SPEECH),
    "SEW": dict(_SPEECH, squeeze_factor=2),
}


def specimens() -> Iterator[Specimen]:
    """Pictures with a class, pairs of pictures and texts, speech."""
    for side, models in ((16, _SMALL), (32, _LARGE)):
        for name, options in models.items():
            build = partial(transformer, f"{name}Config", f"{name}ForImageClassification", options)
            records = images(side, key="pixel_values")
            yield Specimen(f"transformers/{name}", build, records, _seen, batchnorm=True, relations=_PICTURES)
    yield Specimen("transformers/CLIP, contrastive", partial(transformer, "CLIPConfig", "CLIPModel", _PAIR), _pairs, _contrast)
    for name, options in _LISTENERS.items():
        yield _listener(name, name, options)
    yield _listener("Wav2Vec2, group norm", "Wav2Vec2", dict(_SPEECH, feat_extract_norm="group"))
    yield Specimen("transformers/Whisper", partial(transformer, "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER),
                   _spectra, _dictated, relations=_PICTURES)  # fmt: skip
    yield Specimen("transformers/AST", partial(transformer, "ASTConfig", "ASTForAudioClassification", _AST), _patches, _heard,
                   relations=_PICTURES)  # fmt: skip


def _seen(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])


def _pairs(sizes: Sizes) -> list[Any]:
    pictures = images(16, key="pixel_values")(sizes)
    return [{**text, **picture} for text, picture in zip(texts(sizes), pictures, strict=True)]


def _contrast(model: nn.Module, batch: Any) -> Tensor:
    """Each text against every picture of the batch: no sum over the examples, so this must be refused."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], pixel_values=batch["pixel_values"])
    return F.cross_entropy(out.logits_per_text, torch.arange(len(out.logits_per_text)))


def _listener(title: str, name: str, options: dict[str, Any]) -> Specimen:
    build = partial(transformer, f"{name}Config", f"{name}ForCTC", options)
    return Specimen(f"transformers/{title}", build, _sounds, _transcribed, relations=_PICTURES)


def _sounds(sizes: Sizes) -> list[Any]:
    return [
        {"input_values": torch.randn(400, dtype=torch.float64, generator=draw(i)), "labels": torch.tensor([3 + i % 6, 4, 5])}
        for i in range(sizes.batch)
    ]


def _transcribed(model: nn.Module, batch: Any) -> Tensor:
    scores = model(input_values=batch["input_values"]).logits.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((scores.shape[1],), scores.shape[0])
    losses = F.ctc_loss(scores, batch["labels"], lengths, torch.full_like(lengths, 3), reduction="none", zero_infinity=True)
    return (losses / 3).mean()


_WHISPER: dict[str, Any] = dict(
    vocab_size=VOCABULARY, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=10, max_target_positions=16,
    use_cache=False, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=0, encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
)  # fmt: skip
_AST: dict[str, Any] = dict(_VIT, frequency_stride=4, time_stride=4, max_length=24, num_mel_bins=16)
del _AST["image_size"]


def _spectra(sizes: Sizes) -> list[Any]:
    return [
        {
            "input_features": torch.randn(8, 20, dtype=torch.float64, generator=draw(i)),
            "labels": torch.randint(3, 30, (5,), generator=draw(i)),
        }
        for i in range(sizes.batch)
    ]


def _dictated(model: nn.Module, batch: Any) -> Tensor:
    scores = model(input_features=batch["input_features"], decoder_input_ids=batch["labels"]).logits
    return F.cross_entropy(scores.transpose(1, 2), batch["labels"], reduction="none").mean(1).mean()


def _patches(sizes: Sizes) -> list[Any]:
    return [
        {"input_values": torch.randn(24, 16, dtype=torch.float64, generator=draw(i)), "labels": torch.tensor(i % 2)}
        for i in range(sizes.batch)
    ]


def _heard(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(input_values=batch["input_values"]).logits, batch["labels"])

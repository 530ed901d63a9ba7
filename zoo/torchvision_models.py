"""Models of torchvision, small ones and a few at their published size; BatchNorm is replaced first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision.models as tv
from torch import nn
from torchvision.models import convnext, densenet, maxvit, segmentation, swin_transformer, vgg, vision_transformer

from zoo.losses import class_of, draw, images
from zoo.specimen import Sizes, Specimen

__all__ = ["specimens"]

_CLASSES = 5


def _swin(**options: Any) -> nn.Module:
    return swin_transformer.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [4, 4], num_classes=_CLASSES, **options)


def _convnext() -> nn.Module:
    stages = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)]
    return convnext.ConvNeXt(stages, stochastic_depth_prob=0.0, num_classes=_CLASSES)


def _vgg() -> nn.Module:
    """Its features, with a head of a few numbers instead of a hundred million."""
    features = vgg.make_layers([8, "M", 16, "M"], batch_norm=True)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, _CLASSES))


def _maxvit() -> nn.Module:
    return maxvit.MaxVit(
        input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[8, 16], block_layers=[1, 1], head_dim=4,
        stochastic_depth_prob=0.0, num_classes=_CLASSES,
    )  # fmt: skip


_SWIN_V2 = dict(block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2)

_MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: tv.resnet18(num_classes=_CLASSES), 32),
    "resnext50_32x4d": (lambda: tv.resnext50_32x4d(num_classes=_CLASSES), 32),
    "VisionTransformer": (lambda: vision_transformer.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=_CLASSES), 32),
    "SwinTransformer": (lambda: _swin(stochastic_depth_prob=0.0), 32),
    "SwinTransformer V2": (lambda: _swin(stochastic_depth_prob=0.0, **_SWIN_V2), 32),
    "SwinTransformer, stochastic depth": (_swin, 32),
    "ConvNeXt": (_convnext, 32),
    "DenseNet": (lambda: densenet.DenseNet(8, (2, 2, 2), 16, num_classes=_CLASSES), 32),
    "efficientnet_b0": (lambda: tv.efficientnet_b0(num_classes=_CLASSES, stochastic_depth_prob=0.0), 32),
    "mobilenet_v2": (lambda: tv.mobilenet_v2(num_classes=_CLASSES), 32),
    "mobilenet_v3_small": (lambda: tv.mobilenet_v3_small(num_classes=_CLASSES), 32),
    "shufflenet_v2_x0_5": (lambda: tv.shufflenet_v2_x0_5(num_classes=_CLASSES), 32),
    "squeezenet1_1": (lambda: tv.squeezenet1_1(num_classes=_CLASSES), 32),
    "mnasnet0_5": (lambda: tv.mnasnet0_5(num_classes=_CLASSES), 32),
    "regnet_y_400mf": (lambda: tv.regnet_y_400mf(num_classes=_CLASSES), 32),
    "VGG": (_vgg, 32),
    "googlenet": (lambda: tv.googlenet(num_classes=_CLASSES, aux_logits=False, init_weights=False), 32),
    "googlenet, auxiliary heads": (lambda: tv.googlenet(num_classes=_CLASSES, aux_logits=True, init_weights=False), 64),
    "MaxVit": (_maxvit, 64),
}


def specimens() -> Iterator[Specimen]:
    """Classifiers, and a segmentation model."""
    for name, (build, side) in _MODELS.items():
        records = images(side, classes=_CLASSES)
        yield Specimen(f"torchvision/{name}", build, records, class_of, batchnorm=True, relations=("usual",))
    yield Specimen("torchvision/lraspp_mobilenet_v3_large", _lraspp, _scenes, class_of, batchnorm=True, relations=("usual",))


def _lraspp() -> nn.Module:
    return segmentation.lraspp_mobilenet_v3_large(num_classes=_CLASSES, weights=None, weights_backbone=None)


def _scenes(sizes: Sizes) -> list[Any]:
    return [
        (torch.randn(3, 32, 32, dtype=torch.float64, generator=draw(i)), torch.randint(_CLASSES, (32, 32), generator=draw(i)))
        for i in range(sizes.batch)
    ]

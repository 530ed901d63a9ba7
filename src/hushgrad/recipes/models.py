"""The models that a recipe can name. None mixes examples: group and layer norms, never batch norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad import _check
from hushgrad.clipping.rules.standardised import WSConv2d
from hushgrad.recipes.dataset import Data

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def _activation(name: str) -> type[nn.Module]:
    return _ACTIVATIONS[_check.one_of(_ACTIVATIONS, activation=name)]


def logistic(data: Data) -> nn.Module:
    """Multinomial logistic regression on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.shape), data.classes))


class Linear(nn.Module):
    """A linear model for rows of length 1, with a constant feature of 1/4 and weights that start at 0.

    With a constant of 1, half of a row's gradient would belong to the constant; a quarter costs little of the clip norm.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width + 1, classes, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores; rows may be in half precision."""
        scores: Tensor = self.head(F.pad(x.flatten(1).float(), (0, 1), value=0.25))
        return scores


def linear(data: Data) -> nn.Module:
    """A linear model for rows of length 1."""
    return Linear(math.prod(data.shape), data.classes)


def mlp(data: Data, *, hidden: int = 64, layers: int = 1, activation: str = "tanh") -> nn.Module:
    """Fully connected layers on the flattened input."""
    width, blocks = math.prod(data.shape), [nn.Flatten()]
    for _ in range(_check.positive_int(layers=layers)):
        blocks += [nn.Linear(width, hidden), _activation(activation)()]  # type: ignore[list-item]
        width = hidden
    return nn.Sequential(*blocks, nn.Linear(width, data.classes))


def cnn(data: Data, *, activation: str = "tanh") -> nn.Module:
    """The small convolutional net of the TF-privacy tutorial (26,010 parameters on MNIST); tanh as in Papernot et al. 2021."""
    channels, height, width = _image(data, smallest=16)
    act = _activation(activation)
    body = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    with torch.no_grad():
        features = body(torch.zeros(1, channels, height, width)).shape[1]
    return nn.Sequential(*body, nn.Linear(features, 32), act(), nn.Linear(32, data.classes))


def small_cnn(data: Data, *, channels: int = 16, activation: str = "tanh") -> nn.Module:
    """Two 3 x 3 convolutions, for images of 8 x 8 pixels and more."""
    depth, height, width = _image(data, smallest=4)
    act = _activation(activation)
    return nn.Sequential(
        nn.Conv2d(depth, channels, 3, padding=1),
        act(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
        act(),
        nn.Flatten(),
        nn.Linear(2 * channels * math.ceil(height / 2) * math.ceil(width / 2), data.classes),
    )


def _image(data: Data, *, smallest: int) -> tuple[int, int, int]:
    if data.vocabulary or len(data.shape) != 3 or min(data.shape[1:]) < smallest:
        _check.fail("data", data.shape, f"to be images of at least {smallest} x {smallest} pixels", "Use mlp or logistic.")
    channels, height, width = data.shape
    return channels, height, width


class _Block(nn.Module):
    """Pre-activation residual block with group norms."""

    def __init__(self, width_in: int, width: int, stride: int, groups: int, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(min(groups, width_in), width_in), nn.GroupNorm(groups, width)
        self.conv1 = conv(width_in, width, 3, stride=stride, padding=1)
        self.conv2 = conv(width, width, 3, padding=1)
        self.skip = conv(width_in, width, 1, stride=stride) if (stride, width_in) != (1, width) else None

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum."""
        y = F.relu(self.norm1(x))
        shortcut: Tensor = x if self.skip is None else self.skip(y)
        inner: Tensor = self.conv2(F.relu(self.norm2(self.conv1(y))))
        return shortcut + inner


class WideResNet(nn.Module):
    """Wide residual net with group norms, WRN-``depth``-``width`` (Zagoruyko and Komodakis 2016; De et al. 2022).

    With ``standardised`` its convolutions are :class:`~hushgrad.clipping.WSConv2d`, as in De et al. 2022, who also average the iterates
    (``Plan(average="ema")``) and clip the mean gradient of several augmented copies (``augmentations=16``).

        >>> import torch
        >>> WideResNet(3, 10, depth=10, width=1)(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, channels: int, classes: int, *, depth: int = 16, width: int = 4, groups: int = 16, standardised: bool = False
    ) -> None:
        super().__init__()
        conv = WSConv2d if _check.instance(bool, standardised=standardised) else nn.Conv2d
        if depth < 10 or (depth - 4) % 6:
            _check.fail("depth", depth, "to be 6 n + 4, at least 10")
        widths = [16, 16 * width, 32 * width, 64 * width]
        blocks: list[nn.Module] = []
        for stage in range(3):
            for number in range((depth - 4) // 6):
                first = number == 0
                start = widths[stage] if first else widths[stage + 1]
                blocks.append(_Block(start, widths[stage + 1], 2 if first and stage else 1, groups, conv))
        self.stem = conv(channels, 16, 3, padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(groups, widths[3])
        self.head = nn.Linear(widths[3], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        scores: Tensor = self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean(dim=(2, 3)))
        return scores


def wide_resnet(data: Data, *, depth: int = 16, width: int = 4, standardised: bool = False) -> nn.Module:
    """WRN-16-4 with group norms by default."""
    return WideResNet(_image(data, smallest=16)[0], data.classes, depth=depth, width=width, standardised=standardised)


class TextClassifier(nn.Module):
    """The mean of word embeddings, without padding, then one linear layer."""

    def __init__(self, vocabulary: int, classes: int, *, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Class scores; id 0 is padding."""
        there = (ids > 0).unsqueeze(-1).float()
        mean = (self.embedding(ids) * there).sum(dim=1) / there.sum(dim=1).clamp(min=1.0)
        scores: Tensor = self.head(mean)
        return scores


def text_classifier(data: Data, *, width: int = 32) -> nn.Module:
    """Mean of word embeddings."""
    return TextClassifier(_words(data), data.classes, width=width)


def _words(data: Data) -> int:
    return data.vocabulary or _check.fail("data", data.shape, "to be text", "Use labelled-text or text.")


class _Attention(nn.Module):
    """Causal self-attention and a two-layer net, each after a layer norm, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        inner: Tensor = self.down(F.gelu(self.up(self.norm2(y))))
        return y + inner


class GPT(nn.Module):
    """A small decoder-only transformer with learned positions (Radford et al. 2019)."""

    def __init__(self, vocabulary: int, length: int, *, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        if width % heads:
            _check.fail("width", width, f"to be a multiple of heads={heads}")
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Attention(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token, (batch, vocabulary, time): the layout that cross_entropy takes."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        scores: Tensor = self.head(self.norm(self.blocks(self.token(ids) + self.position(places))))
        return scores.transpose(1, 2)


def gpt_small(data: Data, *, width: int = 128, heads: int = 4, layers: int = 4) -> nn.Module:
    """A transformer for next-byte prediction (0.87 million parameters by default)."""
    return GPT(_words(data), data.shape[0], width=width, heads=heads, layers=layers)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "small-cnn": small_cnn,
    "wideresnet-groupnorm": wide_resnet,
    "text": text_classifier,
    "gpt-small": gpt_small,
}
"""The models by the name that a recipe uses."""

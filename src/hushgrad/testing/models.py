"""The models on which steps are counted and timed: an MLP, a small CNN, WRN-16-4, a transformer of four blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WORDS, _LENGTH = 2000, 64


class Sample(NamedTuple):
    """A model, matching records, and its loss."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class _Block(nn.Module):
    """Norm, convolution, norm, convolution, and the input around them."""

    def __init__(self, wide: int, wider: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, wide), nn.Conv2d(wide, wider, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(16, wider), nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(wide, wider, 1, stride, bias=False) if stride != 1 or wide != wider else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        rest = x if self.around is None else self.around(h)
        return self.conv2(F.relu(self.norm2(self.conv1(h)))) + rest  # type: ignore[no-any-return]


class _Wide(nn.Module):
    """A wide residual network of 16 layers, four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        sizes = [(16, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        self.blocks = nn.Sequential(*[_Block(*size) for size in sizes])
        self.norm, self.head = nn.GroupNorm(16, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.conv(x)))).mean((2, 3)))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """A block of a causal transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.read, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.read(self.norm1(x)).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        by = (q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v
        x = x + self.out(by.transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class _Language(nn.Module):
    """Four blocks over a vocabulary; the head may be tied to the embedding."""

    def __init__(self, *, tied: bool = False, width: int = 128) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(_WORDS, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*[_Attention(width, 4) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return self.head(self.norm(self.blocks(self.table(ids) + self.places(places))))  # type: ignore[no-any-return]


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def _convolutional() -> nn.Module:
    first = nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)
    second = nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))


def _token_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1).mean()


def _pictures(make: Callable[[], nn.Module], *shape: int) -> Callable[[int], Sample]:
    return lambda n: Sample(make(), torch.randn(n, *shape), torch.randint(10, (n,)), F.cross_entropy)


def _texts(*, tied: bool) -> Callable[[int], Sample]:
    def made(n: int) -> Sample:
        ids = torch.randint(_WORDS, (2, n, _LENGTH))
        return Sample(_Language(tied=tied), ids[0], ids[1], _token_loss)

    return made


MODELS: dict[str, Callable[[int], Sample]] = {
    "MLP": _pictures(_perceptron, 784),
    "CNN": _pictures(_convolutional, 1, 28, 28),
    "WRN-16-4": _pictures(_Wide, 3, 32, 32),
    "GPT, 4 blocks": _texts(tied=False),
    "GPT, tied": _texts(tied=True),
}

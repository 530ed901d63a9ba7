"""The paths by which a gradient reaches a clipped sum: what ``worst.py`` searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.clipping import Adaptive, Automatic, Clipper, Flat, PerLayer

__all__ = ["PATHS", "Path"]

_OTHERS = 24


class Path(NamedTuple):
    """How a record gets into the sum. ``shapes``: of one record's inputs (or of ids, with their number) and of its target."""

    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    target: tuple[int, ...]
    ids: int = 0  # inputs are ids below this number
    clip: Clipper = Flat(1.0)
    how: str = "batch"  # or units, probes, micro-batches, rows; cancelling: the others' parts cancel, so that any rounding shows
    dtype: torch.dtype = torch.float32
    others: int = _OTHERS
    cut: int = 8  # of micro-batches, in units
    threads: int = 1


class _First(nn.Module):
    """The first output of a layer, from a single input that may be wanted three times."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(*[x] * self.times)
        return y[0] if isinstance(y, tuple) else y


class _Twice(nn.Module):
    """One layer on each position by itself: as many calls as positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(part) for part in x.unbind(1)], 1)


class _Tied(nn.Module):
    """A table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 16), nn.Linear(16, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


class _Scale(nn.Module):
    """A layer without a rule: the fallback's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Cells(nn.Module):
    """A cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), 8), []
        for part in x.unbind(1):
            h = self.cell(part, h)
            out.append(h)
        return torch.stack(out, 1)


def _linear() -> nn.Module:
    return nn.Linear(64, 64, bias=False)


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def _middle() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def _few() -> dict[str, Path]:
    """Batches of 1 to 12 rows, and micro-batches of few: libraries compute these by other kernels than larger ones."""
    users = Path(_small, (3, 8), (3, 8), how="units, cancelling")
    texts = Path(_small, (2, 8), (2, 8), how="cancelling")
    one = Path(lambda: nn.Sequential(nn.Linear(8, 1), nn.Tanh(), nn.Linear(1, 8)), (3, 8), (3, 8), how="units, cancelling")
    cut = users._replace(how="units, micro-batches, cancelling", others=5)
    made = {
        **{f"few users, {n}": users._replace(others=n) for n in (1, 2, 3)},
        **{f"few texts, {n}": texts._replace(others=n) for n in (1, 2, 5)},
        "few users, one wide": one._replace(others=5),
        **{f"few users, cut to {n}": cut._replace(cut=n) for n in (1, 2, 3)},
        **{f"few texts, cut to {n}": texts._replace(how="micro-batches, cancelling", cut=n, others=7) for n in (1, 2, 3, 5)},
    }
    twice = ("few users, 1", "few users, 2", "few users, 3", "few texts, 2", "few users, cut to 3", "few texts, cut to 5")
    return {**made, **{f"{name}, two threads": _wider(made[name])._replace(model=_middle, threads=2) for name in twice}}


def _wider(path: Path) -> Path:
    return path._replace(inputs=(*path.inputs[:-1], 64), target=(*path.target[:-1], 64))


_ADAPTIVE = Adaptive(1.0, batch_size=_OTHERS)
PATHS: dict[str, Path] = {
    "one position": Path(_linear, (64,), (64,)),
    "one position, small C": Path(lambda: nn.Linear(784, 1, bias=False), (784,), (1,), clip=Flat(1e-3)),
    "one position, tiny C": Path(lambda: nn.Linear(784, 1, bias=False), (784,), (1,), clip=Flat(1e-6)),
    "one position, few outputs": Path(lambda: nn.Linear(64, 10), (64,), (10,), clip=Flat(1e-2)),
    "two layers": Path(_small, (8,), (8,)),
    "positions, Gram": Path(_linear, (4, 64), (4, 64)),
    "positions, Gram, wide": Path(lambda: nn.Linear(128, 128), (16, 128), (16, 128)),
    "positions, kept": Path(lambda: nn.Linear(8, 8), (16, 8), (16, 8)),
    "positions, pieces": Path(lambda: nn.Linear(256, 256), (64, 256), (64, 256), others=8),
    "positions in two dimensions": Path(lambda: nn.Linear(8, 8), (4, 4, 8), (4, 4, 8)),
    "double precision": Path(_linear, (4, 64), (4, 64), dtype=torch.float64),
    "bfloat16": Path(lambda: nn.Linear(32, 32), (4, 32), (4, 32), dtype=torch.bfloat16),
    "convolution": Path(lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6), (3, 6, 6)),
    "convolution, Gram": Path(lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 3, 3), (64, 3, 3), others=8),
    "convolution, 1 dimension": Path(lambda: nn.Conv1d(4, 4, 3, groups=2), (4, 10), (4, 8)),
    "convolution, 3 dimensions": Path(lambda: nn.Conv3d(2, 3, 2), (2, 4, 3, 4), (3, 3, 2, 3)),
    "transposed convolution": Path(lambda: nn.ConvTranspose2d(2, 3, 3), (2, 4, 4), (3, 6, 6)),
    "embedding": Path(lambda: nn.Embedding(12, 8), (8,), (8, 8), ids=12),
    "embedding, rows": Path(lambda: nn.Embedding(12, 8), (8,), (8, 8), ids=12, how="rows"),
    "embedding, padding": Path(lambda: nn.Embedding(12, 8, padding_idx=0), (8,), (8, 8), ids=12),
    "bag": Path(lambda: nn.EmbeddingBag(12, 8, mode="sum"), (8,), (8,), ids=12),
    "layer norm": Path(lambda: nn.LayerNorm(16), (8, 16), (8, 16)),
    "group norm": Path(lambda: nn.GroupNorm(2, 4), (4, 12), (4, 12)),
    "instance norm": Path(lambda: nn.InstanceNorm1d(4, affine=True), (4, 12), (4, 12)),
    "rms norm": Path(lambda: nn.RMSNorm(16), (8, 16), (8, 16)),
    "recurrent": Path(lambda: _First(nn.LSTM(8, 8, batch_first=True)), (6, 8), (6, 8)),
    "cell": Path(_Cells, (6, 8), (6, 8)),
    "attention": Path(lambda: _First(nn.MultiheadAttention(8, 2, batch_first=True), 3), (6, 8), (6, 8)),
    "fallback": Path(_Scale, (8, 16), (8, 16)),
    "called twice": Path(lambda: _Twice(nn.Linear(32, 32)), (2, 32), (2, 32)),
    "called often": Path(lambda: _Twice(nn.Linear(32, 32)), (8, 32), (8, 32)),
    "tied weights": Path(_Tied, (6,), (6, 12), ids=12),
    "users": Path(_small, (4, 8), (4, 8), how="units"),
    "users with many examples": Path(lambda: nn.Linear(16, 16), (32, 16), (32, 16), how="units"),
    "users over micro-batches": Path(lambda: nn.Linear(16, 16), (4, 16), (4, 16), how="units, micro-batches"),
    "users, positions": Path(lambda: nn.Linear(32, 32), (4, 4, 32), (4, 4, 32), how="units"),
    "users, tables": Path(lambda: nn.Embedding(12, 8), (4, 3), (4, 3, 8), ids=12, how="units"),
    "probes": Path(_linear, (64,), (2, 64), how="probes"),
    "probes, positions": Path(_linear, (4, 64), (2, 4, 64), how="probes"),
    "probes, fallback": Path(_Scale, (8, 16), (2, 8, 16), how="probes"),
    "micro-batches": Path(_linear, (4, 64), (4, 64), how="micro-batches"),
    "per layer": Path(_small, (4, 8), (4, 8), clip=PerLayer(1.0)),
    "automatic": Path(_linear, (4, 64), (4, 64), clip=Automatic(1.0)),
    "adaptive": Path(_linear, (4, 64), (4, 64), clip=_ADAPTIVE),
    **_few(),
}  # fmt: skip

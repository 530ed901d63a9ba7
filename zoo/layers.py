"""Single layers in many configurations: torch's own, and the ones with which Opacus replaces some of them.

The kinds and the ranges of their sizes are those that Opacus tests its per-sample gradients with; each configuration is drawn
here, from a fixed seed, and compared under a loss that is a sum over the examples and under one that is their mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from zoo.losses import draw
from zoo.specimen import Sizes, Specimen

__all__ = ["specimens"]

_DRAWS = 34  # of each kind


class _Case(NamedTuple):
    """A layer and the shape of one example's input; ``first``: the batch is the first dimension, else the second."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    first: bool = True
    ids: int = 0  # inputs are numbers below this, not real
    packed: bool = False
    bagged: bool = False


class _First(nn.Module):
    """The first of the layer's outputs (recurrent layers give their states, too)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Tensor:
        out = self.layer(x)[0]
        return out.data if isinstance(out, PackedSequence) else out


class _Attention(nn.Module):
    """Query, key and value side by side in the last dimension."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*x.unbind(-1))[0]


class _Bag(nn.Module):
    """nn.EmbeddingBag with offsets."""

    def __init__(self, *sizes: int, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(*sizes, mode=mode)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.bag(*x)


def _conv(dimensions: int, rng: random.Random) -> _Case:
    layer: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    channels = rng.choice([1, 3, 32])
    out = channels * 3 if rng.random() < 0.5 else max(1, channels // 3)
    groups = rng.choice([g for g in range(1, 17) if channels % g == 0 and out % g == 0])
    stride = rng.randint(1, 2)
    padding = rng.choice([0, 1, 2, "valid", *(["same"] if stride == 1 else [])])
    low, high = ((6, 10), (11, 17), (6, 10))[dimensions - 1]
    shape = tuple(rng.randint(low, high) for _ in range(dimensions))
    options = dict(kernel_size=rng.randint(2, 3), stride=stride, padding=padding, dilation=rng.randint(1, 2), groups=groups)
    return _Case(partial(layer, channels, out, **options), (channels, *shape), rng.randint(0, 4))


def _linear(rng: random.Random) -> _Case:
    width, more = rng.randint(10, 17), rng.randint(0, 2)
    shape = (*(rng.randint(1, 4) for _ in range(more)), width)
    build = partial(nn.Linear, width, width + 2, bias=rng.random() < 0.5)
    return _Case(build, shape, rng.randint(0, 4), first=more == 0 or rng.random() < 0.5)


def _embedding(rng: random.Random) -> _Case:
    words, shape = rng.randint(2, 32), tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    first = rng.random() < 0.5
    return _Case(partial(nn.Embedding, words, rng.randint(10, 17)), shape, rng.randint(0, 4), first=first, ids=words)


def _embedding_bag(rng: random.Random) -> _Case:
    words = rng.randint(10, 32)
    build = partial(_Bag, words, rng.randint(10, 17), mode=rng.choice(["sum", "mean"]))
    return _Case(build, (rng.randint(3, 7),), rng.randint(4, 8), ids=words, bagged=True)


def _group_norm(rng: random.Random) -> _Case:
    channels = rng.randint(1, 8)
    groups = rng.choice([g for g in (1, 4, channels) if channels % g == 0])
    shape = (channels, rng.randint(5, 10), rng.randint(4, 8))
    return _Case(partial(nn.GroupNorm, groups, channels), shape, rng.randint(0, 4))


def _instance_norm(dimensions: int, rng: random.Random) -> _Case:
    layer: Any = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dimensions - 1]
    channels = rng.randint(1, 3)
    shape = (channels, *(rng.randint(4, 8) for _ in range(dimensions)))
    return _Case(partial(layer, channels, affine=True), shape, rng.randint(1, 4))


def _norm(layer: Any, rng: random.Random) -> _Case:
    more = rng.randint(0, 2)
    shape = (*(rng.randint(1, 4) for _ in range(more)), rng.randint(5, 10))
    return _Case(partial(layer, shape[rng.randint(0, more) :]), shape, rng.randint(1, 4))


def _recurrent(layer: Any, rng: random.Random) -> _Case:
    width, first = rng.randint(4, 5), rng.random() < 0.5
    options = dict(num_layers=rng.randint(1, 2), bias=rng.random() < 0.5, bidirectional=rng.random() < 0.5, batch_first=first)
    build = partial(_built, _First, layer, width, rng.randint(8, 10), **options)
    return _Case(build, (rng.randint(1, 3), width), rng.randint(1, 3), first=first, packed=rng.random() < 0.5)


def _attention(layer: Any, rng: random.Random) -> _Case:
    options: dict[str, Any] = {name: rng.random() < 0.5 for name in ("bias", "add_bias_kv", "add_zero_attn")}
    if rng.random() < 0.5:
        options |= dict(kdim=4, vdim=4)
    build = partial(_built, _Attention, layer, 4, rng.randint(1, 2), **options)
    return _Case(build, (rng.choice([1, 2, 3, 16, 20]), 4, 3), rng.randint(1, 4), first=False)


def _sequence_bias(rng: random.Random) -> _Case:
    from opacus.layers import SequenceBias

    width, first = rng.randint(4, 8), rng.random() < 0.5
    return _Case(partial(SequenceBias, width, first), (rng.randint(10, 20), width), rng.randint(0, 4), first=first)


def _built(wrapper: Any, layer: Any, *sizes: int, **options: Any) -> nn.Module:
    return wrapper(layer(*sizes, **options))


def _kinds() -> dict[str, Callable[[random.Random], _Case]]:
    from opacus import layers as theirs

    recurrent = (nn.RNN, nn.GRU, nn.LSTM, theirs.DPRNN, theirs.DPGRU, theirs.DPLSTM)
    return {
        **{f"Conv{d}d": partial(_conv, d) for d in (1, 2, 3)},
        "Linear": _linear,
        "Embedding": _embedding,
        "EmbeddingBag": _embedding_bag,
        "GroupNorm": _group_norm,
        **{f"InstanceNorm{d}d": partial(_instance_norm, d) for d in (1, 2, 3)},
        **{layer.__name__: partial(_norm, layer) for layer in (nn.LayerNorm, nn.RMSNorm)},
        **{layer.__name__: partial(_recurrent, layer) for layer in recurrent},
        "MultiheadAttention": partial(_attention, nn.MultiheadAttention),
        "DPMultiheadAttention": partial(_attention, theirs.DPMultiheadAttention),
        "SequenceBias": _sequence_bias,
    }


def specimens() -> Iterator[Specimen]:
    """Every kind, every draw, both reductions."""
    for kind, make in _kinds().items():
        rng = random.Random(kind)
        for number in range(_DRAWS):
            case = make(rng)
            for reduction in ("mean", "sum"):
                yield Specimen(
                    f"layers/{kind} {number} {reduction}",
                    case.build,
                    partial(_records, case),
                    partial(_loss, case, reduction),
                    collate=partial(_collated, case),
                    reduction=reduction,
                    relations=("usual",),
                    empty=None if case.batch else partial(_empty, case),
                )


def _records(case: _Case, _: Sizes) -> list[Any]:
    records = []
    for i in range(case.batch):
        shape = (1 + i % case.shape[0], *case.shape[1:]) if case.packed or case.bagged else case.shape
        if case.ids:
            records.append(torch.randint(case.ids, shape, generator=draw(i)))
        else:
            records.append(torch.randn(shape, dtype=torch.float64, generator=draw(i)))
    return records


def _empty(case: _Case) -> Tensor:
    shape = (0, *case.shape) if case.first else (case.shape[0], 0, *case.shape[1:])
    return torch.zeros(shape, dtype=torch.long if case.ids else torch.float64)


def _collated(case: _Case, records: list[Tensor]) -> Any:
    if case.packed:
        return pack_sequence(records, enforce_sorted=False)
    if case.bagged:
        return torch.cat(records), torch.tensor([0, *(len(r) for r in records)]).cumsum(0)[:-1]
    return torch.stack(records, 0 if case.first else 1)


def _loss(case: _Case, reduction: str, model: nn.Module, x: Any) -> Tensor:
    """The sum of squares, over the number of examples if it is their mean. A packed batch says how many there are."""
    out = model(x)
    if case.packed:
        examples = int(x.batch_sizes[0])
    else:
        examples = len(x[1]) if case.bagged else x.shape[0 if case.first else 1]
    total = out.square().sum()
    return total if reduction == "sum" else total / max(1, examples)

"""Finds out how many rows a batch needs so that functions of single numbers (SiLU, pow, a sigmoid) give a row the same bits anywhere.

They are computed for 32 numbers at a time with vectors of 512 bits, and what is left at the end of a tensor one by one, by another
formula. With one more record other rows are at the end. If a record's parts cancel, only last bits are left of it, so that it moves by
up to C. In batches of so many rows that a tensor of them has a multiple of 32 numbers, nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from random import Random

import torch
from torch import nn

from hushgrad.release.placement.sharded import is_sharded

_AT_ONCE = 32  # numbers of single precision in two vectors of 512 bits
_CLASSES = 64  # a layer of so few outputs may be the last one, whose outputs a loss takes as single numbers
_TRIED = 256  # pieces


def rows_without_remainder(model: nn.Module, threads: int) -> int:
    """The power of two of which batches must have a multiple; 1 for models of layers that have no other formula, or are wide enough.

    Functions of modules that are not torch's own are unknown. Each of two threads has numbers of its own. With sharded parameters no rows
    are asked for.

    >>> rows_without_remainder(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 64)), 1)
    1
    """
    if any(map(is_sharded, model.parameters())) or not any(map(_may_leave, model.modules())):
        return 1
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    numbers = _AT_ONCE * min(threads, 2) * (2 if narrow else 1)
    return max((numbers // gcd(numbers, width) for width in _widths(model)), default=1)


def _widths(model: nn.Module) -> set[int]:
    """How many numbers of a row, at least, the tensors have that single numbers are taken of: what layers make that others take."""
    taken = {p.shape[1] for p in model.parameters() if p.dim() > 1}
    made = set(_made(model))
    return {width for width in made if width in taken or width <= _CLASSES}


def _made(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.dim() > 1:
                yield p.shape[1 if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else 0]


def _may_leave(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn."):
        return not isinstance(
            module, (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)
        )  # which only compute their weights otherwise
    plain = next(module.children(), None) is None and next(module.parameters(recurse=False), None) is None
    return plain and _leaves(type(module), module.extra_repr(), module)


_found: dict[tuple[type, str], bool] = {}


def _leaves(kind: type, settings: str, layer: nn.Module) -> bool:
    """Whether a layer is a function of single numbers that has another formula for few of them, on this machine."""
    if (kind, settings) not in _found:
        _found[kind, settings] = _tried(layer)
    return _found[kind, settings]


def _tried(layer: nn.Module) -> bool:
    lot, training = Random(0), layer.training
    x = 3 * torch.randn(1 << 14, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    try:
        with torch.no_grad():
            layer.eval()
            whole = layer(x.clone())
            for _ in range(_TRIED):
                first, count = lot.randrange(len(x) - 32), lot.randint(1, 31)
                part = layer(x[first : first + count].clone())
                if part.shape != (count,) or not torch.allclose(part, whole[first : first + count], rtol=1e-5, atol=1e-6):
                    return False  # not of single numbers
                if not torch.equal(part, whole[first : first + count]):
                    return True
    except Exception:  # noqa: BLE001 (what a foreign layer raises for other shapes: it is none of single numbers)
        return False
    finally:
        layer.train(training)
    return False

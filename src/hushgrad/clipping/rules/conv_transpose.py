"""Transposed convolutions in one, two and three dimensions, with groups, stride, dilation and output padding.

A transposed convolution is the backward pass of a convolution: its kernel meets the *output gradient* where a convolution's meets the
input. So G_i is the kernel gradient of the convolution that takes g (padded) as input and has x as its output gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.mass import sq_norm
from hushgrad.clipping.rules.input_checks import require_batch
from hushgrad.clipping.rules.kernels import Geometry, per_example_kernel
from hushgrad.clipping.sums import Sum

_KEEP_AT_MOST = 1 << 26  # floats of per-example gradients that one layer may keep (256 MB in single precision)


@rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(Rule):
    """The convolution's rule with input and output gradient swapped."""

    parameters = frozenset({"weight", "bias"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One to three dimensions."""
        return (
            (nn.ConvTranspose1d(2, 3, 3), (torch.randn(4, 2, 5),)),
            (nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2), (torch.randn(4, 4, 3, 3),)),
            (nn.ConvTranspose3d(1, 2, 2), (torch.randn(4, 1, 2, 2, 2),)),
        )

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """G_i of the kernel as of a convolution; of the bias by a sum over positions."""
        made = {}
        if "weight" in record.names:
            made["weight"] = per_example_kernel(_padded(record), record.x, _geometry(record.module))
        if "bias" in record.names:
            made["bias"] = record.g.flatten(2).sum(2)
        return made

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """Keep G; if that takes too much memory, form it for a few examples at a time."""
        require_batch(record, 2 + len(_geometry(record.module).kernel))
        weight: Any = record.module.weight
        B, step = len(record.g), max(1, _KEEP_AT_MOST // weight.numel())
        if step >= B:
            return super().sq_norms(record)
        parts = [{name: sq_norm(G) for name, G in self.per_example(some).items()} for _, some in self._few(record, step)]
        return {name: torch.cat([part[name] for part in parts]) for name in record.names}

    def _few(self, record: Record, step: int) -> Iterator[tuple[Tensor, Record]]:
        """Some examples at a time."""
        for index in torch.arange(len(record.g), device=record.g.device).split(step):
            yield index, self.select(record, index, len(record.g))

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """w^T G of what was kept; otherwise G is formed again for a few examples at a time."""
        if record.kept:
            super().add_weighted(record, weights, out)
            return
        weight: Any = record.module.weight
        for index, some in self._few(record, max(1, _KEEP_AT_MOST // weight.numel())):
            for name, G in self.per_example(some).items():
                out[name].add_kept(G, weights[name][index])


def _geometry(module: Any) -> Geometry:
    return Geometry(tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation), module.groups)


def _padded(record: Record) -> Tensor:
    """The output gradient on exactly the grid that the kernel reaches from the input's positions."""
    module: Any = record.module
    x, g = record.x, record.g
    edges: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        reach = (x.shape[axis + 2] - 1) * module.stride[axis] + module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        before = module.padding[axis]
        edges += [before, reach - before - g.shape[axis + 2]]  # negative where output_padding exceeds the padding: cropped
    return F.pad(g, edges) if any(edges) else g

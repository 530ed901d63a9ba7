"""Clippers: values that say what each example's gradient is multiplied by. They need no tensors until they are used."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hushgrad._value import Value
from hushgrad.events import Relation

if TYPE_CHECKING:  # a plan has a clipper, and is read and priced without torch
    import torch
    from torch import Tensor

_LEAST = 2.0**-126  # the least weight that single precision holds with all its bits


class Clipped(NamedTuple):
    """Norms of examples' gradients before clipping, the weights that they get, and whether all norms are finite."""

    norms: Tensor
    weights: Tensor
    finite: bool


class Clipper(Value, family="clipper"):
    """A frozen, public rule that turns per-example squared norms into weights.

    >>> from hushgrad.clipping import Automatic, Flat
    >>> Flat(1.0), Automatic(1.0)
    (Flat(max_grad_norm=1.0), Automatic(max_grad_norm=1.0, stability=0.01))
    """

    @classmethod
    def examples(cls) -> tuple[Clipper, ...]:
        """Small instances for the conformance tests."""
        return (cls(),)

    def groups(self, names: Sequence[str]) -> list[int] | None:
        """The clipping group (0, 1, ...) of each parameter, or None if all are clipped together (the default)."""
        return None

    @abstractmethod
    def weights(self, sq_norms: Tensor) -> Tensor:
        """The factor for each example's gradient, from its squared norm: (B,), or (B, groups) if there are groups.

        Squared norms come in double precision, so that none is lost. NaN and infinite ones get weight 0.
        """

    def clip(self, rows: Sequence[Tensor], factor: float, dtype: torch.dtype | None = None) -> Clipped:
        """Norms and weights in ``dtype`` for squared norms of ``factor`` times the sum of ``rows``, all parameters clipped together.

        Args:
            rows: squared norms of each example's gradient, one row of numbers for each parameter.
            factor: what the squared norms are multiplied by.
            dtype: of the norms and weights; double precision by default.
        """
        import torch

        from hushgrad.clipping import _fused

        dtype = torch.float64 if dtype is None else dtype
        measured = _fused.total(rows, factor)
        if measured is None:
            total = added(rows).mul_(factor)
            measured = total, total.sqrt(), math.isfinite(float(total.sum()))
        total, norms, finite = measured
        return Clipped(norms.to(dtype), usable(self.weights(total)).to(dtype), finite)

    @abstractmethod
    def sensitivity(self, relation: Relation) -> float:
        """The largest L2 distance between the clipped sums of neighbouring data sets: C, or 2 C for replace-one."""


def added(rows: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, as a new tensor."""
    import torch

    return rows[0] + rows[1] if len(rows) == 2 else torch.stack(tuple(rows)).sum(0)


def usable(weights: Tensor) -> Tensor:
    """Weights with 0 in place of those so small that single precision would round them up by as much as half; rounding down is safe."""
    return weights.masked_fill(weights < _LEAST, 0.0)

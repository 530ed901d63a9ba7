"""Mixtures of experts: a parameter W of several matrices, each row of x using one: ``x[rows of e] @ W[e]`` for all experts e at once.

G_i has one block for each expert, sum_r left[r] right[r]^T over the example's own rows there. There are few rows, so norms come from Gram
matrices and the sum is one product for each expert: nothing as large as all examples' gradients is ever formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping import _fused
from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.layout import gathered, padded
from hushgrad.clipping.mass import WILD, Mass, gram
from hushgrad.clipping.record import product
from hushgrad.clipping.rules.gram import gram_sum
from hushgrad.clipping.sums import Sum

_AT_ONCE = 1 << 18  # floats of rows that are laid side by side at a time: they stay in the cache
_PROBES = 8
_lot = torch.Generator()  # of the machine's own numbers: a probe decides nothing but whether all is looked at
_lot.seed()


class Routed(NamedTuple):
    """The rows of all examples, sorted by expert."""

    left: Tensor  # (rows, m)
    right: Tensor  # (rows, n)
    owner: Tensor  # (rows,) the example of each
    expert: Tensor  # (rows,)
    examples: int
    experts: int

    @property
    def few(self) -> bool:
        """Whether Gram matrices cost less than gradients. Not decided by how the rows are distributed, since that depends on the data."""
        m, n = self.left.shape[1], self.right.shape[1]
        return len(self.left) * (m + n) < m * n * self.examples * self.experts

    @property
    def turned(self) -> Routed:
        """The same for transposed matrices."""
        return self._replace(left=self.right, right=self.left)

    @property
    def group(self) -> Tensor:
        """(rows,): a number for each row's example and expert."""
        return self.owner * self.experts + self.expert

    @property
    def groups(self) -> Tensor:
        """The rows of each example in each expert: (B * E, most), -1 where there are fewer."""
        return padded(self.group, self.examples * self.experts)

    @property
    def dense(self) -> Tensor:
        """(B, E, m, n)."""
        left, right = (gathered(t, self.groups) for t in (self.left, self.right))
        return torch.bmm(left.transpose(1, 2), right).unflatten(0, (self.examples, self.experts))

    def by_expert(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """These values, one for each row, expert by expert."""
        sizes = torch.bincount(self.expert, minlength=self.experts).tolist()
        yield from zip(*(value.split(sizes) for value in values), strict=True)

    def of(self, index: Tensor) -> Routed:
        """The rows of some examples; an example may be repeated."""
        rows = padded(self.owner, self.examples)[index]
        owner, place = (rows >= 0).nonzero().unbind(1)
        rows = rows[owner, place]
        order = self.expert[rows].argsort(stable=True)
        rows = rows[order]
        return Routed(self.left[rows], self.right[rows], owner[order], self.expert[rows], len(index), self.experts)

    def missing(self, total: Tensor) -> Tensor:
        """The norm of ``total`` minus the sum over all examples, estimated by probes: below a tenth of it in one of 10^7 cases.

        A probe is a vector of normal numbers, so that ‖M v‖² is ‖M‖² on average, with the quantiles of a chi-square at the worst.
        """
        n = self.right.shape[1]
        probes = torch.randn(_PROBES, n, generator=_lot, dtype=torch.float32).to(self.right)
        seen = (probes @ self.right.t()).t().contiguous()  # in this order a few rows by many take a quarter of the time
        made = [product(some.t(), left) for left, some in self.by_expert(self.left, seen)]
        wanted = (probes @ total.to(probes.dtype).reshape(-1, n).t()).view(_PROBES, self.experts, -1)
        return (torch.stack(made, 1) - wanted).norm() / _PROBES**0.5


class Experts(Rule):
    """The record's only argument is :class:`Routed`."""

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """All blocks of all examples."""
        return {record.names[0]: _routed(record).dense}

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """Gram matrices of the rows of each example in each expert."""
        routed, name = _routed(record), record.names[0]
        counts = torch.bincount(routed.group, minlength=routed.examples * routed.experts)
        norms, masses = (made.view(routed.examples, routed.experts) for made in group_norms(routed, counts))
        record.masses[name] = Mass(masses.square().sum(1).sqrt_(), max(1, int(counts.max())))
        return {name: norms.sum(1)}

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """One product for each expert."""
        routed, name = _routed(record), record.names[0]
        left, by = routed.left, weights[name][routed.owner]
        if by.dtype is not left.dtype:  # in double precision
            for expert, parts in enumerate(routed.by_expert(left, by, routed.right)):
                out[name].rows(expert).add_outer(*parts)
            return
        right, by = routed.right, by.unsqueeze(1)
        left, right = (left * by, right) if left.shape[1] <= right.shape[1] else (left, right * by)
        made = left.new_empty(routed.experts, left.shape[1], right.shape[1])
        for expert, (some, others) in enumerate(routed.by_expert(left, right)):
            product(some.t(), others, made[expert])
        out[name].add(made)

    def select(self, record: Record, index: Tensor, examples: int) -> Record:
        """Their rows."""
        chosen = Record(record.module, record.names, (_routed(record).of(index),), {}, record.grads)
        chosen.kept = {name: G[index] for name, G in record.kept.items()}
        return chosen

    def widened(self, record: Record) -> Record:
        """The rows in double precision."""
        routed = _routed(record)
        wide = routed._replace(left=routed.left.double(), right=routed.right.double())
        return Record(record.module, record.names, (wide,), {}, record.grads)


def _routed(record: Record) -> Routed:
    routed = record.args[0]
    assert isinstance(routed, Routed)
    return routed


def group_norms(routed: Routed, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norm and the mass of each example's part in each expert (B * E,), of as many rows as are counted."""
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    made = _fused.group_norms(routed.left, routed.right, routed.group.argsort(stable=True), starts, WILD)
    if made is not None:
        return made
    where, width = routed.groups, routed.left.shape[1] + routed.right.shape[1]
    sizes, order = counts.sort(descending=True)  # those of alike sizes together: none is filled up for nothing
    found, parts, start = sizes.tolist(), [], 0
    while start < len(found):
        some = order[start : start + max(1, _AT_ONCE // max(1, found[start] * width))]
        parts.append(_gram(routed, where[some, : found[start]]))
        start += len(some)
    back = order.argsort()
    return torch.cat([norms for norms, _ in parts])[back], torch.cat([mass.rows for _, mass in parts])[back]


def _gram(routed: Routed, where: Tensor) -> tuple[Tensor, Mass]:
    """The squared norms and masses of some groups of rows."""
    rows, empty = where.clamp(min=0).flatten(), where < 0
    outside = empty.unsqueeze(1) | empty.unsqueeze(2)  # not a product: a row that is not finite is nobody else's
    return gram_sum(
        *(
            gram(side.index_select(0, rows).unflatten(0, where.shape)).masked_fill_(outside, 0)
            for side in (routed.right, routed.left)
        )
    )

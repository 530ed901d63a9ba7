"""Layers that use all their parameters in matrix products somewhere inside: recurrent layers and attention.

Such a layer is run again, once for the whole batch, and differentiated with respect to its inner products instead of its parameters.
Each parameter's gradient is then that of a linear layer, G_i = sum_t left[i,t] right[i,t]^T, and so are its norm (Gram matrices,
or the gradient formed and kept) and its weighted sum (one matrix product).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.mass import Mass, sq_norm
from hushgrad.clipping.rules.gram import gram_sq_norm
from hushgrad.clipping.sums import Sum

# Reading one stored float of G costs about as much as this many multiply-adds.
_READ_COST = 12
# Kept per-example gradients of one parameter may take this many floats at the most (256 MB in single precision).
_KEEP_AT_MOST = 1 << 26


class Block(NamedTuple):
    """Some rows of a parameter's gradient: sum_t left[i,t] right[i,t]^T, or sum_t left[i,t] where ``right`` is None (a bias)."""

    left: Tensor  # (B, T, rows)
    right: Tensor | None  # (B, T, columns)

    @property
    def per_example(self) -> Tensor:
        """(B, rows, columns), or (B, rows)."""
        return self.left.sum(1) if self.right is None else torch.bmm(self.left.transpose(1, 2), self.right)

    def prefers_gram(self, examples: int) -> bool:
        """Whether Gram matrices are cheaper than forming, keeping and reading G, or G is too large to be kept."""
        if self.right is None:
            return False
        (T, m), n = self.left.shape[1:], self.right.shape[2]
        return T * T * (m + n) < _READ_COST * m * n or examples * m * n > _KEEP_AT_MOST

    def add_weighted(self, out: Sum, weights: Tensor) -> None:
        """``out += sum_i weights[i] G_i`` in one matrix product."""
        if self.right is None:
            out.add_kept(self.left.sum(1), weights)
        else:
            out.add_outer(self.left, weights, self.right)

    def select(self, index: Tensor) -> Block:
        """The same for some of the examples."""
        return Block(self.left[index], None if self.right is None else self.right[index])


Terms = dict[str, list[Block]]  # by local name; the rows of a parameter's blocks follow each other


def _by_gram(blocks: list[Block]) -> tuple[Tensor, Mass]:
    """The squared norm and the mass of a parameter whose rows are these blocks."""
    made = [gram_sq_norm(b.right, b.left) for b in blocks if b.right is not None]
    masses = torch.stack([mass.rows for _, mass in made])
    return torch.stack([norms for norms, _ in made]).sum(0), Mass(masses.square_().sum(0).sqrt_(), max(m.parts for _, m in made))


class _Solved(NamedTuple):
    """Takes the place of inputs and gradients in a record after the terms have been computed from them."""

    terms: Terms


class OuterProducts(Rule):
    """Base of rules that express their parameters' gradients as outer products; subclasses implement ``solve`` and ``pick``."""

    hot = False  # it runs autograd itself, which is better done outside of a running backward

    @abstractmethod
    def solve(self, record: Record) -> Terms:
        """The blocks of every name in ``record.names``."""

    @abstractmethod
    def pick(self, record: Record, index: Tensor) -> Record:
        """The record for the examples in ``index`` alone."""

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """The blocks' products, row below row."""
        shapes = {name: p.shape for name, p in record.module.named_parameters()}
        terms = self.terms(record)
        made = {name: [block.per_example for block in terms[name]] for name in record.names}
        return {name: torch.cat(rows, 1).view(len(rows[0]), *shapes[name]) for name, rows in made.items()}

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """Solve once; what is cheaper to keep than to form twice is kept."""
        terms = self.terms(record)
        norms = {}
        for name, blocks in terms.items():
            if any(block.prefers_gram(record.among(len(block.left))) for block in blocks):
                norms[name], record.masses[name] = _by_gram(blocks)
            else:
                rows = [block.per_example for block in blocks]
                record.kept[name] = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
                norms[name] = sq_norm(record.kept[name])
        return norms

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """One matrix product for each block, straight into its rows of ``out``; or w^T G where G was kept."""
        terms: Terms = {} if len(record.kept) == len(record.names) else self.terms(record)
        for name in record.names:
            if name in record.kept:
                out[name].add_kept(record.kept[name], weights[name])
                continue
            row = 0
            for block in terms[name]:
                rows = slice(row, row + block.left.shape[2])
                block.add_weighted(out[name].rows(rows), weights[name])
                row = rows.stop

    def select(self, record: Record, index: Tensor, examples: int) -> Record:
        """From the terms if they exist, otherwise from the inputs."""
        if record.args and isinstance(record.args[0], _Solved):
            terms = {name: [block.select(index) for block in blocks] for name, blocks in record.args[0].terms.items()}
            chosen = Record(record.module, record.names, (_Solved(terms),), {}, ())
        elif record.args or record.kwargs:
            chosen = self.pick(record, index)
        else:
            chosen = Record(record.module, record.names, (), {}, ())
        chosen.kept = {name: G[index] for name, G in record.kept.items()}
        return chosen

    def widened(self, record: Record) -> Record:
        """The terms in double precision."""
        terms = {
            name: [Block(b.left.double(), None if b.right is None else b.right.double()) for b in blocks]
            for name, blocks in self.terms(record).items()
        }
        return Record(record.module, record.names, (_Solved(terms),), {}, ())

    def terms(self, record: Record) -> Terms:
        """The result of ``solve``, which then takes the place of the inputs and gradients."""
        if record.args and isinstance(record.args[0], _Solved):
            return record.args[0].terms
        with torch.enable_grad():
            solved = self.solve(record)
        terms = {
            name: [Block(b.left.detach(), None if b.right is None else b.right.detach()) for b in solved[name]]
            for name in record.names
        }
        record.args, record.kwargs, record.grads = (_Solved(terms),), {}, ()
        return terms

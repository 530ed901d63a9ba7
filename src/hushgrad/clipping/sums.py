"""The weighted sum of one parameter, as it grows.

Most parameters get one contribution in a step. It is written, not added to zeros: an ordinary backward pass does no more. Later
contributions (micro-batches, tied weights, a module called twice) are added in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping import _fused

__all__ = ["Form", "Pieces", "RoundedSum", "RowSum", "Sum", "weighted_rows"]

# Floats of w g that are made at a time (16 MB in single precision); more would be a peak of memory, much less many passes over the sum.
_WEIGHTED_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 4096  # terms of a product in double precision, so that few roundings lie on the way of each (see certificate.py)


class Form(NamedTuple):
    """What a sum is like, where no tensor is."""

    shape: torch.Size
    device: torch.device


class Pieces(NamedTuple):
    """Per-example gradients of consecutive examples, in blocks that fit into the gaps which released activations leave.

    One block for all examples would be larger than any gap, and the process would grow by it.
    """

    parts: tuple[Tensor, ...]

    @property
    def whole(self) -> Tensor:
        """(B, ...) in one block."""
        return torch.cat(self.parts)


class Sum:
    """``sum_i w_i G_i`` of the parameter ``like``; ``tensor`` is None as long as nothing was added.

    Weights in double precision make it a sum in double precision of gradients that stay as they are.

    >>> total = Sum(torch.empty(2, 3), torch.float32)
    >>> total.addmm(torch.ones(2, 4), torch.ones(4, 3))
    >>> total.add(torch.ones(2, 3))
    >>> total.buffer
    tensor([[5., 5., 5.],
            [5., 5., 5.]])
    """

    __slots__ = ("_dtype", "_like", "tensor")

    def __init__(self, like: Tensor | Form, dtype: torch.dtype, tensor: Tensor | None = None) -> None:
        self._like, self._dtype, self.tensor = like, dtype, tensor

    @property
    def buffer(self) -> Tensor:
        """The sum so far, to be added to in place (scattered rows, slices)."""
        if self.tensor is None:
            self.tensor = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self.tensor

    @property
    def done(self) -> Tensor:
        """What is handed out when all has been added."""
        return self.buffer if self.tensor is None else self.tensor

    def add_rows(self, ids: Tensor, values: Tensor) -> None:
        """Add ``values[k]`` to row ``ids[k]``, for every k."""
        self.buffer.index_add_(0, ids, values)

    def add(self, term: Tensor) -> None:
        """Add ``term``, which is the sum's from now on: nobody else may hold it."""
        if self.tensor is not None:
            self.tensor.add_(term)
        elif term.dtype is self._dtype and term.is_contiguous() and term.shape == self._like.shape:
            self.tensor = term
        else:
            self.tensor = term.to(self._dtype).reshape(self._like.shape).contiguous()

    def add_dense(self, term: Tensor) -> None:
        """Add a term of the parameter's shape, of any precision."""
        self.buffer.add_(term.to(self._dtype))

    def addmm(self, a: Tensor, b: Tensor) -> None:
        """Add the matrix product ``a @ b``."""
        if self.tensor is not None:
            self.tensor.addmm_(a, b)
        else:
            self.tensor = torch.mm(a, b)

    def add_outer(self, left: Tensor, weights: Tensor, right: Tensor) -> None:
        """Add ``sum_i weights[i] sum_t left[i,t] right[i,t]^T`` for (B, ..., p) and (B, ..., d), some examples at a time."""
        if weights.dtype is not left.dtype:
            self._add_wide(left, weights, right)
            return
        first = left.shape[-1] <= right.shape[-1]  # the narrower factor is weighted: less to write
        some = max(1, _WEIGHTED_AT_ONCE // max(1, (left if first else right)[0].numel())) if len(left) else 1
        for y, h, w in zip(right.split(some), left.split(some), weights.split(some), strict=True):
            by = w.view(-1, *(1 for _ in h.shape[1:]))
            h, y = (h * by, y) if first else (h, y * by)
            self.addmm(h.reshape(-1, h.shape[-1]).t(), y.reshape(-1, y.shape[-1]))

    def _add_wide(self, left: Tensor, weights: Tensor, right: Tensor) -> None:
        columns, rows, by = _flat(left, weights, right)
        if self.tensor is None:
            fresh = torch.empty(self._like.shape, dtype=self._dtype, device=self._like.device)
            if _fused.add_wide_sums(columns, rows, by, fresh, fresh=True):
                self.tensor = fresh
                return
        elif _fused.add_wide_sums(columns, rows, by, self.tensor):
            return
        for y, h, w in zip(columns.split(_ROWS_AT_ONCE), rows.split(_ROWS_AT_ONCE), by.split(_ROWS_AT_ONCE), strict=True):
            self.buffer.addmm_((h.double() * w.unsqueeze(1)).t(), y.double())

    def rows(self, part: slice | int) -> Sum:
        """Some rows of this sum, or one, as a sum of their own that shares its memory."""
        buffer = self.buffer[part]
        return Sum(buffer, self._dtype, buffer)

    def add_kept(self, G: Tensor | Pieces, weights: Tensor) -> None:
        """Add ``sum_i weights[i] G[i]``, in one pass over G."""
        if isinstance(G, Pieces):
            if weights.dtype is self._dtype is torch.float32 and _fused.add_pieces(G.parts, weights, self.buffer):
                return
            for part, some in zip(G.parts, weights.split([len(part) for part in G.parts]), strict=True):
                self.add_kept(part, some)
        elif weights.dtype is torch.float64 and G.dtype is torch.float32:
            self.add(weighted_rows(_rows(G), weights).view(self._like.shape))
        elif self.tensor is None:
            self.tensor = torch.mv(_rows(G).t(), weights.to(G.dtype)).view(self._like.shape).to(self._dtype)
        elif self.tensor.is_contiguous():
            self.tensor.view(-1).addmv_(_rows(G).t(), weights.to(G.dtype))
        else:
            self.tensor.add_(torch.tensordot(weights.to(G.dtype), G, dims=1))


def weighted_rows(G: Tensor, weights: Tensor) -> Tensor:
    """``sum_i weights[i] G[i]`` of a matrix; in double precision if the weights are."""
    if weights.dtype is G.dtype:
        return torch.mv(G.t(), weights)
    made = _fused.wide_kept(G, weights)
    if made is not None:
        return made
    total = torch.zeros(G.shape[1], dtype=torch.float64, device=G.device)
    step = max(1, _WEIGHTED_AT_ONCE // max(1, G.shape[1]))
    for some, w in zip(G.split(step), weights.split(step), strict=True):
        total.addmv_(some.double().t(), w)
    return total


class RoundedSum(Sum):
    """``onto`` plus a sum in double precision, rounded to the precision of ``onto`` once, when the sum is complete.

    With noise that nothing depends on in ``onto``, fl(S + Z) is a function of S + Z, so that rounding is post-processing and takes no
    part in the certificate of S. Most parameters have one product, or some rows of a table: it waits until all is added, and the sum is
    then never in memory as a whole.

    >>> total = RoundedSum(torch.empty(2), torch.float64, torch.ones(2))
    >>> total.add(torch.full((2,), 2.0**-30, dtype=torch.float64)), total.add(torch.full((2,), 0.5, dtype=torch.float64))
    (None, None)
    >>> total.done
    tensor([1.5000, 1.5000])
    """

    __slots__ = ("_onto", "_product", "_scattered")

    def __init__(self, like: Tensor | Form, dtype: torch.dtype, onto: Tensor | None) -> None:
        super().__init__(like, dtype)
        assert onto is not None
        self._onto = onto
        self._product: tuple[Tensor, Tensor, Tensor] | None = None
        self._scattered: list[tuple[Tensor, Tensor]] = []

    @property
    def buffer(self) -> Tensor:
        """The sum so far, without ``onto``."""
        product, scattered, self._product, self._scattered = self._product, self._scattered, None, []
        if product is not None:
            super().add_outer(*product)
        for ids, values in scattered:
            super().add_rows(ids, values)
        return super().buffer

    def add_outer(self, left: Tensor, weights: Tensor, right: Tensor) -> None:
        """As of every sum; the first one waits."""
        if self.tensor is None and self._product is None and weights.dtype is not left.dtype:
            self._product = left, weights, right
        else:
            super().add_outer(left, weights, right)

    def add_rows(self, ids: Tensor, values: Tensor) -> None:
        """They wait."""
        self._scattered.append((ids, values))

    @property
    def done(self) -> Tensor:
        """``onto``, with the sum in it."""
        rounds = self._onto.dtype is not self._dtype  # else the kernel would add block by block to what is there
        if rounds and self.tensor is None and not self._scattered and self._product is not None:
            columns, rows, by = _flat(*self._product)
            if _fused.add_wide_sums(columns, rows, by, self._onto):
                return self._onto
        if self.tensor is None and self._product is None and self._scattered:
            self._add_scattered()
        else:
            self._onto.copy_(self.buffer.add_(self._onto))
        return self._onto

    def _add_scattered(self) -> None:
        """Each row is summed up, then added to its place."""
        ids, place = torch.cat([ids for ids, _ in self._scattered]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        rows = torch.zeros(len(ids), *self._like.shape[1:], dtype=self._dtype, device=self._like.device)
        rows.index_add_(0, place, torch.cat([values for _, values in self._scattered]).to(self._dtype))
        self._onto[ids] = rows.add_(self._onto[ids]).to(self._onto.dtype)


class RowSum(Sum):
    """The sum of a table of which few rows are touched: a sparse tensor of these rows alone, in which a row may occur often.

    >>> total = RowSum(torch.empty(1000, 2), torch.float32)
    >>> total.add_rows(torch.tensor([7, 3, 7]), torch.ones(3, 2))
    >>> total.buffer.coalesce().indices().tolist(), total.buffer.coalesce().values().tolist()
    ([[3, 7]], [[1.0, 1.0], [2.0, 2.0]])
    """

    __slots__ = ()

    @property
    def buffer(self) -> Tensor:
        """The sum so far."""
        if self.tensor is None:
            none = torch.empty(0, dtype=torch.int64, device=self._like.device)
            self.add_rows(none, torch.empty(0, *self._like.shape[1:], dtype=self._dtype, device=self._like.device))
        assert self.tensor is not None
        return self.tensor

    def add_rows(self, ids: Tensor, values: Tensor) -> None:
        """Add ``values[k]`` to row ``ids[k]``, for every k."""
        # Its ids were good enough for the forward pass.
        self.add(
            torch.sparse_coo_tensor(ids.long().unsqueeze(0), values.to(self._dtype), self._like.shape, check_invariants=False)
        )

    def add_dense(self, term: Tensor) -> None:
        """Add the rows of a whole table that are not zero."""
        ids = term.flatten(1).any(1).nonzero().flatten()
        self.add_rows(ids, term[ids])

    def add(self, term: Tensor) -> None:
        """Add the rows of a sparse tensor."""
        self.tensor = term if self.tensor is None else self.tensor + term
        if self.tensor._nnz() > self._like.shape[0]:  # many micro-batches: never more rows than the table has
            self.tensor = self.tensor.coalesce()


def _flat(left: Tensor, weights: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(K, d), (K, p) and (K,) of all positions of all examples: right, left and the weights."""
    rows, columns = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    return columns, rows, weights if left.dim() == 2 else weights.repeat_interleave(rows.shape[0] // max(1, len(left)))


def _rows(G: Tensor) -> Tensor:
    """(B, ...) as (B, all the rest), also for no example at all."""
    return G.reshape(G.shape[0], G.shape[1:].numel())

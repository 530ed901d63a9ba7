"""Special sums: rounded once together with what they are added to, and of tables of which few rows are touched."""

from __future__ import annotations

import torch
from torch import Tensor

from hushgrad.clipping import _fused
from hushgrad.clipping.record import Form, Pieces, Sum, flattened, weighted_rows

__all__ = ["Form", "Pieces", "RoundedSum", "RowSum", "Sum", "weighted_rows"]


class RoundedSum(Sum):
    """``onto`` plus a sum in double precision, rounded to the precision of ``onto`` once, when the sum is complete.

    If ``onto`` is noise that is independent of the sum, fl(S + Z) is a function of S + Z, so rounding is post-processing and not part of
    the certificate of S. Most parameters have one product, or some rows of a table: it is deferred until everything is added, so that the
    sum is never in memory as a whole.

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
        self._scattered: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def buffer(self) -> Tensor:
        """The sum so far, without ``onto``."""
        product, scattered, self._product, self._scattered = self._product, self._scattered, None, []
        if product is not None:
            super().add_outer(*product)
        for rows in scattered:
            super().add_rows(*rows)
        return super().buffer

    def add_outer(self, left: Tensor, weights: Tensor, right: Tensor) -> None:
        """As in every sum; the first one is deferred."""
        if self.tensor is None and self._product is None and weights.dtype is not left.dtype:
            self._product = left, weights, right
        else:
            super().add_outer(left, weights, right)

    def add_rows(self, ids: Tensor, values: Tensor, weights: Tensor) -> None:
        """Deferred."""
        self._scattered.append((ids, values, weights))

    @property
    def done(self) -> Tensor:
        """``onto`` plus the sum."""
        rounds = self._onto.dtype is not self._dtype  # else the kernel would add block by block to what is there
        if rounds and self.tensor is None and not self._scattered and self._product is not None:
            columns, rows, by = flattened(*self._product)
            if _fused.add_wide_sums(columns, rows, by, self._onto):
                return self._onto
        if self.tensor is None and self._product is None and self._scattered:
            self._add_scattered()
        else:
            self._onto.copy_(self.buffer.add_(self._onto))
        return self._onto

    def _add_scattered(self) -> None:
        """Each row is summed up, then added to its place."""
        ids, place = torch.cat([ids for ids, _, _ in self._scattered]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        rows = torch.zeros(len(ids), *self._like.shape[1:], dtype=self._dtype, device=self._like.device)
        values = torch.cat([values * weights.unsqueeze(1) for _, values, weights in self._scattered])
        rows.index_add_(0, place, values.to(self._dtype))
        self._onto[ids] = rows.add_(self._onto[ids]).to(self._onto.dtype)


class RowSum(Sum):
    """The sum of a table of which few rows are touched: a sparse tensor of these rows, in which a row may occur repeatedly.

    >>> total = RowSum(torch.empty(1000, 2), torch.float32)
    >>> total.add_rows(torch.tensor([7, 3, 7]), torch.ones(3, 2), torch.ones(3))
    >>> total.buffer.coalesce().indices().tolist(), total.buffer.coalesce().values().tolist()
    ([[3, 7]], [[1.0, 1.0], [2.0, 2.0]])
    """

    __slots__ = ()

    @property
    def buffer(self) -> Tensor:
        """The sum so far."""
        if self.tensor is None:
            none = torch.empty(0, dtype=torch.int64, device=self._like.device)
            self._add(none, torch.empty(0, *self._like.shape[1:], dtype=self._dtype, device=self._like.device))
        assert self.tensor is not None
        return self.tensor

    def add_rows(self, ids: Tensor, values: Tensor, weights: Tensor) -> None:
        """Add ``weights[k] values[k]`` to row ``ids[k]``, for every k."""
        self._add(ids, values * weights.unsqueeze(1))

    def _add(self, ids: Tensor, values: Tensor) -> None:
        # Its ids were good enough for the forward pass.
        self.add(
            torch.sparse_coo_tensor(ids.long().unsqueeze(0), values.to(self._dtype), self._like.shape, check_invariants=False)
        )

    def add_dense(self, term: Tensor) -> None:
        """Add the rows of a whole table that are not zero."""
        ids = term.flatten(1).any(1).nonzero().flatten()
        self._add(ids, term[ids])

    def add(self, term: Tensor) -> None:
        """Add the rows of a sparse tensor."""
        self.tensor = term if self.tensor is None else self.tensor + term
        if self.tensor._nnz() > self._like.shape[0]:  # many micro-batches: never more rows than the table has
            self.tensor = self.tensor.coalesce()

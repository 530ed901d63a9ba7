"""Views of a batch: checks whether row i of a view is made of row i of its base."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_Dims = list[tuple[int, int]]  # sizes, and strides in bytes


def rows_at(view: Tensor, known: Tensor, dim: int) -> list[int]:
    """Those of the first two dimensions of ``view`` along which row i lies inside row i of ``known``, whose rows are along ``dim``.

    Merged dimensions count, too: B rows of T positions as B * T positions.

    >>> import torch
    >>> x = torch.arange(24.0).view(4, 6)
    >>> rows_at(x.view(4, 2, 3), x, 0), rows_at(x[:, 2:].t(), x, 0), rows_at(x[:1].expand(4, 6), x, 0), rows_at(x[1:], x, 0)
    ([0], [1], [], [])
    """
    count = known.shape[dim]
    if count == 1:
        return [0]
    item, step = known.element_size(), known.stride(dim) * known.element_size()
    start = int(view.storage_offset() * view.element_size() - known.storage_offset() * item)
    inside = start >= 0 and start + _extent(_dims(view)) + view.element_size() <= _extent(_dims(known)) + item
    if not step or not inside or not _is_one_row(_dims(known, without=dim), 0, step, count):
        return []
    found = ((k, _dims(view, without=k), view.shape[k], view.stride(k) * view.element_size()) for k in range(min(2, view.dim())))
    return [
        k
        for k, others, size, stride in found
        if any(_is_one_row(others + more, start, step, count) for more in _cut(size, stride, count, step))
    ]


def _dims(tensor: Tensor, without: int | None = None) -> _Dims:
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [(size, stride * tensor.element_size()) for k, (size, stride) in pairs if k != without and size > 1]


def _extent(dims: _Dims) -> int:
    return sum((size - 1) * stride for size, stride in dims)


def _cut(size: int, stride: int, count: int, step: int) -> Iterator[_Dims]:
    """What is left of a dimension if the rows, ``step`` apart, are taken out of it: nothing, or parts of a row."""
    each, rest = divmod(size, count)
    if rest or not each:
        return
    if stride * each == step:
        yield [(each, stride)]
    if stride == step:
        yield [(each, step * count)]


def _is_one_row(others: _Dims, start: int, step: int, count: int) -> bool:
    """Whether these dimensions stay, from ``start`` on, in row 0 of rows that are ``step`` apart: within a step, or whole rounds on."""
    inner = [(size, stride) for size, stride in others if stride < step]
    outer = [stride for _, stride in others if stride >= step]
    return (
        start // step % count == 0
        and start % step + _extent(inner) < step
        and all(stride % (step * count) == 0 for stride in outer)
    )

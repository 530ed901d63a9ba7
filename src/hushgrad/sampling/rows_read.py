"""Watches which rows of its tensors, arrays and lists a data set reads for one record."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from hushgrad.sampling.seeds import Seeds

_RECORDS = 4  # that are read
_FEW = 16  # entries of a tuple, list or dict that may hold tensors
_DEEP = 4  # data sets inside of data sets
_LENGTHS = frozenset(
    ("__len__", "__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_contiguous")
)


def reads_one_row(dataset: Any, seeds: Seeds) -> bool:
    """Whether no more than one row of a tensor, array or list with a row for each record is read for one record, seen for a few.

    Nothing is exchanged or written: a copy of the data set holds the same memory as views that note what is asked of them. Rows that are
    read by other ways (a file, a table of another library, compiled code) are not seen.

        >>> class Centred(Dataset):
        ...     x = None
        ...     def __init__(self): self.x = torch.ones(5, 2)
        ...     def __len__(self): return 5
        ...     def __getitem__(self, i): return self.x[i] - self.x.mean(0)
        >>> reads_one_row(Centred(), Seeds(bytes(32)))
        False
    """
    if type(dataset) is TensorDataset or not isinstance(dataset, Dataset) or not seeds:
        return True
    read: list[_Rows] = []
    count = _length(dataset)
    with seeds.kept():
        try:
            copy = _watched(dataset, 0, read, _DEEP)
            for number in sorted({count * k // _RECORDS for k in range(_RECORDS)} if count else ()):
                seeds.read(copy, 0, 0, number)
                if any(rows.whole or len(rows.numbers) > 1 for rows in read):
                    return False
                for rows in read:
                    rows.numbers.clear()
        except Exception:  # noqa: BLE001  of a data set that is more than its attributes: nothing was shown
            return False
    return True


class _Rows:
    """The rows of one tensor, array or list that were read."""

    def __init__(self, count: int) -> None:
        self.count, self.numbers, self.whole = count, set[int](), False

    def ask(self, index: Any) -> None:
        """Note an index."""
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, (int, np.integer)) or (
            isinstance(first, (Tensor, np.ndarray)) and not first.ndim and first.dtype != bool
        ):
            self.numbers.add(int(first) % self.count)
        elif isinstance(first, slice):
            self.numbers.update(range(*first.indices(self.count)))
        else:
            self.whole = True


def _watched(value: Any, count: int, read: list[_Rows], depth: int) -> Any:
    """The same value, or one that notes which of its ``count`` rows are read."""
    own = getattr(value, "__dict__", None)
    if isinstance(value, Dataset) and isinstance(own, dict) and depth:
        copy = object.__new__(type(value))
        copy.__dict__.update({name: _watched(one, _length(value), read, depth - 1) for name, one in own.items()})
        return copy
    rows = _Rows(count)
    made: Any = value
    if type(value) is Tensor and value.dim() and len(value) == count > 1:
        made = value.as_subclass(_Tensor)
    elif isinstance(value, np.ndarray) and value.ndim and len(value) == count > 1:
        made = value.view(_Array)
    elif type(value) is list and len(value) == count > 1:
        made = _List(value)
    elif type(value) in (list, tuple, dict) and len(value) <= _FEW and depth:
        every = value.items() if isinstance(value, dict) else enumerate(value)
        inside = {name: _watched(one, count, read, depth - 1) for name, one in every}
        return type(value)(inside if isinstance(value, dict) else inside.values())
    if made is not value:
        made.rows = rows
        read.append(rows)
    return made


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(type(dataset), "__len__") else 0


class _Tensor(Tensor):
    """A tensor that notes which rows are asked for; what is computed from it is an ordinary tensor."""

    rows: _Rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        for one in (one for one in args if isinstance(one, _Tensor) and "rows" in vars(one)):
            if name == "__getitem__":
                one.rows.ask(args[1])
            elif name not in _LENGTHS or isinstance(made, Tensor):
                one.rows.whole = True
        return made.as_subclass(Tensor) if isinstance(made, _Tensor) else made


class _Array(np.ndarray):
    """An array that does so."""

    rows: _Rows | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.rows is not None:
            self.rows.ask(index)
        return self.view(np.ndarray)[index]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*map(_plain, inputs), **options)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*map(_plain, args), **kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.rows is not None:
            value.rows.whole = True
        return value.view(np.ndarray)
    return value


class _List(list[Any]):
    """A list that does so."""

    rows: _Rows

    def __getitem__(self, index: Any) -> Any:
        self.rows.ask(index)
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.rows.whole = True
        return super().__iter__()

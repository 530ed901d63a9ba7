"""Layout: a model's arrays as one flat float64 vector; clients' replies are checked against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from hushgrad import _check
from hushgrad.federated.wire import Unusable, read_array


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of a model's arrays, in the order in which the server sends them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, arrays: ArrayRecord) -> Layout:
        """The layout of the arrays that a server sends.

        Raises:
            ArgumentError: for an array of whole numbers or none at all: it cannot be clipped and noised.
        """
        for name, array in arrays.items():
            if np.dtype(array.dtype).kind != "f":
                remedy = "Send the trainable parameters only; counters and batch statistics are no updates."
                _check.fail(f"arrays[{name!r}].dtype", array.dtype, "to be a floating-point type", remedy)
        if not arrays:
            _check.fail("arrays", {}, "to hold the model's parameters")
        shapes = tuple(tuple(int(n) for n in array.shape) for array in arrays.values())
        return cls(tuple(arrays), shapes, tuple(str(np.dtype(array.dtype)) for array in arrays.values()))

    @property
    def size(self) -> int:
        """The total number of values."""
        return sum(prod(shape) for shape in self.shapes)

    def slices(self) -> dict[str, slice]:
        """The position of each array in the flat vector."""
        ends = np.cumsum([prod(shape) for shape in self.shapes]).tolist()
        return {name: slice(low, high) for name, low, high in zip(self.names, [0, *ends], ends, strict=False)}

    def flat(self, arrays: ArrayRecord) -> np.ndarray:
        """The server's own arrays as one float64 vector."""
        return np.concatenate([arrays[name].numpy().astype(np.float64).reshape(-1) for name in self.names])

    def record(self, flat: np.ndarray) -> ArrayRecord:
        """The flat vector as arrays of the model's shapes and dtypes."""
        parts = zip(self.slices().items(), self.shapes, self.dtypes, strict=True)
        return ArrayRecord({name: Array(flat[where].reshape(shape).astype(dtype)) for (name, where), shape, dtype in parts})

    def read_update(self, content: RecordDict, current: np.ndarray, out: np.ndarray) -> None:
        """Write (what the client sent - ``current``) to ``out``, every array of it.

        Raises:
            Unusable: unless the reply holds exactly one record with exactly these arrays.
        """
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are found by the norm
            for where, numbers in self._read(content):
                np.subtract(numbers, current[where], out=out[where])

    def read_whole(self, content: RecordDict, out: np.ndarray) -> None:
        """Write the whole numbers that the client sent to ``out``, every array of them.

        Raises:
            Unusable: the same, and for numbers of another type than int64.
        """
        for where, numbers in self._read(content):
            if numbers.dtype != np.int64:
                raise Unusable(f"expected whole numbers of 64 bits, got {numbers.dtype}")
            out[where] = numbers

    def _read(self, content: RecordDict) -> Iterator[tuple[slice, np.ndarray]]:
        records = list(content.array_records.values())
        if len(records) != 1:
            raise Unusable(f"expected one ArrayRecord, got {len(records)}")
        if set(records[0]) != set(self.names):
            raise Unusable("expected the arrays that were sent, got other names")
        for (name, where), shape in zip(self.slices().items(), self.shapes, strict=True):
            # Fields of the record may contradict the bytes; only the bytes are read.
            yield where, _numbers(records[0][name], name, shape).reshape(-1)


def _numbers(array: Array, name: str, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return read_array(array, shape)
    except Unusable as reason:
        raise Unusable(f"array {name!r} {reason}") from None

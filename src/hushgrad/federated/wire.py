"""Parses clients' bytes. Nothing is evaluated, unpacked or allocated on a client's word.

Clients are untrusted. ``numpy.load`` evaluates a header as a Python literal, opens zip archives and allocates what the header asks for; so
it is not used here (see :mod:`hushgrad._npy`). An array is read only if its bytes are exactly what ``numpy.save`` writes for the shape
that the server sent: a short header of one form, then as many bytes as the layout's own array has numbers. The
result is a view of these bytes.
"""

from __future__ import annotations

import io
from math import prod

import numpy as np
from flwr.app import Array

from hushgrad._npy import NpyHeader, read_header


class Unusable(Exception):
    """A client's reply cannot be read as an update of the model; the message says why, without the client's numbers."""


def read_array(array: Array, shape: tuple[int, ...]) -> np.ndarray:
    """The real numbers in ``array``, which has to have this shape; a view of its bytes.

    **Formal guarantee.** For whatever bytes: an array of ``shape`` and of at most 16 bytes for each number, or ``Unusable``. No memory is
    allocated beyond that of the bytes themselves and of a header of 4096 bytes.

        >>> read_array(Array(np.arange(3.0)), (3,)).tolist()
        [0.0, 1.0, 2.0]

    Raises:
        Unusable: for everything else.
    """
    data = array.data
    if array.stype != "numpy.ndarray" or not isinstance(data, bytes):
        raise Unusable("cannot be read: it is not stored as numpy stores an array")
    stream = io.BytesIO(data)  # shares the bytes
    try:
        header = read_header(stream)
    except ValueError as problem:
        raise Unusable(f"cannot be read: {problem}") from None
    return _body(memoryview(data)[stream.tell() :], header, shape)


def _body(body: memoryview, header: NpyHeader, shape: tuple[int, ...]) -> np.ndarray:
    if header.shape != shape:
        raise Unusable("has another shape than was sent")
    try:
        dtype = np.dtype(header.descriptor)
    except TypeError:  # a width that this machine does not have
        raise Unusable("does not hold real numbers") from None
    if len(body) != prod(shape) * dtype.itemsize:
        raise Unusable("cannot be read: it has more or fewer bytes than its shape says")
    return np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if header.fortran else "C")

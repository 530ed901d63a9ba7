"""The wire: what a client's bytes may look like. Nothing is evaluated, unpacked or allocated on a client's word.

A client is anybody. ``numpy.load`` evaluates a header as a Python literal, opens zip archives and allocates what the header asks for; so
it is not used here. An array is read only if its bytes are exactly what ``numpy.save`` writes for the shape that the server sent: a short
header of one form, then as many bytes as the layout's own array has numbers. The result is a view of these bytes.
"""

from __future__ import annotations

import re
from math import prod

import numpy as np
from flwr.app import Array

__all__ = ["Unusable", "read_array"]

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 4096  # numpy pads to 64; a shape of 32 axes needs less than 700
# The header, as numpy writes it; the descriptor of a real number of a fixed width; a shape.
_HEADER = re.compile(
    rb"\{'descr': '([<>|]?[fiu][0-9]{1,2})', 'fortran_order': (True|False), 'shape': \(((?:[0-9]{1,19}, ?)*(?:[0-9]{1,19})?)\), ?\} *\n?"
)


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
    if array.stype != "numpy.ndarray" or not isinstance(data, bytes) or data[:6] != _MAGIC or len(data) < 10:
        raise Unusable("cannot be read: it is not stored as numpy stores an array")
    width = {1: 2, 2: 4, 3: 4}.get(data[6])
    if width is None or data[7] != 0:
        raise Unusable("cannot be read: it has an unknown version of numpy's format")
    begin = 8 + width
    length = int.from_bytes(data[8:begin], "little")
    if length > _LONGEST_HEADER or begin + length > len(data):
        raise Unusable("cannot be read: its header does not end")
    found = _HEADER.fullmatch(data, begin, begin + length)
    if found is None:
        raise Unusable("cannot be read: its header is none that numpy writes for real numbers")
    return _body(memoryview(data)[begin + length :], found, shape)


def _body(body: memoryview, header: re.Match[bytes], shape: tuple[int, ...]) -> np.ndarray:
    descriptor, fortran, sizes = (part.decode("ascii") for part in header.groups())
    if tuple(int(size) for size in sizes.replace(",", " ").split()) != shape:
        raise Unusable("has another shape than was sent")
    try:
        dtype = np.dtype(descriptor)
    except TypeError:  # a width that this machine does not have
        raise Unusable("does not hold real numbers") from None
    if len(body) != prod(shape) * dtype.itemsize:
        raise Unusable("cannot be read: it has more or fewer bytes than its shape says")
    return np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if fortran == "True" else "C")

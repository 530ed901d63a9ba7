"""Safe reading of the header of a .npy file: nothing is evaluated, and nothing is allocated because the header says so.

``numpy.load`` evaluates a header as a Python literal, unpickles if allowed, and allocates what the header asks for. Here only the exact
form that ``numpy.save`` writes is accepted.
"""

from __future__ import annotations

import re
from typing import IO, NamedTuple

_MAGIC = b"\x93NUMPY"
_LONGEST = 4096  # bytes of a header; a shape of 32 axes needs less than 700
_HEADER = re.compile(
    rb"\{'descr': '([<>|]?([a-zA-Z])[0-9]{1,9})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19}, ?)*(?:[0-9]{1,19})?)\), ?\} *\n?"
)


class NpyHeader(NamedTuple):
    """The content of a header: numpy's dtype string, whether the order is Fortran's, and the shape."""

    descriptor: str
    fortran: bool
    shape: tuple[int, ...]


def read_header(stream: IO[bytes], *, kinds: str = "fiu") -> NpyHeader:
    r"""Read the header at the beginning of ``stream``, and leave the stream at the first number.

    >>> import io
    >>> text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }"
    >>> read_header(io.BytesIO(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text))
    NpyHeader(descriptor='<f8', fortran=False, shape=(3,))

    Raises:
        ValueError: for any other form, and for dtypes that are not of these ``kinds`` (numpy's letters).
    """
    start = stream.read(8)
    if len(start) < 8 or start[:6] != _MAGIC:
        raise ValueError("it is not stored as numpy stores an array")
    width = {1: 2, 2: 4, 3: 4}.get(start[6])
    if width is None or start[7] != 0:
        raise ValueError("it has an unknown version of numpy's format")
    size = stream.read(width)
    length = int.from_bytes(size, "little")
    if len(size) < width or length > _LONGEST:
        raise ValueError("its header does not end")
    text = stream.read(length)
    if len(text) < length:
        raise ValueError("its header does not end")
    found = _HEADER.fullmatch(text)
    if found is None or found[2].decode() not in kinds:
        raise ValueError("its header is none that numpy writes for real numbers")
    sizes = found[4].decode("ascii").replace(",", " ").split()
    return NpyHeader(found[1].decode("ascii"), found[3] == b"True", tuple(int(size) for size in sizes))

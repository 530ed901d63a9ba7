"""Reads untrusted data files: every size is checked before memory is allocated for it."""

from __future__ import annotations

import gzip
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from hushgrad import _check
from hushgrad._npy import read_header
from hushgrad._printed import reason
from hushgrad.errors import ArgumentError

_LIMIT = 1 << 31  # bytes after decompression: a file that unpacks to more is refused, whatever its header says
_CHUNK = 1 << 20
_CIFAR_RECORD = 1 + 3 * 32 * 32
_IDX_UBYTE = 0x08


def find(folder: Path, *names: str) -> Path:
    """The first of ``names`` that exists in ``folder``, plain or with .gz or .xz at its end."""
    for name in names:
        for suffix in ("", ".gz", ".xz"):
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    return _check.fail("data.path", str(folder), f"to hold a file {names[0]} (or {names[0]}.gz)")


def files_of_classes(path: Path, names: Sequence[str], suffixes: Sequence[str]) -> tuple[list[Path], list[str] | None]:
    """The files of a folder, sorted by name, with labels if they are in folders named after the classes; none is left out.

    The class, which may be replaced, orders equal names only; otherwise a file of another class would shift many positions.
    """
    there = [name for name in names if (path / name).is_dir()]
    labelled = {file: name for name in there for file in _visible(path / name, suffixes, "*")}
    found = sorted(labelled, key=lambda file: file.stem) if there else _visible(path, suffixes, "*")
    for file in _visible(path, suffixes, "**/*"):
        if file not in labelled and (there or file.parent != path):
            place = str(file.relative_to(path))
            remedy = "Add the class to the recipe's classes, or move the file out of the folder."
            _check.fail("file", place, f"to lie in a folder of {str(path)!r} that is called by its class ({list(names)})", remedy)
    return found, [labelled[file] for file in found] if there else None


def _visible(path: Path, suffixes: Sequence[str], pattern: str) -> list[Path]:
    """The files of these kinds in a folder (``**/*``: also below it), in order, without hidden ones."""
    files = (file for file in path.glob(pattern) if file.suffix.lower() in suffixes and file.is_file())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """``path`` as a stream of bytes, unpacked if it ends in .gz or .xz; damage is reported in one sentence."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as stream:  # type: ignore[operator]
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ArgumentError(f"Expected a readable file {str(path)!r}: {reason(error)}.") from None


def _exactly(stream: IO[bytes], size: int, path: Path) -> bytes:
    """Exactly ``size`` bytes up to the end. Memory grows with the content, never with what a header claims."""
    chunks, missing = [], size
    while missing:
        chunk = stream.read(min(missing, _CHUNK))
        if not chunk:
            _check.fail("file", str(path), f"to hold {size} bytes of data; {missing} are missing")
        chunks.append(chunk)
        missing -= len(chunk)
    if stream.read(1):
        _check.fail("file", str(path), f"to end after {size} bytes of data")
    return b"".join(chunks)


def read_idx(path: Path, *, dims: int) -> np.ndarray:
    """An idx file of unsigned bytes (the MNIST format) with ``dims`` dimensions."""
    with opened(path) as stream:
        header = stream.read(4 + 4 * dims)
        if len(header) != 4 + 4 * dims or header[:4] != bytes([0, 0, _IDX_UBYTE, dims]):
            _check.fail("file", str(path), f"to be an idx file of bytes with {dims} dimensions")
        shape = struct.unpack(f">{dims}I", header[4:])
        size = math.prod(shape)
        if not 0 < size <= _LIMIT:
            _check.fail("file", str(path), f"to describe at most {_LIMIT} bytes and at least one; its header says {shape}")
        return np.frombuffer(_exactly(stream, size, path), np.uint8).reshape(shape)


def read_cifar10(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 32, 32) and labels of one file of CIFAR-10's binary version."""
    with opened(path) as stream:
        content = _bounded(stream, 60_000 * _CIFAR_RECORD, path)
    if not content or len(content) % _CIFAR_RECORD:
        _check.fail("file", str(path), f"to hold records of {_CIFAR_RECORD} bytes; it has {len(content)} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
    if records[:, 0].max() > 9:
        _check.fail("file", str(path), "to hold labels 0..9 only")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_npy(path: Path) -> np.ndarray:
    """The numbers in a .npy file, one record for each row."""
    with opened(path) as stream:
        return _array(stream, path, "fiub", path.stat().st_size)


def read_npz(path: Path, *names: str) -> list[np.ndarray | None]:
    """The arrays of these names in a .npz file, None for one that is not there; numbers, or words."""
    broken = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError)  # damaged, packed in another way, encrypted
    try:
        with opened(path) as stream, zipfile.ZipFile(stream) as archive:
            there = archive.namelist()
            return [_member(archive, f"{name}.npy", path) if f"{name}.npy" in there else None for name in names]
    except broken as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"Expected {str(path)!r} to be a .npz file: {error}.") from None


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray:
    with archive.open(name) as stream:
        return _array(stream, path, "fiubU", _LIMIT)


def _array(stream: IO[bytes], path: Path, kinds: str, limit: int) -> np.ndarray:
    try:
        header = read_header(stream, kinds=kinds)
        dtype = np.dtype(header.descriptor)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"Expected {str(path)!r} to hold an array of numbers: {error}.") from None
    size = math.prod(header.shape) * dtype.itemsize
    if not (header.shape and 0 < size <= limit):
        _check.fail("file", str(path), f"to hold one or more records, at most {limit} bytes; its header says {header.shape}")
    content = _exactly(stream, size, path)
    return np.frombuffer(content, dtype).reshape(header.shape, order="F" if header.fortran else "C")


def _bounded(stream: IO[bytes], limit: int, path: Path) -> bytes:
    chunks, size = [], 0
    while chunk := stream.read(_CHUNK):
        size += len(chunk)
        if size > limit:
            _check.fail("file", str(path), f"to unpack to at most {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def lines(path: Path, *, exact: bool = False) -> list[str]:
    r"""The lines of a UTF-8 text, which end in \n, \r\n or \r and nothing else; a byte-order mark is no part of them.

    Bytes that are not UTF-8 become the replacement character; with ``exact`` the file is refused.
    """
    with opened(path) as stream:
        content = _bounded(stream, _LIMIT >> 2, path)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        _not_utf8(path, "UTF-16")
    try:
        text = content.decode("utf-8-sig", errors="strict" if exact else "replace")
    except UnicodeDecodeError as error:
        _not_utf8(path, f"byte {error.start} is not")
    found = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return found[:-1] if found[-1] == "" else found


def _not_utf8(path: Path, why: str) -> NoReturn:
    remedy = "Save it as UTF-8: a word in another encoding would be another word when the model is used."
    _check.fail("file", str(path), f"to be UTF-8 text ({why})", remedy)


def utf8(text: str) -> bytes:
    """The bytes of a text. Lone surrogates, which requests and command lines may contain, have bytes as well: no record is an error."""
    return text.encode("utf-8", "surrogatepass")

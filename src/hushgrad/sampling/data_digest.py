"""A keyed digest of a data set's content, by which a resumed run recognises the records that it began with.

It covers everything reachable from the data set: tensors, arrays, lists, attributes of plain objects, closures of functions, what an
object would be pickled as, and the content of files that are named. Content that cannot be read (an open connection, a directory, an
object that holds settings only) makes the data *unseen*, and the guarantee says so.
"""

from __future__ import annotations

import functools
import hashlib
import io
import marshal
import math
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hushgrad._universal_hash import UniversalHash
from hushgrad.sampling.code_names import methods_of, names_in, names_of_reading, own_classes

_DEEP = 50  # levels of nested objects
_LONGEST = 1024  # characters of a path
_READ = 256 << 20  # bytes of files to read in total; for further files, size and modification time are digested
_CHUNK = 1 << 20
_PLAIN = {str, bytes, int, float, bool, complex, type(None)}
_HOLDERS = (Tensor, np.ndarray, Dataset, list, tuple, dict, set)
_CODE = (type, types.ModuleType, types.BuiltinFunctionType)


class Content:
    """A digest of all reachable content; single numbers in attributes are settings and do not count."""

    def __init__(self, key: bytes, *, hashed: UniversalHash | None = None) -> None:
        self._digest, self._key, self._hash = hashlib.blake2b(digest_size=16, key=key), key, hashed or UniversalHash(key)
        self._inside: set[int] = set()  # ids of the objects being visited, to stop at reference cycles
        self._left = _READ
        self.bulk, self.unseen = 0.0, False  # how much was found (values or bytes); whether something could not be read

    def add(self, x: Any, depth: int = 0, *, record: bool = False) -> None:
        """Digest ``x``. ``record``: ``x`` is inside a list, where a number is content; as an attribute it is a setting or a counter."""
        if isinstance(x, (bool, int, float, complex, type(None), np.generic, torch.dtype, torch.device)):
            if record:
                self._bulk(type(x).__name__, repr(x).encode(), 1)
        elif isinstance(x, (str, os.PathLike)):
            self._text(os.fspath(x))
        elif isinstance(x, (bytes, bytearray)):
            self._bulk(type(x).__name__, x)
        elif id(x) in self._inside or depth > _DEEP:
            self._say("ring", b"")
            self.unseen = self.unseen or depth > _DEEP
        else:
            self._inside.add(id(x))
            self._look_into(x, depth + 1, record)
            self._inside.discard(id(x))

    def _look_into(self, x: Any, depth: int, record: bool) -> None:
        if isinstance(x, Tensor):
            self._tensor(x)
        elif isinstance(x, np.ndarray) and x.dtype != object:
            self._numbers(f"array {x.dtype} {x.shape}", self._hash.of_array(x), x.nbytes)
        elif isinstance(x, (list, tuple, np.ndarray)):
            self._sequence(x, depth)
        elif isinstance(x, (set, frozenset)):
            self._unordered(x)
        elif isinstance(x, Mapping):
            self._mapping(x, depth)
        elif isinstance(x, (*_CODE, types.FunctionType, types.MethodType, functools.partial)):
            self._function(x, depth, record)
        elif isinstance(x, io.IOBase):
            self._open_file(x)
        else:
            self._object(x, depth, record)

    # Kinds of content --------------------------------------------------------------------------------------------------------

    def _say(self, what: str, content: Any) -> None:
        self._digest.update(f"\n{what} {len(content)}\n".encode())
        self._digest.update(content)

    def _bulk(self, what: str, content: Any, size: float | None = None) -> None:
        self._say(what, content)
        self.bulk += len(content) if size is None else size

    def _tensor(self, x: Tensor) -> None:
        if x.layout is not torch.strided or x.is_meta:
            self.unseen = True
            return
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        self._numbers(f"tensor {x.dtype} {tuple(x.shape)}", self._hash.of([x]), x.numel() * x.element_size())

    def _numbers(self, what: str, hashes: Iterable[Any], size: int) -> None:
        self._bulk(what, b"".join(part.tobytes() for part in hashes), size)

    def _sequence(self, items: Any, depth: int) -> None:
        try:
            count = _values_in(items)
            self._bulk(f"list {len(items)}", marshal.dumps(list(items), 2), count)  # version 2: no reference to equal objects
            self._paths_in(items)
        except ValueError:  # not only plain values
            self._say("list", str(len(items)).encode())
            for item in items:
                self.add(item, depth, record=True)

    def _paths_in(self, items: Any) -> None:
        """Digest the files that a list of plain values names; the values themselves are digested already."""
        for item in items.values() if isinstance(items, dict) else items:
            if isinstance(item, str):
                self._file(item)
            elif isinstance(item, (list, tuple, dict)):
                self._paths_in(item)

    def _unordered(self, items: set[Any] | frozenset[Any]) -> None:
        """Digest a set in the order of its items' digests: its own order changes from process to process."""
        parts = []
        for item in items:
            part = Content(self._key, hashed=self._hash)
            part.add(item, record=True)
            parts.append(part._digest.digest())
            self.unseen = self.unseen or part.unseen
        self._bulk("set", b"".join(sorted(parts)))

    def _mapping(self, x: Mapping[Any, Any], depth: int) -> None:
        for name in x:
            if isinstance(name, (str, int)):
                self._say("key", repr(name).encode())
            else:
                self.add(name, depth)
            self.add(x[name], depth, record=True)

    def _function(self, x: Any, depth: int, record: bool) -> None:
        """Digest what a function holds (closure, arguments of a partial, bound object), not its code."""
        self._say("code", str(getattr(x, "__qualname__", "")).encode())
        if isinstance(x, functools.partial):
            self.add((x.func, x.args, x.keywords), depth, record=record)
        elif isinstance(x, types.MethodType):
            self.add(x.__self__, depth, record=record)
        elif isinstance(x, types.FunctionType):
            for cell in x.__closure__ or ():
                self._cell(cell, depth, record)
            self._named_in([x], depth)

    def _named_in(self, functions: Iterable[types.FunctionType], depth: int) -> None:
        """Digest the containers that code refers to by name: records may be global variables. Other objects are skipped."""
        for function in functions:
            for name in sorted(names_in(function.__code__)):
                value = function.__globals__.get(name)
                if isinstance(value, _HOLDERS):
                    self._say("variable", name.encode())
                    self.add(value, depth, record=True)
                elif isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
                    self.add(value, depth)

    def _cell(self, cell: types.CellType, depth: int, record: bool) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # an unbound variable
            return
        self.add(content, depth, record=record)

    def _object(self, x: Any, depth: int, record: bool) -> None:
        fingerprint = getattr(x, "_fingerprint", None)  # of a Hugging Face data set: a function of its content
        if isinstance(fingerprint, str):
            self._bulk("fingerprint", fingerprint.encode(), math.inf)
            return
        self._say("object", type(x).__qualname__.encode())
        attributes = getattr(x, "__dict__", None)
        if isinstance(attributes, dict) and _is_plain(type(x)):
            self._attributes(attributes, depth, record)
            self._of_class(type(x), depth)
            folders = [
                name for name, value in attributes.items() if isinstance(value, (str, os.PathLike)) and os.path.isdir(value)
            ]
            self.unseen = self.unseen or bool(names_of_reading(type(x)).intersection(folders))
        else:
            self._pickled(x, depth, record)

    def _of_class(self, kind: type, depth: int) -> None:
        """Digest class attributes, and what the class's code names."""
        for cls in own_classes(kind):
            shared = {
                name: value for name, value in vars(cls).items() if isinstance(value, _HOLDERS) and not name.startswith("__")
            }
            self._attributes(shared, depth, False)
        self._named_in(methods_of(kind).values(), depth)

    def _attributes(self, attributes: Mapping[str, Any], depth: int, record: bool) -> None:
        for name, value in sorted(attributes.items(), key=lambda item: str(item[0])):
            self._say("attribute", str(name).encode())
            self.add(value, depth, record=record)

    def _pickled(self, x: Any, depth: int, record: bool) -> None:
        """Digest what the object would be pickled as; an object that cannot be pickled is unseen."""
        try:
            how = x.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 (a foreign object may raise anything: it is unseen)
            self.unseen = True
            return
        if isinstance(how, str):
            self._say("name", how.encode())
            return
        for number, part in enumerate(how[1:]):
            if number == 1 and type(part) is dict:
                self._attributes(part, depth, record)
            elif part is not None:
                self.add(list(part) if number >= 2 else part, depth, record=record or number >= 2)

    # Files ------------------------------------------------------------------------------------------------------------------

    def _text(self, text: str | bytes) -> None:
        """Digest a string and, if it names a file, that file."""
        name = os.fsdecode(text)
        self._say("text", name.encode(errors="surrogatepass"))
        self._file(name)

    def _file(self, name: str) -> None:
        if not name or len(name) > _LONGEST or "\0" in name or "\n" in name:
            return
        try:
            about = os.stat(name)
        except (OSError, ValueError):  # no file
            return
        if not os.path.isfile(name):
            return
        if about.st_size > self._left:
            self._bulk("file", f"{about.st_size} {about.st_mtime_ns}".encode(), about.st_size)
            return
        self._left -= about.st_size
        self._bulk("file", self._digest_of(name), about.st_size)

    def _digest_of(self, name: str) -> bytes:
        digest = hashlib.blake2b(digest_size=16, key=self._key)
        try:
            with open(name, "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except OSError:  # it exists but cannot be read
            self.unseen = True
        return digest.digest()

    def _open_file(self, file: io.IOBase) -> None:
        name = getattr(file, "name", None)
        if isinstance(file, io.BytesIO):
            self._bulk("file", file.getvalue())
        elif isinstance(name, str) and os.path.isfile(name):
            self._file(name)
        else:
            self.unseen = True

    def hex(self) -> str:
        """The digest."""
        return self._digest.hexdigest()


def _is_plain(kind: type) -> bool:
    """Whether attributes are all of an object's content: not for classes with slots or with a pickled form of their own (a data frame)."""
    own = getattr(kind, "__getstate__", None)  # object has one from Python 3.11 on
    slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    return not slots and kind.__reduce__ is object.__reduce__ and own in (None, getattr(object, "__getstate__", None))


def _values_in(items: Any) -> int:
    """How many plain values a list holds, nested lists included; None counts nothing.

    Raises:
        ValueError: if it holds anything else; marshal would write an array as bytes, without its shape.
    """
    count = 0
    for item in items.values() if type(items) is dict else items:
        if type(item) in (list, tuple, dict):
            count += _values_in(item)
        elif type(item) in _PLAIN:
            count += item is not None
        else:
            raise ValueError("not only plain values")
    return count


def identity_of(dataset: Any, key: bytes) -> dict[str, Any]:
    """The number of examples, a digest of their content under ``key``, and whether all of the content could be read ("seen").

    If it could not, give the loader ``identity="name, version"``.

        >>> a, b = torch.utils.data.TensorDataset(torch.zeros(3)), torch.utils.data.TensorDataset(torch.ones(3))
        >>> identity_of(a, b"k") == identity_of(a, b"k"), identity_of(a, b"k") == identity_of(b, b"k")
        (True, False)
    """
    content = Content(key)
    content.add(dataset)
    # Fewer values than records: only settings (a size, a name) were found.
    seen = content.bulk >= len(dataset) and not content.unseen
    return {"examples": len(dataset), "digest": content.hex(), "seen": seen}

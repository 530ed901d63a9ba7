"""Digests of releases: a universal hash of every block of numbers, and a cryptographic digest of the hashes.

The hash is NH under a secret key (Black et al., "UMAC", CRYPTO 1999): two different blocks of 8192 bytes that do not depend on the key
have the same hash with probability at most 2^-64 (theorem 4.2). A cryptographic digest of everything would take twenty times as long.
The hashes of all blocks are hashed in the same way under a second key, and the digest is taken of the result, one part in 260,000 of the
content, together with the contributions' norms.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import native
from hushgrad._aligned_memory import aligned
from hushgrad.native import _abi

_WORDS = _abi.WITNESS_WORDS  # 64-bit words in a block
_BLOCK, _SIZE = 8 * _WORDS, 16  # bytes of a block, and of its hash
_AT_ONCE = 64 * _BLOCK  # bytes at a time, so that the products stay in the cache
_LOW = 0xFFFFFFFF
_DTYPE, _VERSION = attrgetter("dtype"), attrgetter("_version")
_HASH = None if native.EXACT is None else native.EXACT.witness


class UniversalHash:
    """Hashes of tensors and arrays under one key.

    >>> hashed = UniversalHash(bytes(32))
    >>> a, b = (b"".join(h.tobytes() for h in hashed.of([torch.zeros(5000).fill_(x)])) for x in (0.0, -0.0))
    >>> len(a), a == b
    (48, False)
    """

    def __init__(self, key: bytes) -> None:
        self._key = aligned(_BLOCK).view("<u8")  # aligned, so that no load crosses a cache line
        self._key[:] = np.frombuffer(hashlib.shake_256(key).digest(_BLOCK), "<u8")
        self.place: int = self._key.ctypes.data  # address for C
        self.room = _Room([], [])  # memory for the hashes of a row, used again for the next row of the same sizes

    def of(self, parts: list[Tensor]) -> Iterator[Any]:
        """The hashes of all blocks of each of ``parts`` (contiguous tensors), as arrays of integers."""
        if _HASH is None or any(part.device.type != "cpu" for part in parts):
            key = torch.from_numpy(self._key.astype(np.int64)).to(parts[-1].device)
            hashes = [by_torch(part.to(key.device), key) for part in parts]
            yield from np.split(torch.cat(hashes).cpu().numpy(), np.cumsum([len(h) for h in hashes])[:-1])  # one copy for all
            return
        for part in parts:
            part = part if part.data_ptr() % 4 == 0 else part.clone()
            size = part.numel() * part.element_size()
            out = np.empty(-(-size // _BLOCK) * 2, np.uint64)
            _HASH(part.data_ptr(), size, self.place, out.ctypes.data)
            yield out

    def of_array(self, array: np.ndarray) -> Iterator[Any]:
        """The hashes of all blocks of an array's bytes, for any dtype."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self.of([torch.from_numpy(flat if flat.flags.writeable else flat.copy())])


class _Room:
    """Memory for the hashes of tensors of given sizes, with everything that stays the same from one row of noise to the next."""

    def __init__(self, counts: list[int], kinds: list[torch.dtype]) -> None:
        self.sizes = counts, kinds
        self.counts = array("q", counts).tobytes()
        ends = list(accumulate(-(-count * kind.itemsize // _BLOCK) * _SIZE for count, kind in zip(counts, kinds, strict=True)))
        self.bounds = list(pairwise([0, *ends]))
        self.size = ends[-1] if ends else 0
        self.hashes = bytearray(self.size)
        self.above = bytearray(-(-self.size // _BLOCK) * _SIZE)  # for the hashes of the hashes
        self.at, self.above_at = _place(self.hashes), _place(self.above)
        self.places = [self.at + begin for begin, _ in self.bounds]
        self.table: tuple[Any, array[int]] | None = (
            None  # of the kernel that draws: what its last row's table was made from, and it
        )


def _place(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0


class Seen:
    """Hashes of tensors computed while they are written, when their numbers are in the cache.

    They are valid for one step: for these tensor objects, unchanged, until the next ones are made under the same key. A change by torch is
    noticed; code that changes a tensor otherwise must not ask for its hash.

    >>> x, hashed = torch.zeros(5000), UniversalHash(bytes(32))
    >>> seen = Seen(hashed, [x])
    >>> seen.look(x, 0, 5000)
    >>> seen.of(x) == next(hashed.of([x])).tobytes(), seen.of(x.add_(1)), seen.of(x.clone())
    (True, None, None)
    """

    def __init__(self, hashed: UniversalHash, tensors: list[Tensor]) -> None:
        sizes = list(map(Tensor.numel, tensors)), list(map(_DTYPE, tensors))
        if hashed.room.sizes != sizes:
            hashed.room = _Room(*sizes)
        self.hashed, self.room, self.tensors, self._versions = hashed, hashed.room, tensors, list(map(_VERSION, tensors))

    @cached_property
    def places(self) -> dict[int, int]:
        """Where C puts the hashes of each tensor, by its id."""
        return dict(zip(map(id, self.tensors), self.room.places, strict=True))

    def look(self, tensor: Tensor, low: int, size: int) -> None:
        """Hash the elements [low, low + size), which are whole blocks unless they end the tensor."""
        at = self._at(tensor)
        assert at is not None
        first = self.room.bounds[at][0] + low * tensor.itemsize // _BLOCK * _SIZE
        for hashes in self.hashed.of([tensor.detach().reshape(-1)[low : low + size]]):
            self.room.hashes[first : first + 8 * len(hashes)] = hashes.tobytes()

    def all_of(self, tensors: Collection[Tensor]) -> _Room | None:
        """Sizes and hashes of these tensors, if they are exactly the hashed ones, in order and unchanged; else None."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return self.room if same and list(map(_VERSION, tensors)) == self._versions else None

    def of(self, tensor: Tensor) -> bytearray | None:
        """The hashes of a tensor; None if it was not hashed, or torch has changed it since."""
        at = self._at(tensor)
        if at is None or self._versions[at] != tensor._version:
            return None
        begin, end = self.room.bounds[at]
        return self.room.hashes[begin:end]

    def _at(self, tensor: Tensor) -> int | None:
        return next((at for at, kept in enumerate(self.tensors) if kept is tensor), None)


class Witness:
    """Digests of what one run releases, under a secret key of the run.

    >>> witness, norms = Witness(bytes(32)), torch.ones(2)
    >>> a, b = torch.zeros(5000), torch.zeros(5000)
    >>> b[4321] = -0.0
    >>> witness.of({"w": a}, norms) == witness.of({"w": a.clone()}, norms), witness.of({"w": a}, norms) == witness.of({"w": b}, norms)
    (True, False)
    """

    def __init__(self, key: bytes) -> None:
        self.hashed, self._above = UniversalHash(key), UniversalHash(b"hashes of hashes" + key)

    def of(self, released: Mapping[str, Tensor], norms: Tensor, more: bytes = b"", seen: Seen | None = None) -> bytes:
        """A digest of every bit of this process's part of ``released``, of ``norms`` and of ``more``.

        Args:
            released: the tensors, by name.
            norms: the contributions' norms, which are not released but distinguish batches.
            more: whatever else was released.
            seen: hashes that were made when the noise was added; missing ones are computed now.
        """
        norms = norms if norms.is_contiguous() else norms.contiguous()
        here = norms.is_cpu
        room = seen.all_of(released.values()) if here and seen is not None and _HASH is not None else None
        if room is not None and _HASH is not None:
            _HASH(room.at, room.size, self._above.place, room.above_at)
            sizes, hashes = room.counts, bytes(room.above)
        else:
            sizes, hashes = self._hashed(released, None if here else norms, seen)
        # Read by address, which is much faster than through numpy; norms on a device are among the hashes.
        numbers = ctypes.string_at(norms.data_ptr(), norms.nbytes) if here else b""
        content = b"".join((norms.nbytes.to_bytes(8, "little"), sizes, numbers, hashes, more))
        return hashlib.blake2b(content, digest_size=32).digest()  # the journal's digest, whose code is in the cache already

    def _hashed(self, released: Mapping[str, Tensor], norms: Tensor | None, seen: Seen | None) -> tuple[bytes, bytes]:
        """Sizes of all that is released, and of norms on a device, and the hashes of their hashes; for what is not in ``seen``."""
        parts = [part for tensor in released.values() for part in _parts(tensor)]
        if norms is not None:
            parts.append(norms.detach())
        some = [None if seen is None else seen.of(part) for part in parts]
        rest = self.hashed.of([part for part, hashes in zip(parts, some, strict=True) if hashes is None])
        hashed = b"".join(next(rest).tobytes() if hashes is None else hashes for hashes in some)
        above = b"".join(h.tobytes() for h in self._above.of_array(np.frombuffer(hashed, np.uint8))) if hashed else b""
        return array("q", map(Tensor.numel, parts)).tobytes(), above


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The local tensors that hold a tensor's numbers, in order; for the sum of a lazy table, its rows and their indices."""
    if type(tensor) is not Tensor:  # sharded: this process's part
        tensor = getattr(tensor, "to_local", lambda: tensor)()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().contiguous(), tensor._values().contiguous()
    return (tensor if tensor.is_contiguous() else tensor.contiguous(),)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all ``tensors`` with their names, dtypes and shapes; used for a run's initial weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        local = tensor if type(tensor) is Tensor else getattr(tensor, "to_local", lambda t=tensor: t)()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(np.asarray(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).data)
    return digest.hexdigest()


def by_torch(tensor: Tensor, key: Tensor) -> Tensor:
    """The same hashes by torch, on any device: integer products and sums wrap around as in C."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK))
    some = flat.split(_AT_ONCE if flat.device.type == "cpu" else max(1, flat.numel()))
    return torch.cat([_nh(part.view(torch.int64).view(-1, _WORDS), key) for part in some])


def _nh(words: Tensor, key: Tensor) -> Tensor:
    """The two halves of each block's hash, from products of halves of words, whose own halves are added up apart."""
    first, second = (words + key).view(-1, _WORDS // 2, 2).unbind(2)
    a, b, c, d = first & _LOW, _upper(first), second & _LOW, _upper(second)
    products = [a * c, a * d, b * c, b * d]
    low, high = zip(*(((p & _LOW).sum(1), _upper(p).sum(1)) for p in products), strict=True)
    parts = [low[0], high[0] + low[1] + low[2], high[1] + high[2] + low[3], high[3]]  # of 32 bits each, and what they carry
    for lower, upper in pairwise(parts):
        upper += lower >> 32
        lower &= _LOW
    return torch.stack([parts[0] + (parts[1] << 32), parts[2] + (parts[3] << 32)], 1).reshape(-1)


def _upper(numbers: Tensor) -> Tensor:
    return (numbers >> 32) & _LOW

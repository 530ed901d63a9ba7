"""Digests of releases: a universal hash of every block of numbers, and a cryptographic digest of the hashes.

The hash is NH under a secret key (Black et al., "UMAC", CRYPTO 1999): two different blocks of 8192 bytes that do not depend on the key
have the same hash with probability at most 2^-32 (theorem 4.2). A cryptographic digest of everything would take twenty times as long; it
is taken of the hashes, a thousandth of the content, together with the contributions' norms.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, pairwise
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import native
from hushgrad._aligned_memory import aligned
from hushgrad.native import _abi

_WORDS, _LANES = _abi.WITNESS_WORDS, _abi.WITNESS_LANES  # 32-bit words in a block, and lanes that are summed separately
_BLOCK = 4 * _WORDS  # bytes
_AT_ONCE = 64 * _BLOCK  # bytes at a time, so that the products stay in the cache
_LOW = 0xFFFFFFFF
_DTYPE, _VERSION = attrgetter("dtype"), attrgetter("_version")
_HASH = None if native.EXACT is None else native.EXACT.witness


class UniversalHash:
    """Hashes of tensors and arrays under one key.

    >>> hashed = UniversalHash(bytes(32))
    >>> a, b = (b"".join(h.tobytes() for h in hashed.of([torch.zeros(5000).fill_(x)])) for x in (0.0, -0.0))
    >>> len(a), a == b
    (24, False)
    """

    def __init__(self, key: bytes) -> None:
        self._key = aligned(_BLOCK).view("<u4")  # aligned, so that no load crosses a cache line
        self._key[:] = np.frombuffer(hashlib.shake_256(key).digest(_BLOCK), "<u4")
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
            out = np.empty(-(-size // _BLOCK), np.uint64)
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
        ends = list(accumulate(-(-count * kind.itemsize // _BLOCK) * 8 for count, kind in zip(counts, kinds, strict=True)))
        self.bounds = list(pairwise([0, *ends]))
        self.hashes = bytearray(ends[-1] if ends else 0)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.hashes)) if self.hashes else 0
        self.places = [at + begin for begin, _ in self.bounds]


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
        self.hashed, self._room, self._tensors, self._versions = hashed, hashed.room, tensors, list(map(_VERSION, tensors))

    def places(self, tensors: list[Tensor]) -> list[int]:
        """The addresses where C puts the hashes of these tensors, which are all of them or those that one thread works on."""
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return self._room.places
        by_object = dict(zip(map(id, self._tensors), self._room.places, strict=True))
        return [by_object[id(tensor)] for tensor in tensors]

    def look(self, tensor: Tensor, low: int, size: int) -> None:
        """Hash the elements [low, low + size), which are whole blocks unless they end the tensor."""
        at = self._at(tensor)
        assert at is not None
        first = self._room.bounds[at][0] + low * tensor.itemsize // _BLOCK * 8
        for hashes in self.hashed.of([tensor.detach().reshape(-1)[low : low + size]]):
            self._room.hashes[first : first + 8 * len(hashes)] = hashes.tobytes()

    def all_of(self, tensors: Collection[Tensor]) -> tuple[bytes, bytearray] | None:
        """Sizes and hashes of these tensors, if they are exactly the hashed ones, in order and unchanged; else None."""
        same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        return (self._room.counts, self._room.hashes) if same and list(map(_VERSION, tensors)) == self._versions else None

    def of(self, tensor: Tensor) -> bytearray | None:
        """The hashes of a tensor; None if it was not hashed, or torch has changed it since."""
        at = self._at(tensor)
        if at is None or self._versions[at] != tensor._version:
            return None
        begin, end = self._room.bounds[at]
        return self._room.hashes[begin:end]

    def _at(self, tensor: Tensor) -> int | None:
        return next((at for at, kept in enumerate(self._tensors) if kept is tensor), None)


class Witness:
    """Digests of what one run releases, under a secret key of the run.

    >>> witness, norms = Witness(bytes(32)), torch.ones(2)
    >>> a, b = torch.zeros(5000), torch.zeros(5000)
    >>> b[4321] = -0.0
    >>> witness.of({"w": a}, norms) == witness.of({"w": a.clone()}, norms), witness.of({"w": a}, norms) == witness.of({"w": b}, norms)
    (True, False)
    """

    def __init__(self, key: bytes) -> None:
        self.hashed = UniversalHash(key)

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
        known = seen.all_of(released.values()) if here and seen is not None else None
        sizes, hashes = known or self._hashed(released, None if here else norms, seen)
        # Read by address, which is much faster than through numpy; norms on a device are among the hashes.
        numbers = ctypes.string_at(norms.data_ptr(), norms.nbytes) if here else b""
        content = b"".join((norms.nbytes.to_bytes(8, "little"), sizes, numbers, hashes, more))
        return hashlib.blake2b(content, digest_size=32).digest()  # the journal's digest, whose code is in the cache already

    def _hashed(self, released: Mapping[str, Tensor], norms: Tensor | None, seen: Seen | None) -> tuple[bytes, bytes]:
        """Sizes and hashes of all that is released, and of norms on a device; computed one by one if some are not in ``seen``."""
        parts = [part for tensor in released.values() for part in _parts(tensor)]
        if norms is not None:
            parts.append(norms.detach())
        some = [None if seen is None else seen.of(part) for part in parts]
        rest = self.hashed.of([part for part, hashes in zip(parts, some, strict=True) if hashes is None])
        hashed = b"".join(next(rest).tobytes() if hashes is None else hashes for hashes in some)
        return array("q", map(Tensor.numel, parts)).tobytes(), hashed


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
    return torch.cat([_nh(part.view(torch.int32).view(-1, _WORDS // (2 * _LANES), 2, _LANES), key) for part in some])


def _nh(words: Tensor, key: Tensor) -> Tensor:
    keyed = words.to(torch.int64).add_(key.view(words.shape[1:])).bitwise_and_(_LOW)
    return (keyed[:, :, 0] * keyed[:, :, 1]).sum((1, 2))

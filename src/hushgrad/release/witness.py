"""What the journal remembers a release by: a digest of every number of it, for a small part of a step's time.

A cryptographic digest of all released numbers would take as long as the step. So their bits go through a universal hash first
(:mod:`hushgrad._universal`), under a key that follows from the run's; the hashes are digested together with the contributions' norms.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hushgrad._universal import Seen, UniversalHash
from hushgrad._universal import by_torch as _by_torch  # noqa: F401 (the kernel's reference, by the name that native/abi.h has)

__all__ = ["Witness", "digest_of"]


class Witness:
    """Digests of what one run releases, under a key of its own.

    >>> witness, norms = Witness(bytes(32)), torch.ones(2)
    >>> a, b = torch.zeros(5000), torch.zeros(5000)
    >>> b[4321] = -0.0
    >>> witness.of({"w": a}, norms) == witness.of({"w": a.clone()}, norms), witness.of({"w": a}, norms) == witness.of({"w": b}, norms)
    (True, False)
    """

    def __init__(self, key: bytes) -> None:
        self.hashed = UniversalHash(key)

    def of(self, released: Mapping[str, Tensor], norms: Tensor, more: bytes = b"", seen: Seen | None = None) -> bytes:
        """A digest of every bit of ``released`` (what this process holds of it), of ``norms`` and of ``more``.

        Args:
            released: the tensors, by name.
            norms: the contributions' norms, which are not released but tell one batch from another.
            more: whatever else was released.
            seen: hashes that were made when the noise was added; of whatever is not among them they are made now.
        """
        size = norms.numel().to_bytes(8, "little")
        known = None if seen is None or not norms.is_cpu else seen.all_of(released.values())
        if known is not None:
            return _digest(size + known[0], norms, known[1], more)
        parts = [part for tensor in released.values() for part in _parts(tensor)]
        if not norms.is_cpu:
            parts.append(norms.detach().contiguous())
        some = [None if seen is None else seen.of(part) for part in parts]
        rest = self.hashed.of([part for part, hashes in zip(parts, some, strict=True) if hashes is None])
        sizes = size + array("q", map(Tensor.numel, parts)).tobytes()
        return _digest(sizes, norms, b"".join(next(rest).tobytes() if hashes is None else hashes for hashes in some), more)


def _digest(sizes: bytes, norms: Tensor, hashes: bytes | bytearray, more: bytes) -> bytes:
    norms = norms if norms.is_contiguous() else norms.contiguous()
    numbers = _memory(norms) if norms.is_cpu else b""  # of a device they are among the hashes
    return hashlib.blake2b(b"".join((sizes, numbers, hashes, more)), digest_size=32).digest()


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a tensor in main memory, which it holds: by its address, in a fraction of the time that an array of numpy takes."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The memory that holds a tensor's numbers here, in order; of the sum of a lazy table, its rows and their places."""
    if type(tensor) is not Tensor:  # sharded: what this process holds of it
        tensor = getattr(tensor, "to_local", lambda: tensor)()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().contiguous(), tensor._values().contiguous()
    return (tensor if tensor.is_contiguous() else tensor.contiguous(),)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all numbers of ``tensors``, with their names, types and shapes: of the weights that a run starts from."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        local = tensor if type(tensor) is Tensor else getattr(tensor, "to_local", lambda t=tensor: t)()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(np.asarray(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).data)
    return digest.hexdigest()

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
        norms = norms if norms.is_contiguous() else norms.contiguous()
        here = norms.is_cpu
        known = seen.all_of(released.values()) if here and seen is not None else None
        sizes, hashes = known or self._hashed(released, None if here else norms, seen)
        # By its address, in a fraction of the time that an array of numpy takes; of a device they are among the hashes.
        numbers = (ctypes.c_char * norms.nbytes).from_address(norms.data_ptr()) if here else b""
        content = b"".join((norms.numel().to_bytes(8, "little"), sizes, numbers, hashes, more))
        return hashlib.blake2b(content, digest_size=32).digest()

    def _hashed(self, released: Mapping[str, Tensor], norms: Tensor | None, seen: Seen | None) -> tuple[bytes, bytes]:
        """Sizes and hashes of all that is released, and of the norms on a device: one by one, where some were not seen."""
        parts = [part for tensor in released.values() for part in _parts(tensor)]
        if norms is not None:
            parts.append(norms.detach())
        some = [None if seen is None else seen.of(part) for part in parts]
        rest = self.hashed.of([part for part, hashes in zip(parts, some, strict=True) if hashes is None])
        hashed = b"".join(next(rest).tobytes() if hashes is None else hashes for hashes in some)
        return array("q", map(Tensor.numel, parts)).tobytes(), hashed


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

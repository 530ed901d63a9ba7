"""What the journal remembers a release by: a digest of every number of it, for a small part of a step's time.

A cryptographic digest of all released numbers would take as long as the step. So their bits go through a universal hash first
(:mod:`hushgrad._universal`), under a key that follows from the run's; the hashes are digested together with the contributions' norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hushgrad._universal import UniversalHash
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
        self._hash = UniversalHash(key)

    @torch.no_grad()
    def of(self, released: Mapping[str, Tensor], norms: Tensor, more: bytes = b"") -> bytes:
        """A digest of every bit of ``released`` (what this process holds of it), of ``norms`` and of ``more``."""
        parts = [part for tensor in (norms, *released.values()) for part in _parts(tensor)]
        digest = hashlib.blake2b(more, digest_size=32)
        digest.update(np.array([part.numel() for part in parts]).tobytes())
        for hashes in self._hash.of(parts):
            digest.update(hashes)
        return digest.digest()


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

"""What the journal remembers a release by: a digest of every number of it, for a small part of a step's time.

A cryptographic digest of all released numbers would take as long as the step. So their bits go through a *universal* hash first,
which needs one multiplication for two numbers: NH, under a key that follows from the run's. Of any two different releases that do
not depend on this key, the hashes of 8192 bytes are the same with probability at most 2^-32 (Black et al., "UMAC", CRYPTO 1999,
theorem 4.2). The hashes of all blocks, a thousandth of the numbers, are digested together with the contributions' norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad import native
from hushgrad.native import _abi

__all__ = ["Witness", "digest_of"]

_WORDS, _LANES = _abi.WITNESS_WORDS, _abi.WITNESS_LANES  # of a block
_BLOCK = 4 * _WORDS  # bytes
_AT_ONCE = 64 * _BLOCK  # bytes, of which the products stay in the cache
_LOW = 0xFFFFFFFF
_HASH = None if native.EXACT is None else native.EXACT.witness


class Witness:
    """Digests of what one run releases, under a key of its own.

    >>> witness, norms = Witness(bytes(32)), torch.ones(2)
    >>> a, b = torch.zeros(5000), torch.zeros(5000)
    >>> b[4321] = -0.0
    >>> witness.of({"w": a}, norms) == witness.of({"w": a.clone()}, norms), witness.of({"w": a}, norms) == witness.of({"w": b}, norms)
    (True, False)
    """

    def __init__(self, key: bytes) -> None:
        self._key = np.frombuffer(hashlib.shake_256(key).digest(_BLOCK), "<u4").copy()

    @torch.no_grad()
    def of(self, released: Mapping[str, Tensor], norms: Tensor, more: bytes = b"") -> bytes:
        """A digest of every bit of ``released`` (what this process holds of it), of ``norms`` and of ``more``."""
        parts = [part for tensor in (norms, *released.values()) for part in _parts(tensor)]
        digest = hashlib.blake2b(more, digest_size=32)
        digest.update(np.array([part.numel() for part in parts]).tobytes())
        for hashes in self._hashes(parts):
            digest.update(hashes)
        return digest.digest()

    def _hashes(self, parts: list[Tensor]) -> Iterator[Any]:
        if _HASH is None or any(part.device.type != "cpu" for part in parts):
            key = torch.from_numpy(self._key.astype(np.int64)).to(parts[-1].device)
            yield torch.cat([_by_torch(part.to(key.device), key) for part in parts]).cpu().numpy()  # one copy for all
            return
        for part in parts:
            part = part if part.data_ptr() % 4 == 0 else part.clone()
            size = part.numel() * part.element_size()
            out = np.empty(-(-size // _BLOCK), np.uint64)
            _HASH(part.data_ptr(), size, self._key.ctypes.data, out.ctypes.data)
            yield out


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The memory that holds a tensor's numbers here, in order; of the sum of a lazy table, its rows and their places."""
    if type(tensor) is not Tensor:  # sharded: what this process holds of it
        tensor = getattr(tensor, "to_local", lambda: tensor)()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().contiguous(), tensor._values().contiguous()
    return (tensor if tensor.is_contiguous() else tensor.contiguous(),)


def _by_torch(tensor: Tensor, key: Tensor) -> Tensor:
    """The same hashes on any device: products and sums of whole numbers wrap around as in C."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK))
    some = flat.split(_AT_ONCE if flat.device.type == "cpu" else max(1, flat.numel()))
    return torch.cat([_nh(part.view(torch.int32).view(-1, _WORDS // (2 * _LANES), 2, _LANES), key) for part in some])


def _nh(words: Tensor, key: Tensor) -> Tensor:
    keyed = words.to(torch.int64).add_(key.view(words.shape[1:])).bitwise_and_(_LOW)
    return (keyed[:, :, 0] * keyed[:, :, 1]).sum((1, 2))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all numbers of ``tensors``, with their names, types and shapes: of the weights that a run starts from."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        local = tensor if type(tensor) is Tensor else getattr(tensor, "to_local", lambda t=tensor: t)()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(np.asarray(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).data)
    return digest.hexdigest()

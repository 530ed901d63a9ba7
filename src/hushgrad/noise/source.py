"""The source of all noise: a keyed, random-access stream of standard Gaussians."""

from __future__ import annotations

import hashlib
import secrets
import sys
import threading

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.noise import _kernel
from hushgrad.noise._threads import CHUNK, over_chunks
from hushgrad.noise._transform import GROUP, GROUP_BYTES

__all__ = ["Source"]

_STEP_BITS, _INDEX_BITS, _BLOCK_BITS = 48, 32, 48  # the three fields of the 128-bit counter
_BLOCKS = GROUP_BYTES // 16  # cipher blocks for one group of numbers
_scratch = threading.local()


class Source:
    """z(step, index, offset): independent standard Gaussians as a pure function of a 256-bit key.

    AES-256 in counter mode over the counter (step, tensor index, block) gives random words, and Box-Muller turns them into
    Gaussians. There is no state: any part of any tensor at any step can be drawn anywhere, in any order, on any number of
    threads, with the same bits. ``key`` defaults to 32 bytes of operating-system entropy. ``seed`` makes a run reproducible
    and therefore not private against whoever knows the seed; ``reproducible`` says so.

    | dtype of ``like`` | number |
    |---|---|
    | float64 | computed in double precision from 93 random bits for each pair |
    | float32 | the same point of the plane computed in single precision (relative difference below 1e-6) |
    | bfloat16, float16 | the float32 number, rounded |

    **Formal guarantee.** If AES-256 is a pseudorandom permutation, N numbers are indistinguishable from independent draws of
    the Box-Muller map up to N² 2⁻¹³⁰; its radius has 2⁻⁶³ resolution in probability, tails end at 9.42 standard deviations
    (mass 2⁻⁶⁴), no number is 0. Floating-point attacks are outside this promise.

        >>> import torch
        >>> source = Source(seed=1)
        >>> whole = source.z(0, 3, torch.empty(1000))
        >>> torch.equal(whole[700:], source.z(0, 3, torch.empty(300), offset=700))
        True

    Reference: NIST SP 800-38A, section 6.5 (counter mode); Box and Muller (1958).
    """

    def __init__(self, key: bytes | None = None, *, seed: int | None = None) -> None:
        if key is not None and seed is not None:
            _check.fail("seed", seed, "to be absent when a key is given", "Give either key= or seed=.")
        self.reproducible = seed is not None
        master = _master(key, seed)
        # Whoever else derives streams from the same key (the loader) must not meet this one.
        self._cipher = algorithms.AES(hashlib.blake2b(master, digest_size=32, person=b"hushgrad noise").digest())
        self._threads = threading.local()  # a cipher context for each thread; only its counter changes

    def __repr__(self) -> str:
        return f"Source({'seed=…' if self.reproducible else 'key=…'})"

    def __reduce__(self) -> str:
        raise TypeError("A Source holds a secret key and is not pickled; make a new one from the key where it is needed.")

    def z(self, step: int, index: int, like: Tensor, *, offset: int = 0, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """``scale`` times the Gaussians of tensor ``index`` at ``step``, in the shape, dtype and device of ``like``.

        ``offset`` is the position of ``like``'s first element in the full flattened tensor. With ``out`` the numbers are
        added to it in place, in one pass, and it is returned; otherwise the result is a fresh tensor.
        """
        target, flat, fresh = destination(like, out)
        scale = _check.number(scale=scale)
        start = _check.integer(0, offset=offset)
        self._check_place(step, index, start + flat.size)

        def work(low: int, high: int) -> None:
            self.write(step, index, start + low, flat[low:high], scale, fresh)

        over_chunks(flat.size, work)
        return deliver(target, flat, like, out)

    def fill(self, step: int, index: int, start: int, out: np.ndarray) -> None:
        """Write the numbers at ``start``, ``start + 1``, ... into the float32 or float64 array ``out``: one chunk, one thread."""
        first, last = start // GROUP, -(-(start + out.size) // GROUP)
        words = self._words(step, index, first, last - first)
        if out.size == (last - first) * GROUP:
            _kernel.KERNEL.gaussians(words, out)
        else:
            whole = np.empty((last - first) * GROUP, out.dtype)
            _kernel.KERNEL.gaussians(words, whole)
            out[:] = whole[start - first * GROUP :][: out.size]

    def write(self, step: int, index: int, start: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        """One chunk of ``z``: ``out = scale * z`` if fresh, else ``out += scale * z``."""
        if fresh:
            self.fill(step, index, start, out)
            if scale != 1.0:
                _kernel.KERNEL.emit(out, scale, out, fresh=True)
        else:
            block = np.empty_like(out)
            self.fill(step, index, start, block)
            _kernel.KERNEL.emit(block, scale, out, fresh=False)

    def _words(self, step: int, index: int, first: int, groups: int) -> np.ndarray:
        """The random words of ``groups`` groups from group ``first`` on."""
        size = groups * GROUP_BYTES
        counter = (step << (_INDEX_BITS + _BLOCK_BITS)) | (index << _BLOCK_BITS) | (first * _BLOCKS)
        zeros, words = _buffers(size)
        self._encryptor(counter.to_bytes(16, "big")).update_into(zeros[:size].data, words.data)
        return words[:size].view("<u4")

    def _encryptor(self, counter: bytes) -> CipherContext:
        if "encryptor" not in self._threads.__dict__:
            self._threads.encryptor = Cipher(self._cipher, modes.CTR(counter)).encryptor()
        self._threads.encryptor.reset_nonce(counter)
        return self._threads.encryptor  # type: ignore[no-any-return]

    def _check_place(self, step: int, index: int, end: int) -> None:
        if _check.integer(0, step=step) >> _STEP_BITS:
            _check.fail("step", step, f"to be less than 2**{_STEP_BITS}")
        if _check.integer(0, index=index) >> _INDEX_BITS:
            _check.fail("index", index, f"to be less than 2**{_INDEX_BITS}")
        if end // GROUP * _BLOCKS >> _BLOCK_BITS:
            _check.fail("offset", end, f"to end below 2**{_BLOCK_BITS} cipher blocks", "Split the tensor over several indices.")


def _master(key: bytes | None, seed: int | None) -> bytes:
    if seed is not None:
        return hashlib.blake2b(str(_check.integer(seed=seed)).encode(), digest_size=32, person=b"hushgrad seed").digest()
    if key is None:
        return secrets.token_bytes(32)
    if not isinstance(key, bytes) or len(key) != 32:
        # Never through _check.fail: its message would show the key.
        raise ArgumentError("Expected key to be 32 bytes. secrets.token_bytes(32) makes one.")
    return key


def _buffers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Zeros to encrypt and room for the key stream, kept for each thread."""
    size = max(size, (CHUNK // GROUP + 1) * GROUP_BYTES)
    if "zeros" not in _scratch.__dict__ or _scratch.zeros.size < size:
        _scratch.zeros, _scratch.words = np.zeros(size, np.uint8), np.empty(size + 16, np.uint8)
    return _scratch.zeros, _scratch.words


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and no DTensor exists before it is
    return module is not None and isinstance(tensor, module.DTensor)


def destination(like: Tensor, out: Tensor | None) -> tuple[Tensor, np.ndarray, bool]:
    """Where to compute: (tensor, its flat float32 or float64 view, whether it is fresh rather than to be added to)."""
    for name, tensor in (("like", like), ("out", out)):
        if tensor is not None and _is_dtensor(tensor):
            _check.fail(name, type(tensor), "to be a local tensor", "Draw on tensor.to_local() with the shard's offset=.")
    if not like.dtype.is_floating_point:
        _check.fail("like.dtype", like.dtype, "to be a floating-point type")
    if out is not None and (out.shape != like.shape or out.dtype != like.dtype or out.device != like.device):
        _check.fail("out", tuple(out.shape), f"to have like's shape {tuple(like.shape)}, dtype and device")
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if out is not None and out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu":
        return out, out.detach().reshape(-1).numpy(), False
    target = torch.empty(like.shape, dtype=dtype)
    return target, target.reshape(-1).numpy(), True


def deliver(target: Tensor, flat: np.ndarray, like: Tensor, out: Tensor | None) -> Tensor:
    """The computed numbers in the dtype and on the device of ``like``, added to ``out`` if that has not happened in place."""
    if out is None:
        return target.to(device=like.device, dtype=like.dtype)
    if target is not out:
        with torch.no_grad():
            out.add_(target.to(device=out.device))
    return out

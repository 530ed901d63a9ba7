"""A random-access stream of random bytes: AES-256 in counter mode."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from hushgrad import _check

_STEP_BITS, _INDEX_BITS, _BLOCK_BITS = 48, 32, 48  # the three fields of the 128-bit counter
STEPS, INDICES, BLOCKS = 1 << _STEP_BITS, 1 << _INDEX_BITS, 1 << _BLOCK_BITS  # how many of each can be addressed
_scratch = threading.local()


class KeyStream:
    """The 16 random bytes at (step, tensor index, block), as a pure function of a key and a purpose.

    Different purposes have unrelated keys, so that other uses of the same run key (a loader's draws) never repeat these bytes. No
    address occurs twice: the three fields fill the counter without overlap.
    """

    def __init__(self, key: bytes, purpose: bytes) -> None:
        self.key = hashlib.blake2b(key, digest_size=32, person=purpose).digest()  # as secret as the run's key
        self._round_keys: ctypes.Array[ctypes.c_char] | None = None
        self.place = 0  # address of the round keys; 0 before they are made
        self._lock = threading.Lock()
        self._cipher = algorithms.AES(self.key)
        self._threads = threading.local()  # a cipher context for each thread; only its counter changes

    def round_keys(self, expand: Callable[[bytes], ctypes.Array[ctypes.c_char]]) -> int:
        """The address of the round keys for the C kernel.

        ``expand`` makes them once: making them again would free the first ones while another thread uses them.
        """
        if not self.place:
            with self._lock:
                if not self.place:
                    self._round_keys = expand(self.key)
                    self.place = ctypes.addressof(self._round_keys)
        return self.place

    def words(self, step: int, index: int, block: int, size: int) -> np.ndarray:
        """``size`` bytes from ``block`` on, as little-endian 32-bit words; valid until this thread's next call."""
        if step >> _STEP_BITS or index >> _INDEX_BITS or (block + size // 16) >> _BLOCK_BITS:
            check_address(step, index, block + size // 16)  # an overflowing field would repeat noise
        zeros, stream = _buffers(size)
        counter = (step << (_INDEX_BITS + _BLOCK_BITS)) | (index << _BLOCK_BITS) | block
        self._encryptor(counter.to_bytes(16, "big")).update_into(zeros[:size].data, stream.data)
        return stream[:size].view("<u4")

    def scattered(self, step: int, index: int, groups: np.ndarray, blocks: int) -> np.ndarray:
        """The words of scattered groups of ``blocks`` blocks each, by encrypting their counters one by one."""
        counters = np.empty((len(groups), blocks, 2), ">u8")
        counters[..., 0] = step << 16 | index >> 16
        counters[..., 1] = (index & 0xFFFF) << 48
        counters[..., 1] |= (groups[:, None] * blocks + np.arange(blocks)).astype(np.uint64)
        words = np.empty(counters.nbytes + 15, np.uint8)
        Cipher(self._cipher, modes.ECB()).encryptor().update_into(counters.view(np.uint8).reshape(-1).data, words.data)
        return words[: counters.nbytes].view("<u4")

    def _encryptor(self, counter: bytes) -> CipherContext:
        if "encryptor" not in self._threads.__dict__:
            self._threads.encryptor = Cipher(self._cipher, modes.CTR(counter)).encryptor()
        self._threads.encryptor.reset_nonce(counter)
        return self._threads.encryptor  # type: ignore[no-any-return]


def check_address(step: int, index: int, end_block: int) -> None:
    """Refuse addresses that the counter cannot hold."""
    if type(step) is type(index) is int and not (step >> _STEP_BITS or index >> _INDEX_BITS or end_block >> _BLOCK_BITS):
        return  # a negative number shifts to -1; the only check that a valid address costs
    if _check.integer(0, step=step) >> _STEP_BITS:
        _check.fail("step", step, f"to be less than 2**{_STEP_BITS}")
    if _check.integer(0, index=index) >> _INDEX_BITS:
        _check.fail("index", index, f"to be less than 2**{_INDEX_BITS}")
    if end_block >> _BLOCK_BITS:
        _check.fail("offset", end_block, f"to end below 2**{_BLOCK_BITS} cipher blocks", "Split the tensor over several indices.")


def _buffers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Zeros to encrypt, and memory for the key stream; one pair for each thread."""
    if "zeros" not in _scratch.__dict__ or _scratch.zeros.size < size:
        _scratch.zeros, _scratch.stream = np.zeros(size, np.uint8), np.empty(size + 16, np.uint8)
    return _scratch.zeros, _scratch.stream

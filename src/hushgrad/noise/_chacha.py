"""A random-access stream of random bytes by ChaCha20 (RFC 8439), which is fast on GPUs and on processors without AES instructions.

A block of 64 bytes is named by the fields of :mod:`hushgrad.noise._aes_ctr`: 48 bits of step, 32 of tensor index, 48 of block. They
fill the last four words of the state without overlap, so no address occurs twice:

    word 12 = block mod 2³²,   word 13 = (step div 2³²) 2¹⁶ + block div 2³²,   word 14 = index,   word 15 = step mod 2³²

The C library, the numpy code here and the GPU kernel give the same words.
"""

from __future__ import annotations

import hashlib

import numpy as np

from hushgrad import native
from hushgrad.noise._aes_ctr import check_address

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_ROUNDS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15), (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip


_LIBRARY = native.EXACT


class ChaChaStream:
    """The random bytes at (step, tensor index, block), a pure function of the key; blocks are counted in 16 bytes, as for AES."""

    def __init__(self, key: bytes, purpose: bytes) -> None:
        self.key = hashlib.blake2b(key, digest_size=32, person=purpose).digest()
        self.key_words = np.frombuffer(self.key, "<u4").copy()  # as secret as the key it comes from

    def words(self, step: int, index: int, block: int, size: int) -> np.ndarray:
        """``size`` bytes from ``block`` on (both whole blocks of 64 bytes), as little-endian 32-bit words."""
        check_address(step, index, block + size // 16)
        first, count = block // 4, size // 64
        if _LIBRARY is None:
            return chacha_blocks(self.key_words, step, index, np.arange(first, first + count, dtype=np.uint64)).reshape(-1)
        out = np.empty(16 * count, np.uint32)
        _LIBRARY.chacha(self.key_words.ctypes.data, step, index, first, out.ctypes.data, count)
        return out

    def scattered(self, step: int, index: int, groups: np.ndarray, blocks: int) -> np.ndarray:
        """The words of scattered groups of ``blocks`` blocks of 16 bytes each."""
        each = blocks // 4
        numbers = (groups[:, None] * each + np.arange(each)).astype(np.uint64).reshape(-1)
        return chacha_blocks(self.key_words, step, index, numbers).reshape(-1)


def chacha_blocks(key: np.ndarray, step: int, index: int, blocks: np.ndarray) -> np.ndarray:
    """The 16 words of each block of 64 bytes, as (len(blocks), 16); the reference for the C and GPU kernels."""
    state = np.empty((16, len(blocks)), np.uint32)
    state[:4], state[4:12] = np.array(_CONSTANTS, np.uint32)[:, None], key[:, None]
    state[12] = (blocks & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    state[13] = np.uint32((step >> 32) << 16) | (blocks >> np.uint64(32)).astype(np.uint32)
    state[14], state[15] = index, step & 0xFFFFFFFF
    return np.ascontiguousarray(_twenty_rounds(state).T)


def _twenty_rounds(state: np.ndarray) -> np.ndarray:
    x = state.copy()
    for _ in range(10):
        for a, b, c, d in _ROUNDS:
            for to, by, rotated, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[to] += x[by]
                x[rotated] ^= x[to]
                x[rotated] = x[rotated] << np.uint32(turn) | x[rotated] >> np.uint32(32 - turn)
    x += state
    return x

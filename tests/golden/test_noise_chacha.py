"""ChaCha20 in numpy and in C: the vectors of RFC 8439, another library's words, the same bits at every address."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hushgrad import noise
from hushgrad.errors import ArgumentError
from hushgrad.noise import _box_muller, _chacha
from hushgrad.noise._chacha import ChaChaStream, chacha_blocks
from hushgrad.noise.source import Source
from hushgrad.noise.table_rows import rows_of

# key, counter, nonce, first and last words of the key stream: RFC 8439, 2.3.2 and appendix A.1, vectors 1 to 5.
ZERO, ONE = bytes(32), bytes(31) + b"\1"
VECTORS = [
    (bytes(range(32)), 1, "000000090000004a00000000", "10f1e7e4d13b5915500fdd1fa32071c4", "b5129cd1de164eb9cbd083e8a2503c4e"),
    (ZERO, 0, "000000000000000000000000", "76b8e0ada0f13d90405d6ae55386bd28", "6a43b8f41518a11cc387b669b2ee6586"),
    (ZERO, 1, "000000000000000000000000", "9f07e7be5551387a98ba977c732d080d", ""),
    (ONE, 1, "000000000000000000000000", "3aeb5224ecf849929b9d828db1ced4dd", ""),
    (b"\0\xff" + bytes(30), 2, "000000000000000000000000", "72d54dfbf12ec44b362692df94137f32", ""),
    (ZERO, 0, "000000000000000000000002", "c2c64d378cd536374ae204b9ef933fcd", ""),
]


def state_of(counter: int, nonce: bytes) -> tuple[int, int, int]:
    """(step, index, block) whose last four words are this counter and nonce."""
    a, index, low = struct.unpack("<3I", nonce)
    return (a >> 16) << 32 | low, index, (a & 0xFFFF) << 32 | counter


def another(key: bytes, step: int, index: int, block: int) -> bytes:
    """One block by another library, started anew: its counter has 32 bits."""
    words = np.array([block & 0xFFFFFFFF, (step >> 32) << 16 | block >> 32, index, step & 0xFFFFFFFF], "<u4")
    return Cipher(algorithms.ChaCha20(key, words.tobytes()), None).encryptor().update(bytes(64))


@pytest.mark.parametrize(("key", "counter", "nonce", "first", "last"), VECTORS)
def test_vectors_of_the_rfc(key, counter, nonce, first, last):
    step, index, block = state_of(counter, bytes.fromhex(nonce))
    words = chacha_blocks(np.frombuffer(key, "<u4"), step, index, np.array([block], np.uint64)).astype("<u4").tobytes()
    assert words.startswith(bytes.fromhex(first)) and words.endswith(bytes.fromhex(last))
    assert words == another(key, step, index, block)


@pytest.mark.parametrize(("step", "index", "first"), [(3, 5, 0), ((1 << 48) - 1, (1 << 32) - 1, (1 << 32) - 1000)])
def test_words_are_another_librarys(step, index, first):
    stream, blocks = ChaChaStream(bytes(range(32)), b"a purpose"), 6400  # 102,400 words, across 2^32
    words = stream.words(step, index, 4 * first, 64 * blocks)
    assert words.astype("<u4").tobytes() == b"".join(another(stream.key, step, index, first + k) for k in range(blocks))
    assert (
        words == chacha_blocks(stream.key_words, step, index, np.arange(first, first + blocks, dtype=np.uint64)).ravel()
    ).all()


def test_purposes_and_ciphers_have_keys_of_their_own():
    key = bytes(32)
    words = {Source(key=key, cipher=cipher)._stream.key for cipher in ("aes256", "chacha20")}
    assert len(words) == 2 and ChaChaStream(key, b"one").key != ChaChaStream(key, b"two").key


@pytest.mark.parametrize("offset", [0, 77, (1 << 40) + 77, (1 << 32) * 256 // 24 + 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_the_houses_transform_of_the_words(offset, dtype):
    source, n, step = Source(seed=3, cipher="chacha20"), 700, (5 << 32) + 9
    first, last = offset // 256, -(-(offset + n) // 256)
    words = chacha_blocks(source._stream.key_words, step, 4, np.arange(24 * first, 24 * last, dtype=np.uint64)).reshape(-1)
    z = np.empty((last - first) * 256, torch.empty(0, dtype=dtype).numpy().dtype)
    _box_muller.gaussians(words, z)
    assert (
        source.z(step, 4, torch.empty(n, dtype=dtype), offset=offset).numpy().tobytes() == z[offset - 256 * first :][:n].tobytes()
    )


@pytest.mark.parametrize(
    "mechanism", [noise.Independent(), noise.BLT(buffers=2), noise.Banded(bands=3), noise.Tree(), noise.Nu()], ids=repr
)
def test_every_mechanism_draws_the_same_rows_without_the_library(mechanism, monkeypatch):
    from hushgrad.events import Once

    fixed = mechanism.resolved(steps=5, participation=Once())
    likes = [torch.empty(300), torch.empty(7, dtype=torch.float64)]

    def rows() -> list[bytes]:
        stream = fixed.stream(Source(seed=1, cipher="chacha20"), steps=5)
        return [row.numpy().tobytes() for t in range(5) for row in stream.rows(t, likes)]

    expected = rows()
    monkeypatch.setattr(_chacha, "_LIBRARY", None)
    assert rows() == expected


def test_scattered_rows_of_a_table():
    for cipher in ("aes256", "chacha20"):
        source, ids = Source(seed=1, cipher=cipher), torch.tensor([7, 2, 3, 90])
        assert torch.equal(rows_of(source, 3, 0, ids, 4), source.z(3, 0, torch.empty(100, 4))[ids])


def test_refusals():
    with pytest.raises(ArgumentError, match="one of 'aes256', 'chacha20'"):
        Source(seed=1, cipher="rot13")
    with pytest.raises(ArgumentError, match="secure"):
        Source(seed=1, cipher="chacha20", secure=True)

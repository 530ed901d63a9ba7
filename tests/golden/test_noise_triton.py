"""The Triton kernel, interpreted: cipher words, Gaussians, recursions and every type have the bits of numpy, and of another library."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

pytest.importorskip("triton", reason="an optional extra: pip install 'hushgrad[triton]'")
_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"  # asked when a kernel is defined
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from hushgrad.noise import triton_kernel  # noqa: E402
from hushgrad.noise._chacha import ChaChaStream  # noqa: E402
from hushgrad.noise.device_noise import Target, Turn, reference_row  # noqa: E402


@triton.jit
def _words(out, key, first, index, step, BLOCKS: tl.constexpr):
    """Cipher blocks first, first + 1, ... by the kernel's own function."""
    at = tl.arange(0, BLOCKS)
    made = triton_kernel.chacha(
        key, tl.load(first) + at.to(tl.int64), tl.load(index), tl.load(step), tl.full((BLOCKS,), 0, tl.uint32)
    )
    for w in tl.static_range(16):
        tl.store(out + at * 16 + w, made[w])


if _before is None:
    del os.environ["TRITON_INTERPRET"]
else:
    os.environ["TRITON_INTERPRET"] = _before

FAR = (1 << 40) + 77  # beyond 2^32 numbers
STREAM = ChaChaStream(bytes(range(32)), b"hushgrad chacha")
BLT = Turn((5 << 32) + 9, weights=(-0.5, -0.3), rows=(0, 1), decay=(0.99, 0.5))
TURNS = {
    "blt": BLT,
    "banded": Turn(7, weights=(-0.375, -0.5), rows=(1, 0), divisor=1.1, keep=1),
    "tree": Turn(65, weights=(-1.0,), rows=(0,), keep=1, keeps_z=True),
    "filter": Turn((1 << 47) + 3, weights=(0.25, -0.5), rows=(0, 1), last=True, own=0.7, keep=0, keeps_z=True),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


def drawn(
    turn: Turn, dtype: torch.dtype, sizes: dict[int, int], *, state: int = 0, fresh: bool = False, tile: int = 4
) -> tuple[bytes, bytes]:
    """The bytes of all targets and states after one launch, and what the reference gives; ``sizes`` by offset."""
    g = torch.Generator().manual_seed(0)
    real = torch.float64 if dtype is torch.float64 else torch.float32
    flat = torch.randn(sum(sizes.values()), generator=g).to(dtype)
    outs, states = flat.split(list(sizes.values())), [torch.randn(state, n, generator=g).to(real) for n in sizes.values()]
    wanted, kept = [out.to(real) for out in outs], [rows.clone() for rows in states]
    for k, (offset, want) in enumerate(zip(sizes, wanted, strict=True)):
        rows = kept[k].numpy() if state else None
        reference_row(STREAM, turn, want.numpy(), rows, (10 + k, offset), 0.7, fresh=fresh)
    targets = [
        Target(out, rows if state else None, 10 + k, offset)
        for k, (offset, out, rows) in enumerate(zip(sizes, outs, states, strict=True))
    ]
    triton_kernel.TritonKernel(tile).row(STREAM, turn, targets, 0.7, fresh=fresh)
    whole = torch.cat([want.to(dtype) for want in wanted])
    return _bytes([flat, *states]), _bytes([whole, *kept])


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t.numel())


def test_two_tensors_in_one_launch_with_their_states():
    made, expected = drawn(BLT, torch.float32, {0: 257, FAR: 5}, state=2)
    assert made == expected


def test_words_are_another_librarys_by_the_hundred_thousand():
    first, index, step, blocks = (1 << 32) - 1000, (1 << 32) - 5, (1 << 47) + 12345, 8192  # 131,072 words
    out = torch.empty(16 * blocks, dtype=torch.int32).view(torch.uint32)
    facts = [torch.tensor([value]) for value in (first, index, step)]
    _words[(1,)](out, torch.from_numpy(STREAM.key_words), *facts, BLOCKS=blocks)
    ours = out.numpy().reshape(blocks, 16)
    for block in range(0, blocks, 1):
        at = first + block
        state = np.array([at & 0xFFFFFFFF, (step >> 32) << 16 | at >> 32, index, step & 0xFFFFFFFF], "<u4")
        theirs = Cipher(algorithms.ChaCha20(STREAM.key, state.tobytes()), None).encryptor().update(bytes(64))
        assert ours[block].tobytes() == theirs, block


def test_the_vector_of_the_rfc():
    key = torch.from_numpy(np.frombuffer(bytes(range(32)), np.uint32).copy())
    # Counter 1, nonce 00000009 0000004a 00000000, as words 12 to 15: block = 0x0000_00000001 + (word 13 mod 2^16) 2^32, and so on.
    word = int.from_bytes(bytes.fromhex("00000009"), "little")
    facts = [(word & 0xFFFF) << 32 | 1, int.from_bytes(bytes.fromhex("0000004a"), "little"), (word >> 16) << 32]
    out = torch.empty(16, dtype=torch.int32).view(torch.uint32)
    _words[(1,)](out, key, *[torch.tensor([fact]) for fact in facts], BLOCKS=1)
    assert out.numpy().tobytes().hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e")


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_type_odd_sizes_and_far_offsets(dtype, fresh):
    made, expected = drawn(Turn((5 << 32) + 9), dtype, {0: 1, FAR: 257, (1 << 32) * 256 // 24 + 100: 513}, fresh=fresh)
    assert made == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TURNS)
def test_recursions(name, dtype):
    made, expected = drawn(TURNS[name], dtype, {3: 300, FAR: 5}, state=2)
    assert made == expected


@pytest.mark.slow
def test_a_hundred_thousand_numbers():
    made, expected = drawn(Turn((1 << 40) + 3), torch.float32, {(1 << 45) + 123: 100_001}, tile=128)
    assert made == expected


@pytest.mark.slow
def test_compiled_for_a_device_nothing_is_contracted():
    """PTX needs no device. A fused multiply-add has other bits, which the interpreter cannot show."""
    program = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hushgrad.noise import triton_kernel
names = [p.name for p in triton_kernel.noise_row.params]
given = dict(TERMS=0, LAST=False, DIVIDE=False, KEEPS=0, KIND=0, FRESH=False, TILE=4)
kinds = dict(out_base="*fp32", state_base="*fp32", key="*u32", series="*fp32", tile_target="*i32", tile_group="*i64", table="*i64",
             facts="*fp32", rows="*i64", scales="*fp32", step_high="i32", step_low="i32", keep="i32", **dict.fromkeys(given, "constexpr"))
source = ASTSource(fn=triton_kernel.noise_row, signature=kinds, constexprs={(names.index(k),): v for k, v in given.items()})
made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})
print(made.asm["ptx"])
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ptx = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment).stdout
    assert "mul" in ptx and not re.search(r"\bfma\.", ptx) and "bar.sync" not in ptx

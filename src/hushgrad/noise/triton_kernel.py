"""ChaCha20, Box-Muller and the recursions of correlated noise as one Triton kernel.

A group of 256 numbers comes from 24 cipher blocks. Lane l of eight makes the blocks l, 8 + l, 16 + l of a group, and so has all three words
of its 16 pairs in its own registers: nothing is exchanged between lanes, and the numbers are the processor's, bit for bit. That needs
``enable_fp_fusion=False``: a product and a sum that are contracted to one rounding give other bits.

The key lies in the device's memory, never among a launch's arguments, whose values end up in caches on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hushgrad.noise import _box_muller
from hushgrad.noise._chacha import ChaChaStream
from hushgrad.noise.device_noise import DeviceKernel, Target, Turn

GROUP = _box_muller.GROUP
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@triton.jit
def _rotated(x, n: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x << n) | (x >> (32 - n))


@triton.jit
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def chacha(key, block, index, step, z):  # type: ignore[no-untyped-def]
    """The 16 words of cipher block ``block`` (int64), each a vector of lanes."""
    k0 = z + tl.load(key)
    k1 = z + tl.load(key + 1)
    k2 = z + tl.load(key + 2)
    k3 = z + tl.load(key + 3)
    k4 = z + tl.load(key + 4)
    k5 = z + tl.load(key + 5)
    k6 = z + tl.load(key + 6)
    k7 = z + tl.load(key + 7)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = z + (((step >> 32) << 16) | (block >> 32)).to(tl.uint32)
    c2 = z + index.to(tl.uint32)
    c3 = z + (step & 0xFFFFFFFF).to(tl.uint32)
    x0 = z + 0x61707865
    x1 = z + 0x3320646E
    x2 = z + 0x79622D32
    x3 = z + 0x6B206574
    x4, x5, x6, x7, x8, x9, x10, x11 = k0, k1, k2, k3, k4, k5, k6, k7
    x12, x13, x14, x15 = c0, c1, c2, c3
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + 0x61707865, x1 + 0x3320646E, x2 + 0x79622D32, x3 + 0x6B206574, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + c0, x13 + c1, x14 + c2, x15 + c3,
    )  # fmt: skip


@triton.jit
def _horner(x, series, first: tl.constexpr, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """The polynomial whose coefficients lie from ``first`` on, highest first."""
    total = x * 0.0 + tl.load(series + first)
    for k in tl.static_range(1, count):
        total = total * x + tl.load(series + first + k)
    return total


@triton.jit
def pair(a, b, t, series, DOUBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Box-Muller, operation for operation as in _box_muller.py."""
    if DOUBLE:
        real: tl.constexpr = tl.float64
        bits: tl.constexpr = tl.int64
        mantissa: tl.constexpr = 52
        bias: tl.constexpr = 1023
        logs: tl.constexpr = 21
        sines: tl.constexpr = 8
        cosines: tl.constexpr = 9
    else:
        real: tl.constexpr = tl.float32  # type: ignore[no-redef]
        bits: tl.constexpr = tl.int32  # type: ignore[no-redef]
        mantissa: tl.constexpr = 23  # type: ignore[no-redef]
        bias: tl.constexpr = 127  # type: ignore[no-redef]
        logs: tl.constexpr = 10  # type: ignore[no-redef]
        sines: tl.constexpr = 5  # type: ignore[no-redef]
        cosines: tl.constexpr = 5  # type: ignore[no-redef]
    ln2 = tl.load(series + logs + sines + cosines)
    v = (a & 0x7FFFFFFF).to(tl.int32).to(real) * (2.0**-32)
    v = v + ((b >> 1).to(tl.int32).to(real) + 0.5) * (2.0**-63)
    upper = (a >> 31) != 0
    pattern = v.to(bits, bitcast=True)
    fraction = ((pattern & ((1 << mantissa) - 1)) | ((bias - 1) << mantissa)).to(real, bitcast=True) - 1.0
    halvings = tl.where(upper, 0, (bias - 1) - (pattern >> mantissa)).to(real) * ln2
    f = tl.where(upper, -v, fraction)
    e = _horner(f, series, 0, logs) * (-f) + halvings
    r = tl.sqrt_rn(e + e) if not DOUBLE else tl.sqrt(e + e)
    s = ((t << 2) | 2).to(tl.int32).to(real) * (2.0**-31)
    q = s * s
    sine = _horner(q, series, logs, sines) * s
    cosine = _horner(q, series, logs + sines, cosines)
    cosine = tl.where((t >> 31) != 0, -cosine, cosine)
    swap = ((t >> 30) & 1) != 0
    return r * tl.where(swap, sine, cosine), r * tl.where(swap, cosine, sine)


@triton.jit
def _combined(z, i, mask, size, state, facts, rows, TERMS: tl.constexpr, LAST: tl.constexpr, DIVIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The x of a turn; ``facts`` are the weights, then the factor of z, then the divisor."""
    x = z * 0.0 if LAST else z
    for h in tl.static_range(TERMS):
        kept = tl.load(state + tl.load(rows + h) * size + i, mask=mask, other=0.0)
        x = x + kept * tl.load(facts + h)
    if LAST:
        x = x + z * tl.load(facts + TERMS)
    if DIVIDE:
        divisor = tl.load(facts + TERMS + 1) + x * 0.0
        x = tl.div_rn(x, divisor) if x.dtype == tl.float32 else x / divisor
    return x


@triton.jit
def _put(x, i, mask, out, scale, KIND: tl.constexpr, FRESH: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x * scale
    if KIND == 1:  # rounded to nearest even by integers: the interpreter's own cast cuts
        to = out.to(tl.pointer_type(tl.uint16))
        if not FRESH:
            x = (tl.load(to + i, mask=mask, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True) + x
        u = x.to(tl.uint32, bitcast=True)
        tl.store(to + i, ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.uint16), mask=mask)
    elif KIND == 2:
        half = out.to(tl.pointer_type(tl.float16))
        if not FRESH:
            x = tl.load(half + i, mask=mask, other=0.0).to(tl.float32) + x
        tl.store(half + i, x.to(tl.float16), mask=mask)
    else:
        full = out.to(tl.pointer_type(x.dtype))
        if not FRESH:
            x = tl.load(full + i, mask=mask, other=0.0) + x
        tl.store(full + i, x, mask=mask)


@triton.jit
def _finish(
    z, i, size, out, state, facts, rows, scale, keep,
    TERMS: tl.constexpr, LAST: tl.constexpr, DIVIDE: tl.constexpr, KEEPS: tl.constexpr, KIND: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip  # type: ignore[no-untyped-def]
    """Apply the recursion to one number of each lane and store the result."""
    mask = (i >= 0) & (i < size)
    x = _combined(z, i, mask, size, state, facts, rows, TERMS, LAST, DIVIDE)
    if KEEPS == 1:
        tl.store(state + keep * size + i, x, mask=mask)
    elif KEEPS == 2:
        tl.store(state + keep * size + i, z, mask=mask)
    elif KEEPS == 3:
        for j in tl.static_range(TERMS):
            kept = tl.load(state + j * size + i, mask=mask, other=0.0)
            tl.store(state + j * size + i, kept * tl.load(facts + TERMS + 2 + j) + x, mask=mask)
    _put(x, i, mask, out, scale, KIND, FRESH)


@triton.jit(do_not_specialize=["step_high", "step_low", "keep"])
def noise_row(
    out_base, state_base, key, series, tile_target, tile_group, table, facts, rows, scales, step_high, step_low, keep,
    TERMS: tl.constexpr, LAST: tl.constexpr, DIVIDE: tl.constexpr, KEEPS: tl.constexpr, KIND: tl.constexpr, FRESH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip  # type: ignore[no-untyped-def]
    """Row k of ``table``: bytes from the bases to a target and to its state, its size, offset and index."""
    pid = tl.program_id(0)
    step = (step_high.to(tl.int64) << 31) | step_low.to(tl.int64)
    row = table + 5 * tl.load(tile_target + pid)
    out = out_base.to(tl.int64) + tl.load(row)
    state_at = state_base.to(tl.int64) + tl.load(row + 1)
    size = tl.load(row + 2)
    offset = tl.load(row + 3)
    index = tl.load(row + 4)
    DOUBLE: tl.constexpr = KIND == 3
    if DOUBLE:
        state = state_at.to(tl.pointer_type(tl.float64))
    else:
        state = state_at.to(tl.pointer_type(tl.float32))
    lane = tl.arange(0, 8 * TILE)
    group = tl.load(tile_group + pid) + (lane // 8).to(tl.int64)  # int64: a shard may begin beyond 2^32
    own = lane % 8
    zero = tl.full((8 * TILE,), 0, tl.uint32)
    scale = tl.load(scales)
    A = chacha(key, group * 24 + own, index, step, zero)
    B = chacha(key, group * 24 + 8 + own, index, step, zero)
    T = chacha(key, group * 24 + 16 + own, index, step, zero)
    first = group * 256 - offset + own * 16
    for w in tl.static_range(16):
        x, y = pair(A[w], B[w], T[w], series, DOUBLE)
        _finish(x, first + w, size, out, state, facts, rows, scale, keep, TERMS, LAST, DIVIDE, KEEPS, KIND, FRESH)
        _finish(y, first + 128 + w, size, out, state, facts, rows, scale, keep, TERMS, LAST, DIVIDE, KEEPS, KIND, FRESH)


class TritonKernel(DeviceKernel):
    """Serves CUDA devices; under ``TRITON_INTERPRET=1`` also main memory, slowly, so that its bits can be tested anywhere.

    ``tile``: groups of 256 numbers for each program.
    """

    def __init__(self, tile: int = 4) -> None:
        self._tile = tile
        self._keys: WeakKeyDictionary[ChaChaStream, Tensor] = WeakKeyDictionary()  # weak, so that a key does not outlive its run

    def row(self, stream: ChaChaStream, turn: Turn, targets: Sequence[Target], scale: float | Tensor, *, fresh: bool) -> None:
        """``out = scale x`` if fresh, else ``out += scale x``: one launch for each type of target."""
        for dtype in dict.fromkeys(target.out.dtype for target in targets):
            self._launch(stream, turn, [target for target in targets if target.out.dtype is dtype], scale, fresh=fresh)

    def _launch(self, stream: ChaChaStream, turn: Turn, targets: list[Target], scale: float | Tensor, *, fresh: bool) -> None:
        out, state = targets[0].out, targets[0].state
        real = torch.float64 if out.dtype is torch.float64 else torch.float32
        bases = out.data_ptr(), 0 if state is None else state.data_ptr()
        starts = [(t.out.data_ptr() - bases[0], 0 if t.state is None else t.state.data_ptr() - bases[1]) for t in targets]
        layout = tuple((*start, t.out.numel(), t.offset, t.index) for start, t in zip(starts, targets, strict=True))
        tiles, groups, table = _tiles(layout, self._tile, out.device)
        terms = turn.weights if state is not None else ()
        factors = _numbers((*terms, turn.own, turn.divisor, *turn.decay), real, out.device)
        keeps = 0 if state is None else 3 if turn.decay else 0 if turn.keep < 0 else 2 if turn.keeps_z else 1
        noise_row[(len(tiles),)](
            out, out if state is None else state, self._key(stream, out.device), _series(real, out.device), tiles, groups, table,
            factors, _numbers(turn.rows or (0,), torch.int64, out.device), _scale(scale, real, out.device),
            turn.step >> 31, turn.step & 0x7FFFFFFF, max(0, turn.keep),
            TERMS=len(terms), LAST=turn.last, DIVIDE=turn.divisor != 1.0, KEEPS=keeps, KIND=KINDS[out.dtype], FRESH=fresh,
            TILE=self._tile, enable_fp_fusion=False,
        )  # fmt: skip

    def _key(self, stream: ChaChaStream, device: torch.device) -> Tensor:
        found = self._keys.get(stream)
        if found is None or found.device != device:
            words = torch.from_numpy(np.frombuffer(stream.key, np.int32).copy())
            found = self._keys[stream] = words.to(device).view(torch.uint32)
        return found


# What is copied to the device once, not in every step -------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _tiles(layout: tuple[tuple[int, ...], ...], tile: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Which target and which group each program begins with, and the table of the targets."""
    targets, groups = [], []
    for k, (_, _, size, offset, _) in enumerate(layout):
        for group in range(offset // GROUP, -(-(offset + size) // GROUP), tile):
            targets.append(k)
            groups.append(group)
    starts = torch.tensor(targets, dtype=torch.int32), torch.tensor(groups, dtype=torch.int64)
    return starts[0].to(device), starts[1].to(device), torch.tensor(layout, dtype=torch.int64).to(device)


@lru_cache(maxsize=1024)
def _numbers(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


@lru_cache(maxsize=8)
def _series(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All coefficients, highest first, and ln 2."""
    single = dtype is torch.float32
    forms: Any = _box_muller
    names = ("LOG32", "SIN32", "COS32") if single else ("LOG64", "SIN64", "COS64")
    return torch.tensor([c for name in names for c in reversed(vars(forms)[name])] + [0.6931471805599453], dtype=dtype).to(device)


def _scale(scale: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return scale.to(dtype).reshape(1) if isinstance(scale, Tensor) else _numbers((float(scale),), dtype, device)

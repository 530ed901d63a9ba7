"""Every vector width that the processor has gives numpy's bits, in every kernel that has a copy of its own for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import native
from hushgrad.noise import _box_muller, _kernel
from hushgrad.noise._aes_ctr import KeyStream

pytestmark = [
    pytest.mark.skipif(_kernel.KERNEL.name != "c", reason="the C kernel is not built here"),
    pytest.mark.usefixtures("vector_bytes"),
]
REAL = [np.float32, np.float64]
STREAM = KeyStream(bytes(range(32)), b"widths")


def same_bits(work, *arrays):
    """Whether ``work(kernel, *copies)`` does the same to every bit of the arrays with the C kernel and with numpy."""
    results = []
    for kernel in (_kernel.KERNEL, _kernel.NumpyKernel()):
        copies = [array.copy() for array in arrays]
        work(kernel, *copies)
        results.append(b"".join(copy.tobytes() for copy in copies))
    return results[0] == results[1]


def normal(seed, *shape, real):
    return np.random.default_rng(seed).normal(size=shape).astype(real)


@pytest.mark.parametrize("library", ["EXACT", "CONTRACTED"])
def test_the_widest_vectors_are_chosen_by_themselves(library, vector_bytes):
    found = getattr(native, library)
    assert found.vectors(0) == 16
    assert found.vectors(vector_bytes + 15) == vector_bytes  # and once more, for the tests to come
    loaded = "import ctypes, sys; print(ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), 'hushgrad_bytes').value)"
    at_first = subprocess.run([sys.executable, "-c", loaded, found.file], check=True, capture_output=True, text=True).stdout
    assert int(at_first) >= vector_bytes


@pytest.mark.parametrize("real", REAL)
def test_gaussians_of_every_group(real):
    words = np.random.default_rng(5).integers(0, 1 << 32, 9 * 3 * _box_muller.PAIRS, dtype=np.uint32)
    words[::97], words[1::97] = 0, 0xFFFFFFFF  # the ends of every interval
    assert same_bits(lambda kernel, out: kernel.gaussians(words, out), np.empty(9 * _box_muller.GROUP, real))


sizes = st.one_of(st.integers(0, 70), st.integers(1020, 1100), st.just(2500))


@settings(max_examples=40, deadline=None)
@given(real=st.sampled_from(REAL), size=sizes, fresh=st.booleans(), buffers=st.integers(1, 6), shift=st.integers(0, 3))
def test_emitting_and_buffers_at_every_size_and_place(real, size, fresh, buffers, shift):
    z, out, state = normal(1, size, real=real), normal(2, size, real=real), normal(3, buffers, size + 5, real=real)
    decay, weight = np.random.default_rng(4).uniform(size=(2, buffers)).astype(real)

    def work(kernel, z, out, state):
        row = _kernel.BufferedRow(state[:, shift : shift + size], decay, weight, 0.3)
        kernel.buffers(z, row, out, fresh)
        kernel.emit(z, 0.7, out, fresh)

    assert same_bits(work, z, out, state)


@settings(max_examples=40, deadline=None)
@given(real=st.sampled_from(REAL), size=sizes, rows=st.integers(1, 18), parts=st.integers(0, 19), shift=st.integers(0, 3))
def test_combinations_and_substitutions_at_every_size_and_place(real, size, rows, parts, shift):
    weights, history = normal(1, rows, parts, real=real), normal(2, parts, size + 1, real=real)[:, 1:]
    inner, diagonal = np.tril(normal(3, rows, rows, real=real), -1), np.abs(normal(4, rows, real=real)) + real(0.5)
    diagonal[::2] = 1  # which is not divided by

    def work(kernel, x):
        kernel.combine(weights, list(history), x[:, shift : shift + size])
        kernel.solve(inner, diagonal, x[:, shift : shift + size])

    assert same_bits(work, normal(5, rows, size + 3, real=real))


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("cipher", [1, 2, 4])
@pytest.mark.parametrize(("start", "size"), [(255, 2), (3, 2500), (512, 1024)])
def test_numbers_drawn_and_worked_on_in_one_call(real, cipher, start, size, monkeypatch):
    if cipher > _kernel.KERNEL.cipher:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(_kernel.KERNEL, "cipher", cipher)
    at, history = (2**40 + 1, 2**31 + 7, start), normal(1, 9, size, real=real)
    weights, inner, diagonal = normal(2, 16, 9, real=real), np.tril(normal(3, 16, 16, real=real), -1), np.full(16, 1.5, real)

    def work(kernel, out, kept, sums, state):
        kernel.draw(STREAM, *at, 0.3, out, False)
        kernel.draw_buffers(STREAM, at, _kernel.BufferedRow(state, diagonal[:4], diagonal[4:8], 0.3), out, False)
        kernel.draw_solutions(STREAM, at, _kernel.SolvedRows(weights, list(history), inner, diagonal, list(kept), 0.3), out, True)
        kernel.draw_combinations(STREAM, at, weights, sums)

    rows = [normal(k, *shape, real=real) for k, shape in enumerate([(size,), (16, size), (16, size), (4, size)])]
    assert same_bits(work, *rows)


def test_one_rounding_too_few_would_be_seen():
    """A fused multiply-add is the likeliest way to other bits: it keeps what a product's rounding drops."""
    weights, parts = normal(1, 8, 8, real=np.float32), normal(2, 8, 256, real=np.float32)

    def work(kernel, x):
        if isinstance(kernel, _kernel.CKernel):
            for part, weight in zip(parts, weights.T, strict=True):
                x[:] = (x.astype(np.float64) + np.outer(weight, part.astype(np.float64))).astype(np.float32)
        else:
            kernel.combine(weights, list(parts), x)

    assert not same_bits(work, np.zeros((8, 256), np.float32))

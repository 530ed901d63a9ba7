"""The source is a pure function of (key, step, tensor, offset), whatever computes it."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.errors import ArgumentError
from hushgrad.noise import _box_muller, _kernel, _threads
from hushgrad.noise._aes_ctr import KeyStream
from hushgrad.noise.source import Source

KEY = bytes(range(32))
REAL = [np.float32, np.float64]
needs_c = pytest.mark.skipif(_kernel.KERNEL.name != "c", reason="the C kernel is not built here")


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3000), st.integers(1, 1500), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_shard_has_the_bits_of_the_whole(offset, size, dtype):
    source = Source(KEY)
    whole = source.z(5, 9, torch.empty(4500, dtype=dtype))
    shard = source.z(5, 9, torch.empty(size, dtype=dtype), offset=offset)
    assert torch.equal(shard, whole[offset : offset + size])


def test_the_number_of_threads_does_not_matter():
    size, threads = 5 * _threads.CHUNK + 77, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = Source(KEY).z(0, 0, torch.empty(size))
        torch.set_num_threads(3)
        assert torch.equal(Source(KEY).z(0, 0, torch.empty(size)), one)
    finally:
        torch.set_num_threads(threads)


def test_concurrent_draws_do_not_disturb_one_another():
    source, size = Source(KEY), 3 * _threads.CHUNK
    alone = [source.z(t, 0, torch.empty(size)) for t in range(4)]
    together: dict[int, torch.Tensor] = {}
    workers = [threading.Thread(target=lambda t=t: together.update({t: source.z(t, 0, torch.empty(size))})) for t in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(together[t], alone[t]) for t in range(4))


def test_step_tensor_key_and_seed_all_matter():
    def head(source, step=0, index=0):
        return tuple(source.z(step, index, torch.empty(4)).tolist())

    sources = [Source(KEY), Source(bytes(32)), Source(seed=0), Source(seed=1), Source(seed=-1), Source(), Source()]
    drawn = [head(s) for s in sources] + [head(sources[0], step=1), head(sources[0], index=1), head(sources[0], step=2**40)]
    assert len(set(drawn)) == len(drawn)
    assert head(Source(KEY)) == head(Source(KEY)) and head(Source(seed=5)) == head(Source(seed=5))


def test_dtype_rule():
    source = Source(KEY)
    single, double = source.z(0, 0, torch.empty(4096)), source.z(0, 0, torch.empty(4096, dtype=torch.float64))
    assert torch.equal(source.z(0, 0, torch.empty(4096, dtype=torch.bfloat16)), single.bfloat16())
    assert torch.equal(source.z(0, 0, torch.empty(4096, dtype=torch.float16)), single.half())
    assert ((single.double() - double).abs() / double.abs()).max() < 1e-6
    assert not torch.equal(single.double(), double)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7, 5), (3, 0)])
def test_out_and_scale(dtype, shape):
    source = Source(KEY)
    like = torch.ones(shape, dtype=dtype)
    accurate = torch.float64 if dtype == torch.float64 else torch.float32
    z = source.z(1, 2, like.to(accurate)) * 0.3
    assert torch.equal(source.z(1, 2, like, scale=0.3), z.to(dtype))
    out = like.clone()
    assert source.z(1, 2, like, out=out, scale=0.3) is out
    assert torch.equal(out, (like.to(accurate) + z).to(dtype))


def test_memory_layout_is_the_logical_order():
    source = Source(KEY)
    plain = source.z(0, 0, torch.empty(6, 4))
    transposed = torch.zeros(4, 6).t()
    source.z(0, 0, transposed, out=transposed)
    assert torch.equal(transposed, plain)
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    assert torch.equal(source.z(0, 0, parameter, out=parameter), plain)


@needs_c
@pytest.mark.parametrize("real", REAL)
def test_c_and_numpy_give_the_same_bits(real, monkeypatch):
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 32, 40 * 3 * _box_muller.PAIRS, dtype=np.uint32)
    edges = np.array([0, 1, 2, 3, 0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, 0x80000000, 0xBFFFFFFF, 0xC0000000, 0xFFFFFFFF], np.uint32)
    words[: 3 * _box_muller.PAIRS * 20] = rng.choice(edges, 3 * _box_muller.PAIRS * 20)
    a, b = np.empty((2, 40 * _box_muller.GROUP), real)
    _kernel.KERNEL.gaussians(words, a)
    _kernel.NumpyKernel().gaussians(words, b)
    assert a.tobytes() == b.tobytes()


@needs_c
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("n", [1, 31, 1500])
def test_the_other_kernels_agree_too(real, n):
    rng = np.random.default_rng(n)

    def both(operation):
        results = []
        for kernel in (_kernel.KERNEL, _kernel.NumpyKernel()):
            x, state, out = (np.random.default_rng(n).normal(size=s).astype(real) for s in ((9, n), (3, n), (5, n)))
            operation(kernel, x, state, out)
            results.append(x.tobytes() + state.tobytes() + out.tobytes())
        assert results[0] == results[1]

    weights, inner = rng.normal(size=(5, 9)).astype(real), np.tril(rng.normal(size=(9, 9)), -1).astype(real)
    weights[2, 3] = 0
    decay, weight, diagonal = (rng.uniform(size=k).astype(real) for k in (3, 3, 9))
    diagonal[4] = 1
    both(lambda k, x, state, out: k.combine(weights, list(x), out))
    both(lambda k, x, state, out: k.solve(inner, diagonal, x))
    both(lambda k, x, state, out: k.combine(weights[:2, :3], list(x[:3]), out[1:3]))
    both(lambda k, x, state, out: k.buffers(x[0], _kernel.BufferedRow(state, decay, weight, 0.3), out[0], True))
    both(lambda k, x, state, out: k.buffers(x[0], _kernel.BufferedRow(state, decay, weight, 0.3), out[0], False))
    both(lambda k, x, state, out: k.emit(x[0], 0.1, out[0], True))
    both(lambda k, x, state, out: k.emit(x[0], 0.1, out[0], False))


@needs_c
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("cipher", [0, 1, 2, 4])
@pytest.mark.parametrize(("start", "size"), [(0, 1), (255, 2), (256, 5000), (10**9 + 3, 2047), (7, 0), (100, 2 * _threads.CHUNK)])
def test_every_cipher_gives_the_same_bits(real, cipher, start, size, monkeypatch):
    kernel = _kernel.KERNEL
    assert isinstance(kernel, _kernel.CKernel)
    if cipher > kernel.cipher:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(kernel, "cipher", cipher)
    stream, before = KeyStream(KEY, b"test"), np.random.default_rng(size).normal(size=size).astype(real)
    for fresh in (True, False):
        ours, theirs = before.copy(), before.copy()
        kernel.draw(stream, 2**40 + 1, 2**31 + 7, start, 0.3, ours, fresh)
        _kernel.NumpyKernel().draw(stream, 2**40 + 1, 2**31 + 7, start, 0.3, theirs, fresh)
        assert ours.tobytes() == theirs.tobytes()


@needs_c
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("cipher", [0, 1, 2, 4])
@pytest.mark.parametrize("buffers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("start", "size"), [(0, 1), (255, 2), (3, 2 * 2048 + 300), (512, 1024), (_threads.CHUNK - 5, 777)])
def test_buffered_rows_have_the_same_bits_however_they_are_drawn(real, cipher, buffers, start, size, monkeypatch):
    kernel = _kernel.KERNEL
    assert isinstance(kernel, _kernel.CKernel)
    if cipher > kernel.cipher:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(kernel, "cipher", cipher)
    rng, stream = np.random.default_rng(size), KeyStream(KEY, b"test")
    before, state = rng.normal(size=size).astype(real), rng.normal(size=(buffers, size + 3)).astype(real)
    decay, weight = rng.uniform(size=(2, buffers)).astype(real)
    for fresh in (True, False):
        results = []
        for k in (kernel, _kernel.NumpyKernel()):
            out, kept = before.copy(), state.copy()
            row = _kernel.BufferedRow(kept[:, 1 : size + 1], decay, weight, 0.3)
            k.draw_buffers(stream, (2**40 + 1, 2**31 + 7, start), row, out, fresh)
            results.append(out.tobytes() + kept.tobytes())
        assert results[0] == results[1]


@needs_c
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("cipher", [0, 1, 2, 4])
@pytest.mark.parametrize(("start", "size"), [(0, 1), (255, 2), (3, 2500), (512, 1024)])
@pytest.mark.parametrize(("rows", "older"), [(1, 0), (3, 5), (16, 63), (17, 9)])
def test_rows_drawn_and_solved_together_have_the_same_bits(real, cipher, start, size, rows, older, monkeypatch):
    kernel = _kernel.KERNEL
    assert isinstance(kernel, _kernel.CKernel)
    if cipher > kernel.cipher:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(kernel, "cipher", cipher)
    rng, stream, at = np.random.default_rng(size), KeyStream(KEY, b"test"), (2**40 + 1, 2**31 + 7, start)
    weights, history = rng.normal(size=(rows, older)).astype(real), rng.normal(size=(older, size)).astype(real)
    inner, diagonal = np.tril(rng.normal(size=(rows, rows)), -1).astype(real), rng.uniform(1, 2, rows).astype(real)
    table = rng.normal(size=(rows, older + rows)).astype(real)
    table[:, :9] = 0  # a stretch that need not be drawn
    for fresh in (True, False):
        results = []
        for k in (kernel, _kernel.NumpyKernel()):
            out, kept, sums = np.ones(size, real), np.zeros((rows, size), real), np.ones((rows, size + 1), real)
            k.draw_solutions(stream, at, _kernel.SolvedRows(weights, list(history), inner, diagonal, list(kept), 0.3), out, fresh)
            k.draw_combinations(stream, at, table, sums[:, 1:])
            results.append(out.tobytes() + kept.tobytes() + sums.tobytes())
        assert results[0] == results[1]


@pytest.mark.parametrize("kernel", ["numpy", "chosen"])
@pytest.mark.parametrize("secure", [False, True])
def test_many_tensors_in_one_call_have_the_bits_of_single_calls(kernel, secure, monkeypatch):
    if kernel == "numpy":
        monkeypatch.setattr(_kernel, "KERNEL", _kernel.NumpyKernel())
    source, threads = Source(KEY, secure=secure), torch.get_num_threads()
    shapes = [(3,), (), (0,), (257, 4), (1000,), (_threads.SHARE + 5,) if not secure else (7,), (2, 3)]
    types = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16]
    likes = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
    likes.append(torch.ones(4, 6).t())
    indices, offsets = [5, 2, 9, 0, 2**32 - 1, 7, 1, 3], [0, 3, 1, 255, 256, 10**6, 12, 1]
    single = [source.z(4, i, x, offset=o, scale=0.3) for i, o, x in zip(indices, offsets, likes, strict=True)]
    sums = [source.z(4, i, x, offset=o, out=x.clone(), scale=0.3) for i, o, x in zip(indices, offsets, likes, strict=True)]
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            together = source.z_all(4, likes, indices=indices, offsets=offsets, scale=0.3)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(together, single, strict=True))
            out = [x.clone() for x in likes]
            added = source.z_all(4, likes, indices=indices, offsets=offsets, out=out, scale=0.3)
            assert all(a is b for a, b in zip(added, out, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(added, sums, strict=True))
    finally:
        torch.set_num_threads(threads)
    plain = source.z_all(4, likes)
    assert all(torch.equal(z, source.z(4, k, like)) for k, (z, like) in enumerate(zip(plain, likes, strict=True)))
    assert source.z_all(4, []) == []


def test_lists_of_different_lengths_are_refused():
    like = torch.empty(4)
    for options in ({"indices": [0]}, {"offsets": [0, 0, 0]}, {"out": [like]}, {"out": []}):
        with pytest.raises(ArgumentError, match=r"len\(likes\)=2"):
            Source(KEY).z_all(0, [like, like], **options)


@needs_c
def test_a_kernel_with_other_arithmetic_is_turned_away(monkeypatch):
    class Fused:
        def gaussians(self, words, out):
            _box_muller.gaussians(words, out)
            out[3] = np.nextafter(out[3], 9)

        def draw(self, *arguments, fresh):
            _kernel.NumpyKernel().draw(*arguments, fresh=fresh)

    class OtherCipher(Fused):
        gaussians = staticmethod(_box_muller.gaussians)

        def draw(self, stream, step, index, start, scale, out, fresh):
            _kernel.NumpyKernel().draw(stream, step, index, start + 256, scale, out, fresh)

    assert _kernel._agrees(_kernel.KERNEL)
    assert not _kernel._agrees(Fused())
    assert not _kernel._agrees(OtherCipher())
    monkeypatch.setattr(_kernel, "_agrees", lambda kernel: False)
    with pytest.warns(UserWarning, match="other arithmetic"):
        assert _kernel._choose().name == "numpy"


def test_the_key_stays_secret():
    source = Source(KEY)
    assert repr(source) == "Source(key=…)" and repr(Source(seed=3)) == "Source(seed=…)"
    assert Source(seed=3).reproducible and not Source().reproducible
    with pytest.raises(TypeError, match="secret"):
        pickle.dumps(source)
    with pytest.raises(TypeError, match="secret"):
        copy.copy(source)
    with pytest.raises(ArgumentError) as refusal:
        Source(b"too short a secret")
    assert "too short" not in str(refusal.value)


def test_bad_arguments_are_refused():
    source, like = Source(KEY), torch.empty(4)
    for arguments in ((-1, 0), (0, -1), (1 << 48, 0), (0, 1 << 32), (0.0, 0)):
        with pytest.raises(ArgumentError):
            source.z(*arguments, like)
    for options in ({"offset": -1}, {"offset": 1 << 60}, {"scale": float("nan")}, {"out": torch.empty(5)}):
        with pytest.raises(ArgumentError):
            source.z(0, 0, like, **options)
    with pytest.raises(ArgumentError, match="floating-point"):
        source.z(0, 0, torch.empty(4, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="either key"):
        Source(KEY, seed=1)
    with pytest.raises(ArgumentError):
        Source(seed=1.5)


def test_a_dtensor_is_refused_once_its_module_is_loaded(monkeypatch):
    class DTensor(torch.Tensor):
        pass

    module = types.SimpleNamespace(DTensor=DTensor)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", module)
    with pytest.raises(ArgumentError, match="to_local"):
        Source(KEY).z(0, 0, torch.zeros(4).as_subclass(DTensor))


@pytest.mark.slow  # importing torch.distributed.tensor takes seconds
def test_a_real_dtensor_is_refused_with_the_remedy(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(ArgumentError, match="to_local"):
            Source(KEY).z(0, 0, sharded)
        with pytest.raises(ArgumentError, match="to_local"):
            Source(KEY).z(0, 0, torch.zeros(4), out=sharded)
        assert Source(KEY).z(0, 0, sharded.to_local()).shape == (4,)
    finally:
        dist.destroy_process_group()

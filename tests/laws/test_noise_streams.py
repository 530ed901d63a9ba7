"""Rows of every stream equal the materialised C⁻¹ Z; order, sharding and resume are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import _aligned_memory
from hushgrad._universal_hash import UniversalHash
from hushgrad.errors import ArgumentError
from hushgrad.noise import _kernel, _threads
from hushgrad.noise._threads import CHUNK, SHARE
from hushgrad.noise.source import Source
from hushgrad.noise.streams import BandedStream, BufferStream, DenseStream, FilterStream, IndependentStream, TreeStream
from hushgrad.noise.streams.base import OrderedStream
from hushgrad.noise.streams.tree import node

STEPS, SIZE = 21, 1000
DECAY, WEIGHT = (0.9, 0.5), (0.3, 0.2)
BETA = [1.0, -0.5, -0.125, -0.0625, -0.04, -0.03]
DENSE = np.linalg.inv(np.eye(STEPS) + np.tril(np.random.default_rng(0).uniform(0, 0.5, (STEPS, STEPS)), -1))


def band(t: int) -> list[float]:
    return [1.0 + 0.01 * t, 0.5, 0.25 + 0.001 * t, 0.125]


def banded_matrix() -> np.ndarray:
    C = np.zeros((STEPS, STEPS))
    for t in range(STEPS):
        for j, c in enumerate(band(t)[: t + 1]):
            C[t, t - j] = c
    return C


def toeplitz(column: list[float]) -> np.ndarray:
    return sum(np.diag(np.full(STEPS - j, c), -j) for j, c in enumerate(column[:STEPS]))


def blt_column() -> list[float]:
    return [1.0] + [sum(w * d ** (t - 1) for d, w in zip(DECAY, WEIGHT, strict=True)) for t in range(1, STEPS)]


MATRICES = {
    "independent": np.eye(STEPS),
    "banded": np.linalg.inv(banded_matrix()),
    "filter": toeplitz(BETA),
    "filter-regenerated": toeplitz(BETA),
    "filter-two": toeplitz([1.0, -0.9]),
    "buffered": np.linalg.inv(toeplitz(blt_column())),
    "dense": DENSE,
    "dense-regenerated": DENSE,
}
STREAMS = {
    "independent": lambda s: IndependentStream(s, steps=STEPS),
    "banded": lambda s: BandedStream(s, band, steps=STEPS),
    "filter": lambda s: FilterStream(s, BETA, steps=STEPS),
    "filter-regenerated": lambda s: FilterStream(s, BETA, steps=STEPS, memory=0),
    "filter-two": lambda s: FilterStream(s, [1.0, -0.9], steps=STEPS),
    "buffered": lambda s: BufferStream(s, DECAY, WEIGHT, steps=STEPS),
    "dense": lambda s: DenseStream(s, lambda t: DENSE[t, : t + 1], steps=STEPS),
    "dense-regenerated": lambda s: DenseStream(s, lambda t: DENSE[t, : t + 1], steps=STEPS, memory=0),
    "tree": lambda s: TreeStream(s, steps=STEPS),
    "tree-honaker": lambda s: TreeStream(s, steps=STEPS, honaker=True),
    "tree-restart": lambda s: TreeStream(s, steps=STEPS, honaker=True, restart=6),
    "tree-completed": lambda s: TreeStream(s, steps=STEPS, honaker=True, restart=6, completion=True),
}
KINDS = sorted(STREAMS)


@pytest.fixture
def source() -> Source:
    return Source(seed=7)


def rows(stream, start=0, stop=STEPS, size=SIZE, dtype=torch.float64, offset=0, index=2):
    like = torch.empty(size, dtype=dtype)
    return torch.stack([stream.row(t, index, like, offset=offset) for t in range(start, stop)])


def draws(source, dtype=torch.float64):
    return torch.stack([source.z(t, 2, torch.empty(SIZE, dtype=dtype)) for t in range(STEPS)])


@pytest.mark.parametrize("kind", sorted(MATRICES))
def test_rows_equal_the_materialised_product(kind, source):
    expected = torch.from_numpy(MATRICES[kind]) @ draws(source)
    torch.testing.assert_close(rows(STREAMS[kind](source)), expected, rtol=0, atol=1e-12)
    single = rows(STREAMS[kind](source), dtype=torch.float32)
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", sorted(MATRICES))
def test_a_stream_that_is_off_by_one_row_would_be_noticed(kind, source):
    shifted = torch.from_numpy(MATRICES[kind]) @ draws(source).roll(1, dims=0)
    assert (rows(STREAMS[kind](source)) - shifted).abs().max() > 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_many_tensors_are_those_of_each(kind, source):
    likes, indices, offsets = [torch.ones(300), torch.ones(5, 7, dtype=torch.float64), torch.ones(())], [2, 0, 7], [10, 0, 3]
    together, apart, base = STREAMS[kind](source), STREAMS[kind](source), STREAMS[kind](source)
    for t in range(STEPS):
        out = [like.clone() for like in likes]
        rows = together.rows(t, likes, indices=indices, offsets=offsets, out=out, scale=0.3)
        assert all(row is total for row, total in zip(rows, out, strict=True))
        places = zip(indices, likes, offsets, strict=True)
        same = [base.row(t, index, like, offset=offset, scale=0.3) for index, like, offset in places]
        for like, index, offset, row, other in zip(likes, indices, offsets, rows, same, strict=True):
            assert torch.equal(row, apart.row(t, index, like, offset=offset, out=like.clone(), scale=0.3))
            torch.testing.assert_close(row, like + other)


def test_no_row_is_drawn_unless_all_can_be(source):
    stream, like = IndependentStream(source), torch.zeros(4)
    stream.row(0, 1, like)
    with pytest.raises(ArgumentError, match="next row of tensor 0"):
        stream.rows(1, [like, like])
    stream.rows(0, [like])
    assert len(stream.rows(1, [like, like])) == 2


def tree_decoder(honaker: bool, size: int, completion: bool) -> tuple[np.ndarray, list[int]]:
    """Brute force over all nodes: prefix noise as the least-variance estimate that each online rule may use."""
    nodes = [node(t, level) for t in range(STEPS) for level in range(8)]
    place = {n: i for i, n in enumerate(nodes)}
    prefix = np.zeros((STEPS + 1, len(nodes)))

    def estimate(tree_start, level, first, length):
        """(weights, variance) of the subtree with leaves [first, first + 2^level) of a tree with ``length`` leaves."""
        if first >= length:
            return np.zeros(len(nodes)), 0.0
        last = min(first + 2**level, length) - 1
        own = np.zeros(len(nodes))
        own[place[node(tree_start + last, level)]] = 1.0
        if level == 0 or not honaker:
            return own, 1.0
        left, v_left = estimate(tree_start, level - 1, first, length)
        right, v_right = estimate(tree_start, level - 1, first + 2 ** (level - 1), length)
        v = v_left + v_right
        return (v * own + left + right) / (1 + v), v / (1 + v)

    base = np.zeros(len(nodes))
    for t in range(STEPS):
        start, leaf = t - t % size, t % size
        total, first = np.zeros(len(nodes)), 0
        if completion and leaf == size - 1:
            total = estimate(start, (size - 1).bit_length(), 0, size)[0]
        else:
            for level in reversed(range(8)):
                if (leaf + 1) >> level & 1:
                    total += estimate(start, level, first, size if first + 2**level > size else first + 2**level)[0]
                    first += 2**level
        prefix[t + 1] = base + total
        if leaf == size - 1:
            base = prefix[t + 1]
    return np.diff(prefix, axis=0), nodes


TREES = {"tree": (False, STEPS, False), "tree-honaker": (True, STEPS, False)}
TREES |= {"tree-restart": (True, 6, False), "tree-completed": (True, 6, True)}


@pytest.mark.parametrize("kind", sorted(TREES))
def test_tree_rows_equal_the_brute_force_decoder(kind, source):
    decoder, nodes = tree_decoder(*TREES[kind])
    z = torch.stack([source.z(n, 2, torch.empty(50, dtype=torch.float64)) for n in nodes])
    torch.testing.assert_close(rows(STREAMS[kind](source), size=50), torch.from_numpy(decoder) @ z, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_any_sharding_gives_the_same_bits(kind, source):
    whole = rows(STREAMS[kind](source), dtype=torch.float32)
    stream, parts = STREAMS[kind](source), []
    for low, high in ((0, 1), (1, 300), (300, SIZE)):
        parts.append(rows(stream, size=high - low, dtype=torch.float32, offset=low))
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_are_cut_into_chunks_without_a_trace(kind, source):
    stream, size = STREAMS[kind](source), 2 * CHUNK + 300
    whole = rows(stream, stop=7, size=size, dtype=torch.float32)
    across = slice(CHUNK - 100, CHUNK + 100)
    part = rows(STREAMS[kind](source), stop=7, size=200, dtype=torch.float32, offset=across.start)
    assert torch.equal(whole[:, across], part)
    with_numpy = STREAMS[kind](source)
    try:
        kernel, _kernel.KERNEL = _kernel.KERNEL, _kernel.NumpyKernel()
        assert torch.equal(rows(with_numpy, stop=7, size=size, dtype=torch.float32), whole)
    finally:
        _kernel.KERNEL = kernel


@pytest.mark.parametrize("kind", ["banded", "buffered", "filter", "tree-honaker"])
def test_the_number_of_threads_leaves_no_trace(kind, source):
    threads, size, found = torch.get_num_threads(), 3 * SHARE + 300, []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(rows(STREAMS[kind](source), stop=3, size=size, dtype=torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40 * CHUNK), st.sampled_from([None, 1000, CHUNK, SHARE]), st.integers(1, 5))
def test_chunks_cover_everything_once(count, chunk, threads):
    parts: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_threads.torch, "get_num_threads", lambda: threads)
        _threads.over_chunks(count, lambda low, high: parts.append((low, high)), chunk)
    parts.sort()
    assert [low for low, _ in parts] + [count] == [0, *(high for _, high in parts)]
    assert all(low < high for low, high in parts)
    if chunk is None:
        assert len(parts) == min(1, count) if threads == 1 else len(parts) <= 4 * threads
    else:
        assert all(high - low <= chunk for low, high in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (7, 1_000_003)])
def test_room_starts_with_a_cache_line_and_zeros_are_zero(dtype, shape):
    room = _aligned_memory.zeros(shape, dtype)
    assert room.shape == shape and room.dtype == dtype and room.is_contiguous()
    assert room.data_ptr() % _aligned_memory.LINE == 0 and not room.any()
    assert _aligned_memory.empty(shape, dtype).shape == shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 5, 12])
def test_resume_in_mid_stream_is_exact_even_under_another_sharding(kind, cut, source):
    whole = rows(STREAMS[kind](source), dtype=torch.float32)
    first = STREAMS[kind](source)
    rows(first, stop=cut, size=400, dtype=torch.float32)
    rows(first, stop=cut, size=SIZE - 400, dtype=torch.float32, offset=400)
    state = first.state_dict()
    rows(first, start=cut, stop=cut + 1, size=400, dtype=torch.float32)  # the state is a copy: going on does not change it
    second = STREAMS[kind](source)
    second.load_state_dict(state)
    second.load_state_dict(second.state_dict())
    assert torch.equal(rows(second, start=cut, dtype=torch.float32), whole[cut:])


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_never_repeated(kind, source):
    stream, like = STREAMS[kind](source), torch.empty(10)
    stream.row(0, 0, like)
    with pytest.raises(ArgumentError, match="to be 1, the next row"):
        stream.row(0, 0, like)
    with pytest.raises(ArgumentError, match="to be 1, the next row"):
        stream.row(2, 0, like)
    with pytest.raises(ArgumentError, match="Shards must not overlap"):
        stream.row(0, 0, torch.empty(5), offset=5)
    with pytest.raises(ArgumentError, match="to keep its 10 elements"):
        stream.row(1, 0, torch.empty(11))
    with pytest.raises(ArgumentError, match="must not share their noise"):
        stream.rows(1, [like, like], indices=[0, 0])
    for t in range(1, STEPS):
        stream.row(t, 0, like)
    with pytest.raises(ArgumentError, match=f"less than steps={STEPS}"):
        stream.row(STEPS, 0, like)


@pytest.mark.parametrize("kind", KINDS)
def test_out_is_added_to_in_place_and_scaled(kind, source):
    plain, stream = STREAMS[kind](source), STREAMS[kind](source)
    for t in range(3):
        total = torch.ones(8, 5)
        row = plain.row(t, 0, total)
        assert stream.row(t, 0, total, out=total, scale=2.5) is total
        assert torch.equal(total, 1 + row * 2.5)


def test_an_interrupted_row_poisons_its_lane(source, monkeypatch):
    stream, like = STREAMS["buffered"](source), torch.empty(10)
    stream.row(0, 0, like)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Source, "buffer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        stream.row(1, 0, like)
    with pytest.raises(ArgumentError, match="interrupted"):
        stream.row(1, 0, like)
    with pytest.raises(ArgumentError, match="interrupted"):
        stream.state_dict()


def test_a_wrong_state_is_refused(source):
    stream = STREAMS["buffered"](source)
    stream.row(0, 0, torch.empty(10))
    state = stream.state_dict()
    with pytest.raises(ArgumentError, match="to come from a BandedStream"):
        STREAMS["banded"](source).load_state_dict(state)
    with pytest.raises(ArgumentError, match="rows of 10 numbers"):
        BufferStream(source, (0.5,), (0.1,), steps=3).load_state_dict(state)
    other = STREAMS["buffered"](source)
    other.load_state_dict(state)
    with pytest.raises(ArgumentError, match="to cover"):
        other.row(1, 0, torch.empty(20))


@pytest.mark.parametrize(
    "make",
    [
        lambda s: BandedStream(s, lambda t: [0.0, 1.0], steps=3).row(0, 0, torch.empty(3)),
        lambda s: FilterStream(s, [], steps=3),
        lambda s: FilterStream(s, [1.0], steps=0),
        lambda s: DenseStream(s, lambda t: [1.0], steps=3).row(1, 0, torch.empty(3)),
        lambda s: BufferStream(s, (1.5,), (0.1,), steps=3),
        lambda s: BufferStream(s, (0.5,), (0.1, 0.2), steps=3),
        lambda s: BufferStream(s, (), (), steps=3),
        lambda s: IndependentStream("key"),
    ],
)
def test_bad_arguments_are_refused(make, source):
    with pytest.raises(ArgumentError):
        make(source)


def test_a_stream_that_does_not_say_how_it_advances_is_none(source):
    class Forgetful(OrderedStream):
        def _sizes(self):
            return {"sum": 1}

    with pytest.raises(TypeError, match="_advance_all"):
        Forgetful(source)


def test_a_row_added_to_tensors_like_those_of_the_last_row_is_the_one_that_is_drawn_anew():
    """Most rows are added to new tensors of the same sizes, which is told quickly: here now and then to others, drawn at random."""
    draw, shapes = np.random.default_rng(31), [(7, 300), (5,), (40, 60), (0,), (90,)]
    source, plain = Source(seed=3), Source(seed=3)
    source.hashed = UniversalHash(b"k" * 32)
    stream, again = IndependentStream(source, steps=200), 0
    for step in range(200):
        order, cut = ([0, 1, 2, 3, 4], 5) if draw.random() < 0.6 else (draw.permutation(5).tolist(), int(draw.integers(1, 6)))
        for indices in (order[:cut], order[cut:]):
            tensors = [torch.from_numpy(draw.normal(size=shapes[k])).float() for k in indices]
            turned = draw.random() < 0.1
            tensors = [x.t().contiguous().t() if turned and x.dim() == 2 else x for x in tensors]
            wanted = [x + plain.z(step, k, x.contiguous(), scale=0.5) for k, x in zip(indices, tensors, strict=True)]
            again += stream._as_last(tensors, indices, [0] * len(tensors), tensors) is not None
            assert stream.rows(step, tensors, indices=indices, offsets=[0] * len(tensors), out=tensors, scale=0.5) == tensors
            for x, y in zip(tensors, wanted, strict=True):
                assert torch.equal(x, y)
                if not turned and tensors:
                    assert source.seen.of(x) == b"".join(h.tobytes() for h in source.hashed.of([x]))
        with pytest.raises(ArgumentError):
            stream.rows(step, [torch.zeros(5)], indices=[1], offsets=[0])
    assert 50 < again < 200

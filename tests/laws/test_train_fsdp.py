"""Shards: any cut of a tensor gives the noise, and the checkpoint, of the whole."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.events import Once
from hushgrad.noise import BLT, Banded, Independent, Source, Tree
from hushgrad.release.placement.sharded import Shard
from hushgrad.release.placement.sharded_sums import _unit
from hushgrad.release.placement.world import World
from hushgrad.train.shard_files import Piece, ShardFiles, cut_noise, join_noise

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 4)) | st.tuples(st.integers(1, 9))
WORLDS = st.integers(1, 5)
MECHANISMS = {"independent": Independent(), "blt": BLT(buffers=2), "banded": Banded(bands=3), "tree": Tree()}


def _shards(shape, world) -> list[Shard]:
    return [Shard.of(shape, rank, world) for rank in range(world)]


def _stream(name, steps=6):
    mechanism = MECHANISMS[name].resolved(steps=steps, participation=Once())
    return mechanism.stream(Source(seed=3), steps=steps)


def _draw(stream, step, index, shard: Shard):
    return (
        stream.row(step, index, torch.empty(shard.rows, *shard.shape[1:]), offset=shard.offset) if shard.count else torch.empty(0)
    )


@given(SHAPES, WORLDS)
def test_shards_cover_the_tensor_once_as_torch_chunks_it(shape, world):
    shards = _shards(shape, world)
    assert [s.offset for s in shards] == [sum(t.count for t in shards[:r]) for r in range(world)]
    assert sum(s.count for s in shards) == math.prod(shape)
    chunks = [len(chunk) for chunk in torch.empty(shape).chunk(world)]
    assert [s.rows for s in shards] == chunks + [0] * (world - len(chunks))


@pytest.mark.parametrize("name", MECHANISMS)
@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, before=WORLDS, after=WORLDS)
def test_noise_goes_on_bit_for_bit_when_the_cut_changes(name, shape, before, after):
    """``before`` processes draw three rows and save; ``after`` processes read and draw three more."""
    whole = _stream(name)
    expected = [whole.row(step, 0, torch.empty(shape)).flatten() for step in range(6)]
    streams, drawn = [_stream(name) for _ in range(before)], []
    for step in range(3):
        drawn.append(torch.cat([_draw(s, step, 0, p).flatten() for s, p in zip(streams, _shards(shape, before), strict=True)]))
    files: list[dict[str, Piece]] = [{} for _ in streams]
    skeletons = [cut_noise(s.state_dict(), pieces) for s, pieces in zip(streams, files, strict=True)]

    def read(key, offset, count):
        parts = sorted(((f[key].offset, f[key].values) for f in files if key in f), key=lambda part: part[0])
        return torch.cat([values for _, values in parts], 1)[:, offset : offset + count]

    streams = [_stream(name) for _ in range(after)]
    for stream, shard in zip(streams, _shards(shape, after), strict=True):
        stream.load_state_dict(join_noise(skeletons[0], read, [(shard.offset, shard.count)]))
    for step in range(3, 6):
        drawn.append(torch.cat([_draw(s, step, 0, p).flatten() for s, p in zip(streams, _shards(shape, after), strict=True)]))
    assert all(torch.equal(a, b) for a, b in zip(expected, drawn, strict=True))


def test_a_wrong_offset_is_noticed():
    """Planted: both shards are drawn as the first one."""
    whole, stream = _stream("independent"), _stream("independent")
    expected = whole.row(0, 0, torch.empty(8))
    assert not torch.equal(expected, stream.row(0, 0, torch.empty(4)).repeat(2))


@dataclass
class _Pretended(World):
    """One of several processes, alone: it agrees with itself."""

    def gathered(self, content):
        return [content] * self.size

    @contextmanager
    def together(self):
        yield


def _write(directory, worlds, values):
    """The shards of a (2, n) state as ``worlds`` processes would write them."""
    files = []
    for rank in range(worlds):
        shard = Shard.of((values.shape[1],), rank, worlds)
        pieces = {"a": Piece(shard.offset, values[:, shard.offset : shard.offset + shard.count])}
        shards = ShardFiles(directory, _Pretended(rank, worlds))
        files.append(shards.write(pieces, 1)[rank])
    return files


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 12), worlds=WORLDS, data=st.data())
def test_any_range_is_read_from_the_files_that_have_it(tmp_path_factory, n, worlds, data):
    directory, values = tmp_path_factory.mktemp("shards"), torch.arange(2.0 * n).view(2, n)
    files = _write(directory, worlds, values)
    reader = ShardFiles(directory, World())
    reader.verify(files)
    low = data.draw(st.integers(0, n))
    high = data.draw(st.integers(low, n))
    assert torch.equal(reader.reader(files)("a", low, high - low), values[:, low:high])
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())


def test_damaged_missing_and_foreign_shards_are_refused(tmp_path):
    files = _write(tmp_path, 2, torch.arange(8.0).view(2, 4))
    reader = ShardFiles(tmp_path, World())
    with pytest.raises(ArgumentError, match="cover"):
        reader.reader(files[:1])("a", 0, 4)  # planted: a process's file is left out
    path = tmp_path / files[1][0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ArgumentError, match="damaged or missing"):
        reader.verify(files)
    path.unlink()
    with pytest.raises(ArgumentError, match="damaged or missing"):
        reader.verify(files)


def test_alone_everybody_agrees():
    world = World()
    assert world.largest(3) == world.least(3) == world.total(3) == 3 and world.same(7)
    with world.together():
        pass
    with pytest.raises(CaptureError, match="mine"), world.together():
        raise CaptureError("mine")


def test_parameters_in_parts_that_nobody_gathers_are_refused():
    """Tensor parallelism cuts a layer's rows as fully_shard does: a step on such parts ended in the kernels, or never."""
    with pytest.raises(ArgumentError, match=r"model='0.1' to be sharded by fully_shard"):
        _unit(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(2, 2))), "0.1")

"""Checkpoints of sharded runs: every process writes its own shards, and any number of processes reads them.

A tensor that is sharded is written as *pieces*: a piece is a range of the flattened tensor, with its offset. A run on another
number of processes holds other ranges, and each of its processes reads exactly those, from whichever files have them. State of
correlated noise is cut like the parameter it belongs to. Noise is a function of (key, step, tensor, position), so it goes on
bit for bit under the new cut.

**Why it is never half a checkpoint.** Shard files have a new name in every save and are flushed to the disk first. The state
file, which names them with their digests, is replaced last and at once; only then the old shard files are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing
from hushgrad.release.placement.sharded import Shard, Sharded, is_sharded
from hushgrad.release.placement.world import World
from hushgrad.train.tree import _decode, _encode, rng_state

_HEADER, _MARK = "hushgrad shard", "hushgrad sharded"
Pieces = dict[str, "Piece"]


class Piece(NamedTuple):
    """The range [offset, offset + count) of a tensor, flattened: (rows, count), with one row but for state of noise."""

    offset: int
    values: Tensor


# Cutting --------------------------------------------------------------------------------------------------------------


def cut_tree(tree: Any, pieces: Pieces) -> Any:
    """``tree`` with a marker in place of every sharded tensor, whose local part is put into ``pieces``."""
    if is_sharded(tree):
        key = f"tensor.{len(pieces)}"
        shard = Shard.of(tuple(tree.shape), tree.device_mesh.get_local_rank(), tree.device_mesh.size())
        pieces[key] = Piece(shard.offset, tree.detach().to_local().reshape(1, -1))
        return {_MARK: key, "shape": list(tree.shape)}
    if isinstance(tree, dict):
        return {name: cut_tree(value, pieces) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(cut_tree(value, pieces) for value in tree)
    return tree


def cut_noise(noise: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    """The same for the state of a noise stream, whose lanes are ranges already. Every process has the same step and dtype."""
    lanes = []
    for lane in noise["lanes"]:
        state = {}
        for name, values in lane["state"].items():
            key = f"noise.{lane['index']}.{name}"
            pieces[key] = Piece(lane["offset"], values)
            state[name] = key
        lanes.append({"index": lane["index"], "dtype": lane["dtype"], "next": lane["next"], "state": state})
    return {**noise, "lanes": lanes}


# Joining --------------------------------------------------------------------------------------------------------------

Read = Callable[[str, int, int], Tensor]


def join_tree(tree: Any, read: Read, sharding: Sharded | None) -> Any:
    """``tree`` with this process's part of each marked tensor (sharded again), or with whole tensors for a whole model."""
    if isinstance(tree, dict) and _MARK in tree:
        whole = Shard.of(tuple(tree["shape"]), 0, 1)
        shard = whole if sharding is None else Shard.of(whole.shape, sharding.world.rank, sharding.world.size)
        rows = read(tree[_MARK], shard.offset, shard.count).view(shard.rows, *shard.shape[1:])
        return rows if sharding is None else sharding.wrap(rows, shard.shape)
    if isinstance(tree, dict):
        return {name: join_tree(value, read, sharding) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(join_tree(value, read, sharding) for value in tree)
    return tree


def join_noise(noise: dict[str, Any], read: Read, ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """The state of a stream for the ``ranges`` (offset, count) that this process holds of each parameter."""
    lanes = []
    for lane in noise["lanes"]:
        offset, count = ranges[lane["index"]]
        if count:
            state = {name: read(key, offset, count) for name, key in lane["state"].items()}
            lanes.append({**lane, "offset": offset, "count": count, "state": state})
    return {**noise, "lanes": lanes}


# Files ----------------------------------------------------------------------------------------------------------------


class ShardFiles:
    """The shard files of a checkpoint's directory."""

    def __init__(self, directory: Path, world: World) -> None:
        self._directory, self._world = directory, world

    def write(self, pieces: Pieces, generation: int) -> list[list[str]]:
        """Write this process's file; returns the (name, digest) of all processes' files."""
        with self._world.together():
            path = self._directory / self._name(generation, self._world.rank)
            with replacing(path) as temporary:
                # Copies: tied tensors share their memory, which the format refuses.
                tensors = {key: piece.values.detach().cpu().contiguous().clone() for key, piece in pieces.items()}
                header = {"offsets": {key: piece.offset for key, piece in pieces.items()}, "rng": _encode(rng_state(), tensors)}
                safetensors.torch.save_file(tensors, temporary, metadata={_HEADER: json.dumps(header)})
            digest = _digest(path)
        digests = self._world.gathered(digest)
        return [[self._name(generation, rank), digest.hex()] for rank, digest in enumerate(digests)]

    @staticmethod
    def _name(generation: int, rank: int) -> str:
        return f"shard-{generation}-{rank}.safetensors"

    def remove_others(self, files: list[list[str]]) -> None:
        """Remove shard files that the state file does not name."""
        named = {name for name, _ in files}
        for path in self._directory.glob("shard-*.safetensors"):
            if path.name not in named and re.fullmatch(r"shard-\d+-\d+\.safetensors", path.name):
                path.unlink(missing_ok=True)

    def verify(self, files: list[list[str]]) -> None:
        """Check that every file exists and is unchanged; the processes share the work."""
        with self._world.together():
            for name, digest in files[self._world.rank :: self._world.size]:
                path = self._directory / name
                if not path.exists() or _digest(path).hex() != digest:
                    raise ArgumentError(
                        f"Expected {name} to be as it was written; it is damaged or missing. Use a copy of the whole folder."
                    )

    def reader(self, files: list[list[str]]) -> Read:
        """A function that reads any range of any tensor from the files that have parts of it."""
        index: dict[str, list[tuple[int, int, Path]]] = {}
        for name, _ in files:
            path = self._directory / name
            with _opened(path) as file:
                for key, offset in _header(file)["offsets"].items():
                    index.setdefault(key, []).append((offset, file.get_slice(key).get_shape()[1], path))

        def read(key: str, offset: int, count: int) -> Tensor:
            found: list[Tensor] = []
            reached = offset
            for start, size, path in sorted(index.get(key, [])):
                low, high = max(start, offset), min(start + size, offset + count)
                if low < high:
                    with _opened(path) as file:
                        found.append(file.get_slice(key)[:, low - start : high - start])
                    reached = high if low == reached else -1
            if reached != offset + count or (count and not found):
                raise ArgumentError(f"Expected the shard files to cover [{offset}, {offset + count}) of {key} once.")
            return torch.cat(found, 1) if found else self._nothing(key, index)

        return read

    def _nothing(self, key: str, index: dict[str, list[tuple[int, int, Path]]]) -> Tensor:
        """No numbers, in the tensor's dtype."""
        with _opened(index[key][0][2]) as file:
            return file.get_slice(key)[:, :0]  # type: ignore[no-any-return]

    def rng(self, files: list[list[str]]) -> Any:
        """The random states of the process with this rank; those of process 0 if there was none."""
        rank = self._world.rank if self._world.rank < len(files) else 0
        with _opened(self._directory / files[rank][0]) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name.isdigit()}  # noqa: SIM118  (not a dict)
            return _decode(_header(file)["rng"], tensors)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ArgumentError(f"Expected {path.name} to be a safetensors file: {error}.") from None


def _header(file: Any) -> dict[str, Any]:
    return _check.parsed((file.metadata() or {})[_HEADER])  # type: ignore[no-any-return]


def _digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()

"""Per-example clipping of parameters that FSDP2 shards.

FSDP's hooks stay as they are: they gather a unit's parameters before its forward and its backward, and free them after.
In between, the capture runs the layers on parameters that do not require gradients, so autograd computes none, and FSDP finds
nothing to reduce: **no raw gradient is ever computed, summed or sent.** Norms need inputs and output gradients only, which are
whole in each process for its own examples.

The clipped sums are formed layer by layer. A few layers' sums are kept whole (a *bucket*); a full bucket is reduce-scattered
while the next one is being filled, and each process keeps only its rows. So at most two buckets of whole gradients exist at a
time, whatever the size of the model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.site import Site
from hushgrad.clipping.sums import Form, Sum
from hushgrad.clipping.tape import Tape
from hushgrad.errors import CaptureError
from hushgrad.release.placement.world import World, answered

if TYPE_CHECKING:
    from hushgrad.release.placement.sharded import Shard

BUCKET = 1 << 20  # numbers: 4 MiB of float32; a layer that is larger makes a bucket of its own


class ShardedSite(Site):
    """A site that looks its parameters up whenever they are needed: FSDP swaps shards for whole tensors and back."""

    __slots__ = ("_owners",)

    def __init__(self, tape: Tape, path: str, module: nn.Module, rule: Rule, full: dict[str, str]) -> None:
        self._owners = [_owner(module, name) for name in full]
        super().__init__(tape, path, module, rule, dict(zip(full, self.params, strict=True)), full)

    @classmethod
    def of(cls, model: nn.Module, site: Site) -> ShardedSite:
        """The same site, for a model whose parameters are sharded; its rule measures while they are whole."""
        rule = _while_whole(site.rule, _unit(model, site.path))
        return cls(site.tape, site.path, site.module, rule, site.full)

    @property
    def params(self) -> list[nn.Parameter]:  # type: ignore[override]
        """The parameters as they are now: shards, or whole around a forward or a backward."""
        return [p for owner, name in self._owners if (p := owner._parameters[name]) is not None]

    @params.setter
    def params(self, _: object) -> None:
        pass  # the base class's own list would grow stale


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the parameter of this dotted name, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _while_whole(rule: Rule, unit: Any) -> Rule:
    """A rule that waits for the collect reads parameters, which are sharded by then. So it measures in backward, on whole ones."""
    if rule.hot:
        return rule
    hot = type(rule)()

    def sq_norms(record: Record) -> dict[str, Tensor]:
        unit.unshard()  # FSDP gathers for backward when the unit's output gets its gradient; our hook may come before that
        return rule.sq_norms(record)

    hot.__dict__.update(hot=True, sq_norms=sq_norms)
    return hot


def _unit(model: nn.Module, path: str) -> Any:
    """The innermost module around ``path`` that fully_shard was applied to.

    Raises:
        ArgumentError: if there is none: shards of tensor parallelism are never gathered, and its processes share each example.
    """
    from torch.distributed.fsdp import FSDPModule

    around = path
    while not isinstance(unit := model.get_submodule(around), FSDPModule):
        if not around:
            remedy = "Use fully_shard(model) instead of tensor parallelism: processes share a batch, not an example."
            _check.fail("model", path, "to be sharded by fully_shard where its parameters are in parts", remedy)
        around = around.rpartition(".")[0]
    return unit


class ShardedSums(dict[str, Sum]):
    """Behaves like sums of whole parameters that can be added to; the results arrive in ``rows``, summed over all processes.

    ``together``: the sets of names that one layer opens at the same time; a bucket is never sent in between.
    """

    def __init__(self, shards: Mapping[str, Shard], world: World, rows: dict[str, Sum], together: list[frozenset[str]]) -> None:
        super().__init__(rows)
        self._shards, self._world = shards, world
        self._mates = {name: frozenset().union(*(names for names in together if name in names)) for name in rows}
        self._open: dict[str, Sum] = {}
        self._size = 0
        self._layer: frozenset[str] = frozenset()
        self._sent: tuple[Any, dict[str, int], Tensor, Tensor] | None = None
        self._order = 0

    def __getitem__(self, name: str) -> Sum:
        if name not in self._layer:  # another layer begins, so that all that was opened before is complete
            self._layer = self._mates[name]
            if self._size >= BUCKET:
                self._send()
        if name not in self._open:
            shard, rows = self._shards[name], super().__getitem__(name)
            self._open[name] = Sum(Form(torch.Size(shard.shape), rows.buffer.device), rows.buffer.dtype)
            self._size += math.prod(shard.shape)
            self._order = zlib.crc32(name.encode(), self._order)
        return self._open[name]

    def flush(self) -> None:
        """Send and receive the rest. All processes must have opened the same layers in the same order.

        Raises:
            CaptureError: if not; the rows then hold sums of different layers and must not be released.
        """
        self._send()
        self._receive()
        if not self._world.same(self._order):
            raise CaptureError(
                "The processes ran different layers, or in another order, so their sums cannot be added up. With fully_shard "
                "every process must make the same passes in every step, also over an empty part of the batch."
            )

    def _send(self) -> None:
        self._receive()
        if not self._open:
            return
        size = self._world.size
        counts = {name: self._shards[name].chunk * self._shards[name].row_size for name in self._open}
        packed = self._packed(counts, size)
        arriving = packed.new_empty(packed.shape[1])
        with answered("the clipped sums were added up"):
            work = dist.reduce_scatter_tensor(arriving, packed.view(-1), async_op=True)
        self._sent = work, counts, packed, arriving  # the message must live until it is received
        self._open, self._size = {}, 0

    def _packed(self, counts: dict[str, int], size: int) -> Tensor:
        """The open sums as (W, numbers): row r goes to process r, padded where it has fewer rows of a parameter, or none."""
        first = next(iter(self._open.values())).buffer
        if len(counts) == 1 and first.numel() == size * next(iter(counts.values())):
            return first.reshape(size, -1)
        packed = first.new_zeros(size, sum(counts.values()))
        start = 0
        for name, count in counts.items():
            whole = self._open[name].buffer.reshape(-1)
            full = whole.numel() // count  # processes whose part is full; then perhaps one that has fewer rows
            packed[:full, start : start + count] = whole[: full * count].view(full, count)
            rest = whole[full * count :]
            if len(rest):
                packed[full, start : start + len(rest)] = rest
            start += count
        return packed

    def _receive(self) -> None:
        if self._sent is None:
            return
        work, counts, _, arriving = self._sent
        self._world.wait(work, "the clipped sums were added up", arriving.device)
        start = 0
        for name, count in counts.items():
            rows = super().__getitem__(name).buffer
            rows.view(-1).add_(arriving[start : start + rows.numel()])
            start += count
        self._sent = None

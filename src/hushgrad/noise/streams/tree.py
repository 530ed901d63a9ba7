"""The stream of tree aggregation: row t is the noise of prefix t minus the noise of prefix t - 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np

from hushgrad import _check
from hushgrad.noise import _kernel
from hushgrad.noise.device_noise import Turn
from hushgrad.noise.source import Source
from hushgrad.noise.streams.base import ChunkedStream
from hushgrad.noise.streams.shard_state import Lane
from hushgrad.noise.tree import averaged_variance, completed_level

_LEVELS = 64


def node(step: int, level: int) -> int:
    """The step number under which the source draws the node of this level whose last leaf is ``step``."""
    return step * _LEVELS + level


@final
class TreeStream(ChunkedStream):
    """Noise of binary-tree prefix sums: prefix t sums one node for every binary digit 1 of t + 1.

    The node of level l that ends at leaf t has its own z. Plain: its estimate is this z. With ``honaker`` (online) it is the
    average, weighted by inverse variances, of its own z and the sum e of its two children's estimates:

        e_l = a z_l + (1 - a)(e_left + e_right),   v_l = v / (1 + v),  a = v / (1 + v),  v = v_left + v_right,  v_0 = 1.

    ``restart``: a new tree begins every ``restart`` steps, on top of the last one's total. With ``completion`` a tree that
    ends is filled up with empty leaves to the next power of two, so that its total is the root's estimate alone; the
    sums of empty subtrees are known to be 0 and have variance 0. State: one number per level and parameter.

    Reference: Honaker (2015); Kairouz et al. (2021), arXiv:2103.00039, section B.1 (efficient and restarted tree aggregation).
    """

    def __init__(
        self, source: Source, *, steps: int, honaker: bool = False, restart: int | None = None, completion: bool = False
    ) -> None:
        super().__init__(source, steps=steps)
        self._honaker, self._completion = honaker, completion
        self._size = min(steps, steps if restart is None else _check.positive_int(restart=restart))

    def _sizes(self) -> Mapping[str, int]:
        return {"nodes": self._size.bit_length()}  # the estimates of the open prefix, by level

    def _turn(self, step: int) -> Turn | None:
        if self._honaker:  # an estimate combines several z
            return None
        leaf, levels = step % self._size, self._size.bit_length()
        top = completed_level(leaf, self._size, self._completion)
        below = tuple(level for level in range(min(top, leaf.bit_length())) if leaf >> level & 1)
        return Turn(node(step, top), weights=(-1.0,) * len(below), rows=below, keep=top if top < levels else -1, keeps_z=True)

    def _advance(self, lane: Lane, low: int, high: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        leaf = lane.next % self._size
        nodes = lane.rows("nodes")[:, low:high]
        open_levels = [level for level in range(leaf.bit_length()) if leaf >> level & 1]
        top = completed_level(leaf, self._size, self._completion)
        estimate = self._estimate(lane, leaf, top, low, high)
        row = estimate.copy()
        term = -np.ones((1, 1), row.dtype)
        for level in open_levels:
            if level < top:
                _kernel.KERNEL.combine(term, [nodes[level]], row[None])
        if top < len(nodes):
            nodes[top] = estimate
        _kernel.KERNEL.emit(row, scale, out, fresh)

    def _estimate(self, lane: Lane, leaf: int, top: int, low: int, high: int) -> np.ndarray:
        """The estimate of the node of level ``top`` that the leaf completes."""
        nodes = lane.rows("nodes")[:, low:high]
        estimate = np.empty(high - low, nodes.dtype)
        start = lane.offset + low
        if not self._honaker:
            self._source.fill(node(lane.next, top), lane.index, start, estimate)
            return estimate
        own = np.empty_like(estimate)
        self._source.fill(node(lane.next, 0), lane.index, start, estimate)
        variance = 1.0
        for level in range(top):
            if leaf >> level & 1:  # a right child: its left sibling is kept and full; otherwise its right sibling is empty
                estimate += nodes[level]
                variance += averaged_variance(level)
            self._source.fill(node(lane.next, level + 1), lane.index, start, own)
            share = variance / (1.0 + variance)
            estimate *= estimate.dtype.type(1.0 - share)
            estimate += own * estimate.dtype.type(share)
            variance = share
        return estimate

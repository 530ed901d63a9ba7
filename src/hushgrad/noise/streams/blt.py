"""The stream of buffered linear Toeplitz noise: a few exponentially decaying buffers instead of a long history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from hushgrad import _check
from hushgrad.noise import _kernel
from hushgrad.noise.device_noise import Turn
from hushgrad.noise.source import Source
from hushgrad.noise.streams.base import ChunkedStream
from hushgrad.noise.streams.shard_state import Lane


@final
class BufferStream(ChunkedStream):
    """Solves C X = Z for the buffered linear Toeplitz C with c_0 = 1 and c_t = sum_j weight_j decay_j^(t-1).

    Row t: x_t = z_t - sum_j weight_j s_j, then s_j = decay_j s_j + x_t. ``decay`` and ``weight`` are those of C, not of its
    inverse. State: one number per buffer and parameter.

    Reference: Dvijotham, McMahan, Pillutla, Steinke and Thakurta (2024), arXiv:2404.16706, Algorithm 1.
    """

    _chunk = None

    def __init__(self, source: Source, decay: Sequence[float], weight: Sequence[float], *, steps: int | None = None) -> None:
        super().__init__(source, steps=steps)
        self._decay = np.array([_check.between(0, 1, closed="left", decay=d) for d in decay])
        self._weight = np.array([_check.number(weight=w) for w in weight])
        if len(self._decay) == 0:
            _check.fail("decay", list(decay), "to have at least one entry", "Without buffers use independent noise.")
        if len(self._decay) != len(self._weight):
            _check.fail("weight", list(weight), f"to have one entry for each of the {len(self._decay)} decays")

    def _sizes(self) -> Mapping[str, int]:
        return {"buffers": len(self._decay)}

    def _turn(self, step: int) -> Turn:
        return Turn(step, weights=tuple(-self._weight), rows=tuple(range(len(self._weight))), decay=tuple(self._decay))

    def _advance(self, lane: Lane, low: int, high: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        decay, weight = self._decay.astype(out.dtype), self._weight.astype(out.dtype)
        row = _kernel.BufferedRow(lane.rows("buffers")[:, low:high], decay, weight, scale)
        self._source.buffer(lane.next, lane.index, lane.offset + low, row, out, fresh)

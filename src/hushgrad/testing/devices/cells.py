"""What torch has no kernel for in main memory: an accelerator's cells of recurrent layers.

Their first tensors keep what backward needs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _lstm_cell(x: Tensor, h: Tensor, cell: Tensor, of_x: Tensor | None = None, of_h: Tensor | None = None) -> tuple[Tensor, ...]:
    gates = sum((bias for bias in (of_x, of_h) if bias is not None), x + h)
    i, f, g, o = gates.chunk(4, 1)
    after = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after, gates


def _lstm_cell_backward(
    to_h: Tensor | None, to_cell: Tensor | None, cell: Tensor, after: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    made = torch.ops.aten._thnn_differentiable_lstm_cell_backward(
        to_h, to_cell, gates, torch.zeros_like(gates), None, None, cell, after
    )
    return made[0], made[4], made[0].sum(0) if has_bias else None


def _gru_cell(
    x: Tensor, h: Tensor, state: Tensor, of_x: Tensor | None = None, of_h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x, h = x if of_x is None else x + of_x, h if of_h is None else h + of_h
    (r, z, n), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    z, n = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return n + z * (state - n), torch.cat([x, h, state], 1)


def _gru_cell_backward(to_h: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    size = kept.shape[1] // 7
    x, h, state = kept.split([3 * size, 3 * size, size], 1)
    of_x, of_h, of_state = torch.ops.aten._thnn_differentiable_gru_cell_backward(to_h, x, h, state, None, None)[:3]
    return of_x, of_h, of_state, of_x.sum(0) if has_bias else None, of_h.sum(0) if has_bias else None


KERNELS = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}

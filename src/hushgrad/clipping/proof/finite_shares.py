"""Per-example shares through a node that has saved non-finite values of other examples.

A backward node is linear, and other examples' parts of a cotangent are 0, but 0 * NaN is NaN: one non-finite record would spoil the
gradients of all. So a zero cotangent gives a zero share, and any other share that is lost is computed again with finite saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hushgrad.clipping._torch import called
from hushgrad.clipping.proof.graph import Border
from hushgrad.clipping.proof.saved_tensors import Packing
from hushgrad.errors import CaptureError

_FAINT = 2.0**-120  # a share that is finite after this factor had only overflowed: no NaN is involved

Shares = Sequence[Tensor | None]  # (B, ...) each; None: not reached


def nonfinite_rows(rows: Tensor) -> Tensor:
    """(B,): whether each example's numbers are not all finite."""
    return ~rows.reshape(len(rows), -1).isfinite().all(1)  # works for scalars, too


def shares_one_by_one(
    border: Border, gs: Sequence[Tensor | None], masks: list[Tensor | None], examples: int, shape: tuple[int, ...]
) -> Tensor:
    """Call a frontier node with each example's part of the cotangents, one after the other."""
    rows = []
    for i in range(examples):
        part = tuple(
            None if g is None or mask is None else torch.where(mask == i, g, torch.zeros_like(g))
            for g, mask in zip(gs, masks, strict=True)
        )
        raw = called(border.node, part)[border.slot]
        rows.append(next(g for g in gs if g is not None).new_zeros(shape) if raw is None else raw.sum_to_size(shape))
    return torch.stack(rows)


def finite_shares(
    ask: Callable[[float], Shares], zero: Callable[[], Tensor], wild: Callable[[], Tensor], packing: Packing | None, where: str
) -> Shares:
    """Each example's share as computed by ``ask``, without any effect of another example's non-finite record.

    Args:
        ask: pulls B cotangents, times a factor, back through the graph.
        zero: (B,): whose cotangent is 0.
        wild: (B,): whose own cotangent or record is not finite; they keep what they get.
        packing: makes the graph's saved tensors finite; None if they were not intercepted.
        where: names the graph in an error.

    Raises:
        CaptureError: finite saved tensors are needed, and not all could be intercepted.
    """
    found = ask(1.0)
    if not bool((lost := _lost(found)).any()):
        return found
    found = [None if t is None else torch.where(_like(lost & zero(), t), torch.zeros_like(t), t) for t in found]
    lost = _lost(found) & ~wild()
    lost &= _lost(ask(_FAINT)) if bool(lost.any()) else lost  # those that become finite only overflow, and are the examples' own
    for bounded in (False, True):
        if packing is None or not bool(lost.any()):
            break
        with packing.finite(bounded=bounded):
            again = ask(1.0)
        found = [a if a is None or b is None else torch.where(_like(lost, a), b, a) for a, b in zip(found, again, strict=True)]
        lost = lost & _lost(found)
    if bool(lost.any()):
        raise CaptureError(
            f"A record that is not finite, or overflows, meets {where}, which gives no example its own share of it. Bound the "
            "inputs (torch.nan_to_num, clamp) before they reach the model. Nothing was released."
        )
    return found


def _lost(found: Shares) -> Tensor:
    return torch.stack([nonfinite_rows(t) for t in found if t is not None] or [torch.zeros(1, dtype=torch.bool)]).any(0)


def _like(rows: Tensor, t: Tensor) -> Tensor:
    return rows.to(t.device).reshape(-1, *(1 for _ in t.shape[1:]))

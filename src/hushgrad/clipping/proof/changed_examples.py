"""What the other examples are replaced by when the seal looks for influence.

They become ordinary, extreme or NaN, or equal to constants that the forward compares its tensors with. A change gets the rows of one
example, examples first, and the rows of all. Integers stay within the values of the batch, except for the forward's own constants.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hushgrad.clipping.proof.inputs import Change

Named = tuple[str, Change]


def changes() -> list[list[Named]]:
    """Changes in groups within which none hides another: ordinary values, values that overflow, and NaN."""
    large = {factor: (f"{abs(factor):g} times as large", partial(_large, factor=factor)) for factor in (1e16, 1e30)}
    filled = {
        value: [(str(value), partial(_filled, value=value)), (f"{value} somewhere", partial(_somewhere, value=value))]
        for value in (math.nan, math.inf, 3e38)
    }
    ordinary = [("replaced", other), ("replaced", turned), ("zero", _zero), ("shorter", short), ("equal", _equal)]
    return [
        [*ordinary, *_LARGE],
        [large[1e16], large[1e30], *filled[3e38]],
        [*filled[math.nan], *filled[math.inf]],
        [("shorter", short)],  # all of them
    ]


def beyond() -> list[Named]:
    """Changes of integers to one more than the largest, everywhere and in one place, and to one less than the smallest."""
    return [("larger integers", _more), ("a larger integer somewhere", _more_somewhere), ("smaller integers", _fewer)]


def extremes() -> list[Named]:
    """Changes of integers to the smallest one of the batch everywhere, and to the largest."""
    return [("the smallest integer throughout", _smallest), ("the largest integer throughout", _equal)]


def _more(t: Tensor, every: Tensor) -> Tensor:
    counts = not t.is_floating_point() and t.dtype is not torch.bool and every.numel() > 0
    return torch.full_like(t, min(int(every.max()) + 1, torch.iinfo(t.dtype).max)) if counts else t


def _more_somewhere(t: Tensor, every: Tensor) -> Tensor:
    made = t.clone(memory_format=torch.contiguous_format)
    made.view(-1)[-1:] = _more(t, every).reshape(-1)[-1:]
    return made


def _fewer(t: Tensor, every: Tensor) -> Tensor:
    counts = not t.is_floating_point() and t.dtype is not torch.bool and every.numel() > 0
    return torch.full_like(t, max(int(every.min()) - 1, 0)) if counts and int(every.min()) >= 0 else t


def constant(value: float, *, anew: bool) -> list[Named]:
    """Changes to a number that the forward compares something with: everywhere, in one place, and its neighbours.

    Args:
        value: the number.
        anew: whether integers may take values that do not occur in the batch.
    """
    near = 0.01 * max(1.0, abs(value))
    made: list[Named] = [
        (f"{value:g}", partial(_set, value=value, anew=anew)),
        (f"{value:g} somewhere", partial(_put, value=value, anew=anew)),
    ]
    return made + [(f"near {value:g}", partial(_set, value=value, anew=anew, by=by)) for by in (near, -near)]


def halved(value: float, *, anew: bool) -> Change:
    """The second half of each example's positions (or features) becomes this number."""

    def change(t: Tensor, every: Tensor) -> Tensor:
        if t.dim() < 2 or t.shape[1] < 2:
            return t
        made = t.clone()
        made[:, (t.shape[1] + 1) // 2 :] = _set(t, every, value, anew=anew)[:, (t.shape[1] + 1) // 2 :]
        return made

    return change


def _set(t: Tensor, every: Tensor, value: float, *, anew: bool, by: float = 0.0) -> Tensor:
    if t.is_floating_point():
        return torch.full_like(t, _held(t, value + by))
    whole = int(value) + (by > 0) - (by < 0)
    if t.dtype is torch.bool or not anew:
        there = t.dtype is not torch.bool and bool((every == whole).any())
        return torch.full_like(t, whole) if there or (t.dtype is torch.bool and whole in (0, 1)) else t
    bounds = torch.iinfo(t.dtype)
    return torch.full_like(t, whole) if bounds.min <= whole <= bounds.max else t


def _put(t: Tensor, every: Tensor, value: float, *, anew: bool) -> Tensor:
    """Set one element."""
    if not t.numel():
        return t
    made = t.clone(memory_format=torch.contiguous_format)
    made.view(-1)[-1] = _set(t, every, value, anew=anew).reshape(-1)[-1]
    return made


def turned(t: Tensor, every: Tensor) -> Tensor:
    """Negated or reversed."""
    return -other(t, every) if t.is_floating_point() else t


def _equal(t: Tensor, every: Tensor) -> Tensor:
    return torch.full_like(t, every.max().item()) if t.numel() and not t.is_floating_point() else t


def _smallest(t: Tensor, every: Tensor) -> Tensor:
    return torch.full_like(t, every.min().item()) if t.numel() and not t.is_floating_point() else t


def other(t: Tensor, _: Tensor) -> Tensor:
    """Somewhat larger; integers are permuted."""
    if t.is_floating_point():
        return (t + 0.1 * (1 + t.abs())) * 10
    return t.flip(-1) if t.dim() else t


def _zero(t: Tensor, every: Tensor) -> Tensor:
    return torch.zeros_like(t) if t.is_floating_point() or not bool(every.all()) else t


def _filled(t: Tensor, _: Tensor, value: float) -> Tensor:
    return torch.full_like(t, _held(t, value)) if t.is_floating_point() else t


def _large(t: Tensor, _: Tensor, factor: float) -> Tensor:
    return (t + (t == 0)) * factor if t.is_floating_point() else t


_LARGE = [(f"{abs(factor):g} times as large", partial(_large, factor=factor)) for factor in (1e4, -1e8)]


def _somewhere(t: Tensor, _: Tensor, value: float) -> Tensor:
    """Set one element."""
    if not t.is_floating_point() or not t.numel():
        return t
    made = t.clone(memory_format=torch.contiguous_format)
    made.view(-1)[0] = _held(t, value)
    return made


def _held(t: Tensor, value: float) -> float:
    """The value, clamped to what the dtype can hold: half precision ends at 65,504."""
    top = torch.finfo(t.dtype).max
    return max(-top, min(value, top)) if math.isfinite(value) else value


def short(t: Tensor, every: Tensor) -> Tensor:
    """The second half of each example's positions (or features) becomes 0, or a copy of the first half where no integer is 0."""
    if t.dim() < 2:
        return t // 2 if not t.is_floating_point() and t.dtype is not torch.bool else t
    made = t.clone()
    # integers stay within the batch's values: no table row is read that the batch does not read
    made[:, (t.shape[1] + 1) // 2 :] = 0 if t.is_floating_point() or not bool(every.all()) else t[:, :1]
    return made


# Kinds for crowds: some use up capacity, others set a flag. Each acts on every row separately.
KINDS: list[Change] = [turned, other, *(change for _, change in _LARGE), _zero, short, _equal]

# Kinds that change which rows are linked.
LINKED: list[Change] = [other, short, _zero, _equal]

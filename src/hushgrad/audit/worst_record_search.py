"""``worst_record``: a search for the record that moves a clipped sum most, in the arithmetic that runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad import _check

Record = tuple[Tensor, ...]
Sums = Mapping[str, Tensor]
_LARGEST = 3.4e38  # largest number in single precision


class Worst(NamedTuple):
    """How far the worst record found moves the sum, in clip norms; the record; the try that found it (0: the first record)."""

    moved: float
    record: Record
    found: int


def worst_record(
    total: Callable[[Record | None], Sums],
    record: Record,
    *,
    clip_norm: float = 1.0,
    tries: int = 200,
    seed: int = 0,
    others: Sequence[Record] = (),
) -> Worst:
    r"""Search for the record r that maximises ‖S(D + r) - S(D)‖ / ``clip_norm``: more than 1 is more than clipping promises.

    In real numbers a clipped sum moves by at most the clip norm C. In floating point a record may move it by thousands of C: parts that
    cancel absorb what others have added, squares underflow in a norm. The search starts from an ordinary record and changes it
    without gradients, by templates of what goes wrong (cancelling halves, coinciding positions, outliers, underflow, denormals, the
    largest floats, infinities, NaN), and keeps the best so far. It can refute a bound, never prove one.

    Args:
        total: from a record, or None for no record, to the clipped sums of a fixed set of *other* examples and this record.
        record: the first record: floating-point tensors are searched, their first dimension being the record's positions, if it has
            several; of integer tensors (ids) entries are made equal and exchanged.
        clip_norm: C.
        tries: records to try.
        seed: of the search; the same seed finds the same record.
        others: records to borrow from, whole (a duplicate of somebody) or one tensor of them (a wrong label).

    **Formal guarantee.** ``Worst.moved`` is attained by ``Worst.record``: it is a lower bound of the sum's sensitivity / C.

        >>> from hushgrad.clipping import Capture, Flat
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(20, 3), torch.randn(20, 2)
        >>> capture = Capture(model, loss_reduction="sum", check_isolation=False)  # the search is about sums
        >>> capture.attach()
        >>> def total(record):
        ...     a, b = (x, y) if record is None else (torch.cat([x, record[0][None]]), torch.cat([y, record[1][None]]))
        ...     ((model(a) - b) ** 2).sum().backward()
        ...     return capture.collect(Flat(1.0)).raw_sums
        >>> worst_record(total, (torch.ones(3), torch.ones(2)), tries=20).moved < 1.0001
        True
    """
    _check.positive(clip_norm=clip_norm)
    generator = torch.Generator().manual_seed(_check.integer(0, seed=seed))
    without = _double(total(None))

    def moved(candidate: Record) -> float:
        sums = _double(total(candidate))
        distance = math.sqrt(sum(float((sums[name] - without[name]).square().sum()) for name in without)) / clip_norm
        return distance if math.isfinite(distance) else math.inf

    best = Worst(moved(record), record, 0)
    for count in range(1, _check.integer(0, tries=tries) + 1):
        candidate = best.record
        for _ in range(1 + _below(3, generator)):
            borrows = others and _below(4, generator) == 0
            candidate = _borrowed(candidate, others, generator) if borrows else _changed(candidate, generator)
        distance = moved(candidate)
        if distance >= best.moved:  # equal ones too, so that the search can drift
            best = Worst(distance, candidate, count if distance > best.moved else best.found)
    return best


def _double(sums: Sums) -> dict[str, Tensor]:
    return {name: (t.to_dense() if t.is_sparse else t).detach().double().clone() for name, t in sums.items()}


# Changes of a record -----------------------------------------------------------------------------------------------------


def _below(n: int, generator: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=generator))


def _power(low: float, high: float, generator: torch.Generator) -> float:
    return float(10 ** (low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))))


def _changed(record: Record, generator: torch.Generator) -> Record:
    """A copy with one change, or replaced by one template."""
    record = tuple(t.clone() for t in record)
    floats = [t for t in record if t.is_floating_point() and t.numel()]
    ids = [t for t in record if not t.is_floating_point() and t.numel()]
    if ids and (not floats or _below(4, generator) == 0):
        _exchange(ids[_below(len(ids), generator)], generator)
    elif floats:
        _CHANGES[_below(len(_CHANGES), generator)](floats, generator)
    return tuple(t.clamp_(-_LARGEST, _LARGEST) if t.is_floating_point() and bool(t.isfinite().all()) else t for t in record)


def _borrowed(record: Record, others: Sequence[Record], generator: torch.Generator) -> Record:
    """Another record, or this one with one of its tensors."""
    other = others[_below(len(others), generator)]
    place = _below(len(record) + 1, generator)
    return tuple(
        (theirs if place in (i, len(record)) else own).clone() for i, (own, theirs) in enumerate(zip(record, other, strict=True))
    )


def _exchange(ids: Tensor, generator: torch.Generator) -> None:
    """Make two entries, or all, equal, or permute them."""
    flat, kind = ids.view(-1), _below(3, generator)
    one = flat[_below(flat.numel(), generator)].clone()
    if kind == 0:
        flat[_below(flat.numel(), generator)] = one
    elif kind == 1:
        flat.fill_(int(one))
    else:
        flat.copy_(flat[torch.randperm(flat.numel(), generator=generator)])


def _one(floats: list[Tensor], generator: torch.Generator) -> Tensor:
    return floats[_below(len(floats), generator)]


def _row(t: Tensor, generator: torch.Generator) -> Tensor:
    """A random row: one position, or one entry of a one-dimensional tensor."""
    return t[_below(len(t), generator)] if t.dim() else t


def _scale(floats: list[Tensor], generator: torch.Generator) -> None:
    _one(floats, generator).mul_(_power(-4, 5, generator))


def _cancel(floats: list[Tensor], generator: torch.Generator) -> None:
    """Set the second half of the positions to minus the first."""
    t = _one(floats, generator)
    if t.dim() and len(t) > 1:
        half = len(t) // 2
        t[half : 2 * half] = -t[:half]
        t[2 * half :] = 0


def _coincide(floats: list[Tensor], generator: torch.Generator) -> None:
    t = _one(floats, generator)
    t[...] = _row(t, generator).clone()


def _outlier(floats: list[Tensor], generator: torch.Generator) -> None:
    _row(_one(floats, generator), generator).mul_(_power(0, 5, generator))


def _disturb(floats: list[Tensor], generator: torch.Generator) -> None:
    t = _one(floats, generator)
    noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
    t.add_(noise * t.abs().mean().nan_to_num(0.0, 0.0, 0.0) * _power(-8, 0, generator))


def _blank(floats: list[Tensor], generator: torch.Generator) -> None:
    _row(_one(floats, generator), generator).zero_()


def _refill(floats: list[Tensor], generator: torch.Generator) -> None:
    t = _one(floats, generator)
    t.copy_(torch.randn(t.shape, generator=generator, dtype=torch.float64))


def _opposite(floats: list[Tensor], generator: torch.Generator) -> None:
    """Template: coinciding inputs, gradients that cancel over the positions."""
    *inputs, last = floats
    for t in inputs:
        t.fill_(_power(-2, 1, generator))
    last.fill_(_power(0, 13, generator))
    if last.dim() and len(last) > 1:
        last[len(last) // 2 :] *= -1
        if len(last) % 2:
            last[-1] = 0


def _far_apart(small: tuple[float, float], large: tuple[float, float], floats: list[Tensor], generator: torch.Generator) -> None:
    """Template: one tensor is filled with a power of ten from ``small``, the others with one from ``large``."""
    chosen = _one(floats, generator)
    for t in floats:
        t.fill_(_power(*(small if t is chosen else large), generator))


# Squares of the small ones underflow in single precision, those of the others do not overflow.
_underflow = partial(_far_apart, (-24, -18), (16, 18.9))
_denormal = partial(_far_apart, (-45, -37), (34, 38.5))


def _balance(floats: list[Tensor], generator: torch.Generator) -> None:
    """Multiply one tensor and divide the others by a factor of up to 1e36, so that the gradient stays the same."""
    factor = _power(-36, 36, generator)
    for k, t in enumerate(floats):
        t.mul_(factor if k == 0 else 1 / factor)


def _extreme(floats: list[Tensor], generator: torch.Generator) -> None:
    t = _one(floats, generator).view(-1)
    values = (math.inf, -math.inf, math.nan, _LARGEST, -_LARGEST, 1e-45, 1e-38)
    t[_below(t.numel(), generator)] = values[_below(len(values), generator)]


_CHANGES = (
    _scale, _scale, _cancel, _cancel, _coincide, _outlier, _disturb, _blank, _refill, _opposite, _opposite, _underflow, _denormal, _balance,
    _extreme,
)  # fmt: skip

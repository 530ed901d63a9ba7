"""Decodes tags: a cotangent that comes back multiplied by exactly a power of two belongs to one example."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad._precision import widest
from hushgrad.clipping.layout import LOST, MIXED, NOBODY, Kind, Layout, has, stored
from hushgrad.clipping.runs import largest
from hushgrad.clipping.thresholds import TRIPLE_TOLERANCE

Grads = tuple[Tensor | None, ...]

_WORDS = {
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}  # the integer type of the same width, and the exponent's first bit
_FEW_EXAMPLES = 1 << 11  # the next power of a base (4, 16, 64) still fits into 16 bits
_FEWEST = 1e-30  # smallest normal numbers of types with at least eight exponent bits are below this


class Owners(NamedTuple):
    """The owner of each element of a cotangent; ``proved`` is False if all of it is rounding, or there is none."""

    each: Tensor | None
    proved: bool

    @property
    def clean(self) -> bool:
        """Proved, and no element belongs to several examples."""
        return self.proved and self.each is not None and not has(self.each, MIXED)

    @property
    def silent(self) -> bool:
        """Whether no gradient came back at all, which proves nothing."""
        return self.each is None or not self.each.numel() or [*map(int, stored(self.each).aminmax())] == [NOBODY, NOBODY]


class Digits:
    """Cotangents, and what is known of their owners so far."""

    def __init__(self, grads: Grads, examples: int) -> None:
        self.complex = [g is not None and g.is_complex() for g in grads]
        half = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        dtypes = [g.dtype for g in grads if g is not None] + [torch.bfloat16] * half
        self.eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # of the least precise dtype
        self.least = [0.0 if g is None else _least(g.dtype) for g in grads]
        self.small: list[Tensor | None] = []  # masks of numbers too small for their bits to be exact
        self.grads: list[Tensor | None] = []  # the gradients with 0 there
        for g, least in zip(grads, self.least, strict=True):
            whole, small = (None, None) if g is None else _without_small(_wide(g), least)
            self.grads.append(whole)
            self.small.append(small)
        self.sizes, self.finite = _sizes(self.grads)
        self.proved = [size > 0 for size in self.sizes]
        self.examples = examples
        self.word = torch.int16 if examples < _FEW_EXAMPLES else torch.int32
        self.each: list[Tensor | None] = [None for _ in grads]  # the digits so far; MIXED after a contradiction
        self.likely = [None if g is None else _likely(g.shape, examples) for g in self.grads]  # None after a contradiction

    def add(self, grads: Grads, step: int, base: int) -> None:
        """Take in one more digit: multiplying by a power of two adds to the exponent and changes no other bit."""
        for k, first in enumerate(self.grads):
            if first is None:
                continue
            g = grads[k] if k < len(grads) else None
            if g is None:
                self.each[k] = torch.full(first.shape, MIXED, dtype=self.word, device=first.device)
                self.likely[k] = None
                continue
            g = _wide(g)
            likely = self.likely[k]
            if likely is not None:
                numbers = likely.owners(first.shape, self.examples, first.device)
                if self._agrees(k, first, g, powers(numbers // step % base, base)):
                    continue
                self.each[k] = (numbers % step).to(self.word).expand(first.shape) if step > 1 else None
                self.likely[k] = None
            self._add(k, first, g, step, base)

    def _agrees(self, k: int, first: Tensor, g: Tensor, scale: Tensor) -> bool:
        """Whether all numbers are multiplied by exactly this factor, bit for bit."""
        fits = self.finite[k] and self.sizes[k] * float(scale.max()) < torch.finfo(first.dtype).max
        return fits and _is_nothing((first * scale.to(first.dtype)).sub_(g))

    def _add(self, k: int, first: Tensor, g: Tensor, step: int, base: int) -> None:
        before, small = self.each[k], self.small[k]
        word, low = _WORDS[g.dtype]
        more = g.view(word) - first.view(word)
        digit = more >> low
        nothing = ((first == 0) & (g.abs() <= base * self.least[k])) | ~first.isfinite()  # NaN does not show its owner
        if small is not None:
            nothing |= small & (g.abs() <= 2.0 ** (base - 1) * self.least[k])
        mixed = ~nothing & ((more & ((1 << low) - 1) != 0) | (digit < 0) | (digit >= base))
        number = (step * digit.clamp_(0, base)).to(self.word)
        if before is not None:
            mixed |= before == MIXED
            number += before
        self.each[k] = number.masked_fill_(mixed, MIXED)

    def spare(self, grads: Grads, near: Tensor) -> None:
        """Given cotangents for huge losses of all but the ``near`` examples: whether what ``near`` own is unchanged, bit for bit."""
        for k, first in enumerate(self.grads):
            g, likely = grads[k] if k < len(grads) else None, self.likely[k]
            if first is None or g is None:
                continue
            g = _wide(g)
            if likely is not None:
                which = near.nonzero().flatten()
                if _is_nothing(likely.only(g, which, self.examples) - likely.only(first, which, self.examples)):
                    continue
                self.each[k] = likely.owners(first.shape, self.examples, first.device).to(self.word).expand(first.shape)
                self.likely[k] = None
            own = self.each[k]
            if own is not None:
                one = (own >= 0) & (own < self.examples) & near.to(own.device)[own.clamp(0, self.examples - 1).long()]
                reached = one & (g != first) & (first != 0) & first.isfinite() & g.isfinite()
                self.each[k] = own.masked_fill(reached, MIXED)

    def close(self) -> None:
        """All digits are in: keep the owners, and free the cotangents."""
        for k in range(len(self.grads)):
            g, own, likely, self.grads[k], self.small[k] = self.grads[k], self.each[k], self.likely[k], None, None
            if g is None:
                continue
            if likely is not None:
                own = self._confirmed(g, likely)
            elif own is not None:
                own.masked_fill_((own >= self.examples) & (g != 0) & g.isfinite(), MIXED)
                one = own != MIXED
                own.masked_fill_(one & (g == 0), NOBODY).masked_fill_(one & ~g.isfinite(), LOST)
            if own is not None and self.complex[k]:  # a complex number has two parts: both must have one owner
                low, high = own.amin(-1), own.amax(-1)
                own = torch.where((low == high) | (low == NOBODY) | (low == LOST), high, MIXED)
            self.each[k] = None if own is None else _compact(own)

    def _confirmed(self, g: Tensor, likely: Layout) -> Tensor:
        """The owners of finite numbers, if every one of them confirms the likely layout."""
        own = likely.owners(g.shape, self.examples, g.device).to(self.word)
        there = g.sign().abs_().to(self.word)  # 1 or 0: multiplying takes a fifth of the time of masking
        return own.expand(g.shape) if not g.numel() or bool(there.amin()) else own.sub(NOBODY).mul(there).add_(NOBODY)

    def ask(self, k: int, once: Tensor | None, tripled: Tensor | None) -> None:
        """Whether a small cotangent triples when the outputs' cotangents triple; if not, it is rounding."""
        self.proved[k] = once is not None and tripled is not None and _is_multiple(_wide(once), _wide(tripled), self.least[k])

    def owners(self) -> list[Owners]:
        """In the smallest integer type that holds them."""
        return [Owners(each, proved) for each, proved in zip(self.each, self.proved, strict=True)]


def powers(digits: Tensor, base: int) -> Tensor:
    """2^digit, exactly, whatever the accuracy of the device's own pow."""
    return torch.tensor([2.0**k for k in range(base)], device=digits.device, dtype=torch.float32)[digits]


def _likely(shape: torch.Size, examples: int) -> Layout | None:
    """The layout that most tensors have: a guess that every bit must confirm before it counts."""
    for dim, size in enumerate(shape[:2]):
        if size == examples:
            return Layout(Kind.DIM, dim)
        if dim == 0 and size and size % examples == 0:
            return Layout(Kind.MAJOR, dim, size // examples)
    return None


def _is_nothing(t: Tensor) -> bool:
    """Whether a tensor is 0 throughout. Minimum and maximum take a fifth of the time of a comparison."""
    return not t.numel() or not any(map(bool, t.aminmax()))


def _compact(own: Tensor) -> Tensor:
    """The same numbers; a dimension along which all are equal is stored once."""
    kept = own
    for dim in range(own.dim() if own.numel() else 0):
        one, next_to_it = kept.narrow(dim, 0, 1), kept.narrow(dim, 0, min(2, own.shape[dim]))  # which nearly always decides
        if not own.stride(dim) or (bool((next_to_it == one).all()) and bool((kept == one).all())):
            kept = one
    return kept.clone().expand(own.shape)


def _least(dtype: torch.dtype) -> float:
    """Smaller numbers may be subnormal, so that a power of two does not scale them bit for bit; 0 for dtypes with few exponents."""
    number = torch.finfo(dtype)
    return number.tiny / number.eps if number.tiny < _FEWEST else 0.0


def _without_small(g: Tensor, least: float) -> tuple[Tensor, Tensor | None]:
    """``g`` with 0 for what is below ``least``, and a mask of it: masked attention produces such numbers, with 5 bits of 24."""
    shrunk = torch.nn.functional.hardshrink(g, least) if least else g
    if shrunk is g or _is_nothing(shrunk - g):
        return g, None
    small = (g.abs() < least) & (g != 0)
    return g.masked_fill(small, 0.0), small


def _sizes(grads: list[Tensor | None]) -> tuple[list[float], list[bool]]:
    """The largest finite number of each of these, and whether all are finite."""
    sizes = [0.0 if g is None or not g.numel() else max(abs(float(v)) for v in g.aminmax()) for g in grads]
    finite = [math.isfinite(size) for size in sizes]
    return [s if ok or g is None else largest(g) for g, s, ok in zip(grads, sizes, finite, strict=True)], finite


def _wide(g: Tensor) -> Tensor:
    g = torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g.detach()
    return (g if g.dtype in _WORDS else g.float()).contiguous()


def _is_multiple(g: Tensor, tripled: Tensor, least: float) -> bool:
    g = g.masked_fill(g.abs() < least, 0.0)
    g, tripled = (widest(t).nan_to_num(0, 0, 0) for t in (g, tripled))
    return bool((tripled - 3 * g).norm() <= TRIPLE_TOLERANCE * tripled.norm())

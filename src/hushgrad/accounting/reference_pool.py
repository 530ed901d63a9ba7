r"""The reference pool: a filter for a plan that was declared in advance, whose steps may be taken adaptively at no extra cost.

Fix reference steps A_1, ..., A_m and their counts T_1, ..., T_m in advance. Every step is assigned, by its event and by nothing that
happened, to a reference that dominates it (all directions, all epsilons), and is admitted as long as that one has copies left.

Theorem. Everything admitted is together dominated by the composition of all T_i copies of all A_i, although each step, its noise, the order
and the decision to go on may depend on all outputs before. Proof. Let D_R(eps) be the profile of the references R that are left. A step
with privacy loss L that uses up A satisfies E[D_{R - A}(eps - L)] <= D_R(eps), because A dominates it and D is an increasing function of
the loss (docs/explanation/pld.md, lemma 1). So along any adaptive path D_R(eps - losses so far) is a supermartingale, and at the end D
is at least (1 - e^eps)_+, the profile of nothing. ∎

Plain Gaussians are one reference with the sum of their mu^2: a part of it is used up by each (Smith and Thakurta 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from hushgrad import _check
from hushgrad.accounting.base import count_leaves
from hushgrad.accounting.participation import poisson_rate
from hushgrad.events import Compose, Event, Gaussian, Sampled


@dataclass
class Pool:
    """What is left of a declared plan. ``take`` says whether an event still fits, and if so uses up its part.

    >>> pool = Pool(Gaussian(1.0).sampled(rate=0.01) * 100)
    >>> pool.take(Gaussian(1.5).sampled(rate=0.005) * 60), pool.take(Gaussian(1.0).sampled(rate=0.01) * 41)
    (True, False)
    >>> print(pool.used)
    60 x Poisson(0.01) Gaussian(1)
    """

    plan: Event
    _counts: dict[Event, int] = field(init=False)
    _taken: dict[Event, int] = field(init=False)
    _square: Fraction = field(init=False)  # exact, so that a plan fits its own pool and nothing more does
    _square_taken: Fraction = field(init=False, default=Fraction(0))

    def __post_init__(self) -> None:
        counts: dict[Event, int] = {}
        count_leaves(_check.instance(Event, plan=self.plan), 1, counts)
        self._counts = {leaf: n for leaf, n in counts.items() if not _is_plain(leaf)}
        self._square = sum((n * _square(leaf) for leaf, n in counts.items() if _is_plain(leaf)), Fraction(0))
        self._taken = dict.fromkeys(self._counts, 0)

    def take(self, event: Event) -> bool:
        """Whether ``event`` is covered by what is left; if so, its references are used up."""
        counts: dict[Event, int] = {}
        count_leaves(event, 1, counts)
        taken, square = dict(self._taken), self._square_taken
        for leaf, n in counts.items():
            reference = self._reference(leaf)
            if reference is not None:
                taken[reference] += n
            elif self._square > 0 and _distance(leaf) is not None:
                square += n * _square(leaf)
            else:
                return False
        if square > self._square or any(n > self._counts[leaf] for leaf, n in taken.items()):
            return False
        self._taken, self._square_taken = taken, square
        return True

    @property
    def used(self) -> Event:
        """The references that were used up, as an event."""
        parts = [leaf * n for leaf, n in self._taken.items() if n]
        if self._square_taken > 0:
            parts.append(Gaussian(_multiplier(self._square_taken)))
        return parts[0] if len(parts) == 1 else Compose(parts)

    def _reference(self, leaf: Event) -> Event | None:
        """The reference that a leaf uses: itself, else the one with the least distance, then rate, that dominates it."""
        if leaf in self._counts:
            return leaf
        size = _distance(leaf)
        if size is None or _is_plain(leaf):
            return None
        above = [(other, known) for known in self._counts if (other := _distance(known)) is not None and _at_most(size, other)]
        return min(above, key=lambda found: found[0])[1] if above else None


def _distance(leaf: Event) -> tuple[float, float] | None:
    """(-noise multiplier, rate) of a (sampled) Gaussian: its profile grows with both (``pld/bounds/merge_steps``). None for others."""
    rate = poisson_rate(leaf)
    of = leaf.of if isinstance(leaf, Sampled) and rate is not None else leaf
    if not isinstance(of, Gaussian) or of.noise_multiplier == 0:
        return None
    return -of.noise_multiplier, 1.0 if rate is None else rate


def _at_most(size: tuple[float, float], other: tuple[float, float]) -> bool:
    return size[0] <= other[0] and size[1] <= other[1]


def _is_plain(leaf: Event) -> bool:
    return isinstance(leaf, Gaussian) and leaf.noise_multiplier > 0


def _square(leaf: Event) -> Fraction:
    of = leaf.of if isinstance(leaf, Sampled) else leaf
    assert isinstance(of, Gaussian)
    return 1 / Fraction(of.noise_multiplier) ** 2


def _multiplier(square: Fraction) -> float:
    """The largest noise multiplier s with 1/s^2 >= ``square``, to a few last digits."""
    found = 1 / math.sqrt(square)
    while Fraction(found) ** 2 * square > 1:
        found = math.nextafter(found, 0.0)
    return found

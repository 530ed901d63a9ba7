"""Accountants: from an event to a privacy loss, and from there to epsilon.

The recursion over compositions is written once, here, in :meth:`Accountant.loss`. An accountant adds only *leaf* analyses,
one small function per event type, so no branch can forget a count:

    @MyAccountant.analyses(Gaussian)
    def _(event, relation): return MyLoss(...)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from hushgrad._papers import Paper
from hushgrad.accounting.participation import simplified
from hushgrad.errors import NoTheorem
from hushgrad.events import Compose, Event, NonPrivate, OneOf, Relation, Repeat, RepeatAndSelect, Sampled, Unanalysed


class Loss(Protocol):
    """A privacy loss: an RDP curve, a privacy-loss distribution, a rho, a list of (epsilon, delta).

    >>> from hushgrad.accounting import PLD
    >>> from hushgrad.events import Gaussian
    >>> loss = PLD().loss(Gaussian(4.0))
    >>> print(f"epsilon {loss.epsilon(1e-5):.3f} at delta 1e-5, delta {loss.delta(0.5):.4f} at epsilon 0.5")
    epsilon 0.926 at delta 1e-5, delta 0.0027 at epsilon 0.5
    """

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon known to hold at this delta; rounded up, never below the truth."""

    def delta(self, epsilon: float) -> float:
        """The smallest delta known to hold at this epsilon; rounded up, never below the truth."""


class Nothing(Loss):
    """The loss of doing nothing, which does not change a composition."""

    def epsilon(self, delta: float) -> float:
        return 0.0

    def delta(self, epsilon: float) -> float:
        return 0.0


class Unbounded(Loss):
    """The loss of a computation without (known) privacy: epsilon is infinite, whatever it is composed with."""

    def epsilon(self, delta: float) -> float:
        return math.inf

    def delta(self, epsilon: float) -> float:
        return 1.0


Leaf = Callable[[Any, Relation], Loss]
L = TypeVar("L", bound=Leaf)


class Accountant(ABC):
    """Turns events into losses. Subclasses are final: they set ``name`` and register leaf analyses.

    >>> from hushgrad.accounting import PLD, RDP
    >>> from hushgrad.events import Gaussian
    >>> [accountant.name for accountant in (PLD(), RDP())]
    ['pld', 'rdp']
    >>> print(f"{RDP().loss(Gaussian(4.0)).epsilon(1e-5):.3f}")
    1.012
    """

    name: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    _leaves: ClassVar[dict[type[Event], Leaf]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._leaves = {}

    @classmethod
    def analyses(cls, *kinds: type[Event]) -> Callable[[L], L]:
        """Decorator: registers ``leaf(event, relation) -> Loss`` for some event types."""

        def register(leaf: L) -> L:
            for kind in kinds:
                cls._leaves[kind] = leaf
            return leaf

        return register

    @abstractmethod
    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        """The loss of composing ``(loss, times)`` parts, all of them nontrivial losses of this accountant."""

    def loss(self, event: Event, relation: Relation = Relation.ADD_REMOVE) -> Loss:
        """The loss of ``event``. The one place where compositions are unfolded.

        Raises:
            NoTheorem: where this accountant has no analysis for a part of the event.
        """
        counts: dict[Event, int] = {}
        count_leaves(event, 1, counts)
        parts: list[tuple[Loss, int]] = []
        for leaf_event, times in counts.items():
            loss = self._leaf(leaf_event, relation)
            if isinstance(loss, Unbounded):
                return loss
            if not isinstance(loss, Nothing):
                parts.append((loss, times))
        return self.total(parts) if parts else Nothing()

    def _leaf(self, event: Event, relation: Relation) -> Loss:
        trivial = trivial_loss(event)
        if trivial is not None:
            return trivial
        leaf = self._leaves.get(type(event))
        if leaf is None:
            others = " or ".join(kind.name for kind in Accountant.__subclasses__() if type(event) in kind._leaves)
            remedy = f"Ask {others}, or describe" if others else "Describe"
            raise NoTheorem(
                f"The {self.name} accountant has no analysis of {type(event).__name__}. {remedy} the step by a known event."
            )
        return leaf(event, relation)


def trivial_loss(event: Event) -> Loss | None:
    """The loss of a leaf that needs no theorem: doing nothing, or something without privacy (sampled or not); else None."""
    if isinstance(event, (NonPrivate, Unanalysed)):
        return Unbounded()
    if not isinstance(event, (Sampled, RepeatAndSelect, OneOf)):
        return None
    inner: dict[Event, int] = {}
    for part in event.events if isinstance(event, OneOf) else (event.of,):
        count_leaves(part, 1, inner)
    losses = [trivial_loss(part) for part in inner]
    if any(isinstance(loss, Unbounded) for loss in losses):
        return Unbounded()
    return Nothing() if all(isinstance(loss, Nothing) for loss in losses) else None


def count_leaves(event: Event, times: int, counts: dict[Event, int]) -> None:
    """Count the leaves of a tree of compositions; equal leaves are counted together, so each is analysed once."""
    pending = [(event, times)]
    while pending:
        event, times = pending.pop()
        if times == 0:
            continue
        if isinstance(event, Compose):  # count equal entries first: a ledger may have millions of a few kinds
            pending.extend((part, n * times) for part, n in reversed(Counter(event.events).items()))
        elif isinstance(event, Repeat):
            pending.append((event.of, times * event.times))
        elif isinstance(event, Sampled) and (simpler := simplified(event)) is not None:
            pending.append((simpler, times))
        else:
            counts[event] = counts.get(event, 0) + times

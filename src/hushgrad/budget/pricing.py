"""What a set of charges costs together, and what would still fit. The only file here that asks an accountant."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from hushgrad import events
from hushgrad._printed import at_most
from hushgrad.budget.values import Dataset
from hushgrad.errors import NoTheorem
from hushgrad.events import Event


def fits(dataset: Dataset, charges: tuple[Event, ...]) -> bool:
    """Whether ``charges`` together are within the budget."""
    return price(dataset, charges) <= dataset.epsilon


@lru_cache(maxsize=256)
def price(dataset: Dataset, charges: tuple[Event, ...]) -> float:
    """The composed epsilon of ``charges`` at the data set's delta; infinite where no theorem covers them."""
    if not charges:
        return 0.0
    try:
        if dataset.composition == "pld":
            return _composed(dataset, charges)
        return (
            _adaptive(dataset, charges) if dataset.composition == "adaptive" else _filtered(dataset, charges, dataset.composition)
        )
    except NoTheorem:
        return math.inf  # a budget fails closed


def _composed(dataset: Dataset, charges: tuple[Event, ...]) -> float:
    """Composed by privacy-loss distributions. For a part without one (a selection, a rho) two bounds hold, and the better one is used.

    Everything by Rényi divergences, or each such part as an (epsilon_i, delta_i)-DP step, whose deltas are half of the budget's.
    """
    event = events.Compose(charges)
    found = _epsilon(dataset, event)
    known = [_has_distribution(dataset, part) for part in event.events] if math.isinf(found) else []
    if all(known):
        return found
    share = dataset.delta / (2 * known.count(False))
    steps = (part if fine else _as_step(dataset, part, share) for part, fine in zip(event.events, known, strict=True))
    return min(_epsilon(dataset, event, accountant="rdp"), _epsilon(dataset, events.Compose(steps)))


def _epsilon(dataset: Dataset, event: Event, *, delta: float | None = None, accountant: str = "pld") -> float:
    """What an accountant says at the data set's delta, or at another one; infinite where it has no theorem."""
    from hushgrad import accounting  # scipy: only where something is to be priced

    at = dataset.delta if delta is None else delta
    try:
        return accounting.epsilon(event, delta=at, relation=dataset.relation, accountant=accountant)
    except NoTheorem:
        return math.inf


@lru_cache(maxsize=256)
def _has_distribution(dataset: Dataset, event: Event) -> bool:
    from hushgrad.accounting.api import accountant_of

    try:
        accountant_of("pld").loss(event, dataset.relation)
    except NoTheorem:
        return False
    return True


def _as_step(dataset: Dataset, event: Event, share: float) -> Event:
    epsilon = _epsilon(dataset, event, delta=share, accountant="rdp")
    return events.ApproxDP(epsilon, share) if math.isfinite(epsilon) else events.NonPrivate()


def _adaptive(dataset: Dataset, charges: tuple[Event, ...]) -> float:
    """By the pool of the declared plan; else by what the first run, which was planned before anything was seen, decides.

    The decision depends on public values only, so choices made after looking cannot bend it: the Rényi filter at the order that suits
    the first run if that fits (then others may follow, whatever they are), else the pool of that run alone, which costs nothing.
    """
    if dataset.plan is not None:
        return _filtered(dataset, charges, "pool", dataset.plan)
    first = charges[0] if dataset.first is None else dataset.first
    if _by_renyi(replace(dataset, first=None), first):
        # the share of the filter says what fits; less than the composed epsilon is never shown
        return max(_filtered(dataset, charges, "rdp", first), _composed(dataset, charges))
    cost = _composed(dataset, (first,))
    if cost > dataset.epsilon:
        return cost
    if not _has_distribution(dataset, first):
        return cost if charges == (first,) else math.inf
    return _filtered(dataset, charges, "pool", first)


@lru_cache(maxsize=256)
def _by_renyi(dataset: Dataset, first: Event) -> bool:
    try:
        return _filtered(dataset, (first,), "rdp", first) <= dataset.epsilon
    except NoTheorem:  # no finite divergence, or no order with room for it
        return False


def _filtered(dataset: Dataset, charges: tuple[Event, ...], kind: str, plan: Event | None = None) -> float:
    """The used share of a privacy filter, in units of the budget's epsilon."""
    from hushgrad.accounting import Filter

    budget = Filter(epsilon=dataset.epsilon, delta=dataset.delta, kind=kind, relation=dataset.relation, plan=plan)
    return budget.used_with(events.Compose(charges)) * dataset.epsilon


def exceeds(dataset: Dataset, happened: Event, reserved: Event, others: tuple[Event, ...] = ()) -> bool:
    """Whether what happened costs more than what was reserved for it, together with all ``others`` that are charged.

    A part of the reserved steps is less by definition, whatever the last digits of two epsilons are; other events are compared by
    their epsilon at the budget's delta. Two events with the same epsilon may compose differently, so what happened must also leave
    everything together within the budget.
    """
    if is_part(happened, reserved):
        return False
    of, times = _repeated(reserved)
    if _repeated(happened)[0] == of:
        return _repeated(happened)[1] > times
    cost = price(dataset, (happened,))
    if math.isinf(cost) or cost > price(dataset, (reserved,)):
        return True
    together = price(dataset, (*others, happened))
    return together > max(dataset.epsilon, price(dataset, (*others, reserved)))


def is_part(happened: Event, reserved: Event) -> bool:
    """Whether everything that happened was reserved, at least as often."""
    from hushgrad.accounting.base import count_leaves

    counts: tuple[dict[Event, int], dict[Event, int]] = ({}, {})
    for event, found in zip((happened, reserved), counts, strict=True):
        count_leaves(event, 1, found)
    return all(n <= counts[1].get(leaf, 0) for leaf, n in counts[0].items())


def _repeated(event: Event) -> tuple[Event, int]:
    return (event.of, event.times) if isinstance(event, events.Repeat) else (event, 1)


# What would fit ---------------------------------------------------------------------------------------------------------


def advice(dataset: Dataset, charges: tuple[Event, ...], event: Event) -> str:
    """How many steps of ``event`` would fit, or which factor of noise would make all of it fit; in one or two sentences."""

    def fit(candidate: Event) -> bool:
        return fits(dataset, (*charges, candidate))

    found = []
    of, times = _repeated(event)
    if times > 1:
        steps = bisect_left(range(1, times), True, key=lambda n: not fit(of * n))  # so many of 1, 2, ... fit
        found.append(f"{steps} of its {times} steps would fit" if steps else "not one of its steps would fit")
    factor = _noise_factor(event, fit)
    if factor is not None:
        found.append(f"all of it would fit with {at_most(factor, 3)} times its noise")
    return f" {found[0][0].upper()}{found[0][1:]}{''.join('; ' + other for other in found[1:])}." if found else ""


def _noise_factor(event: Event, fit: Callable[[Event], bool]) -> float | None:
    """The smallest factor, to 1%, that makes the event fit; None if it has no noise to scale, or a factor of 1000 is not enough."""
    if scaled(event, 2.0) == event:
        return None
    high = 2.0
    while not fit(scaled(event, high)):
        high *= 4.0
        if high > 1000.0:
            return None
    low = 1.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fit(scaled(event, middle)) else (middle, high)
    return high


def scaled(event: Event, factor: float) -> Event:
    """The event with ``factor`` times its Gaussian and Laplace noise, wherever it occurs.

    >>> print(scaled(events.Gaussian(1.5).sampled(rate=0.1) * 10, 2.0))
    10 x Poisson(0.1) Gaussian(3)
    """
    if isinstance(event, (events.Gaussian, events.GaussianMixture)):
        return replace(event, noise_multiplier=event.noise_multiplier * factor)
    if isinstance(event, events.Laplace):
        return replace(event, scale=event.scale * factor)
    if isinstance(event, events.Compose):
        return events.Compose(scaled(part, factor) for part in event.events)
    if isinstance(event, events.OneOf):
        return events.OneOf(scaled(part, factor) for part in event.events)
    if isinstance(event, (events.Sampled, events.Repeat, events.RepeatAndSelect)):
        return replace(event, of=scaled(event.of, factor))
    return event

"""Conformance of accountants: ``check_accountant(MyAccountant())``.

Laws for every accountant, whatever its method: no release costs nothing, a release without noise costs infinity, counts multiply,
more noise never costs more, and no answer is below a known exact value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hushgrad.accounting.base import Accountant
from hushgrad.accounting.contour_estimate import estimate
from hushgrad.accounting.gaussian import gaussian_epsilon
from hushgrad.accounting.optimal import Optimal
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ZCDP,
    ApproxDP,
    Compose,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    GaussianMixture,
    Laplace,
    NonPrivate,
    OneOf,
    PureDP,
    RandomizedResponse,
    Relation,
    Repeat,
    RepeatAndSelect,
    Sampled,
    Unanalysed,
)

_DELTA = 1e-5

EVENTS: tuple[Event, ...] = (
    Gaussian(2.0),
    Gaussian(40.0),
    Laplace(3.0),
    DiscreteGaussian(4.0, 2),
    DiscreteLaplace(6.0, 2),
    RandomizedResponse(0.7, 3),
    Exponential(0.3),
    PureDP(0.2),
    ApproxDP(0.2, 1e-9),
    ZCDP(0.01),
    GaussianMixture(noise_multiplier=2.0, sensitivities=(0.0, 1.0, 2.0), probabilities=(0.9, 0.08, 0.02)),
    Gaussian(1.5).sampled(rate=0.05),
    Laplace(2.0).sampled(rate=0.1),
    PureDP(0.5).sampled(rate=0.1),
    Sampled(FixedSize(dataset_size=1000, size=50), Gaussian(3.0)),
    RepeatAndSelect(of=Gaussian(8.0), mean=5.0, shape=1.0),
    OneOf((Gaussian(8.0), Gaussian(3.0).sampled(rate=0.1) * 4)),
)
"""One small event at least of each kind that an accountant may know: what the conformance tests run over."""


@dataclass(frozen=True)
class _Unheard(Event):
    """An event that no accountant knows."""


def check_accountant(accountant: Accountant, *, delta: float = _DELTA, events: tuple[Event, ...] = EVENTS) -> None:
    """Raise AssertionError, with one sentence, if ``accountant`` breaks a law that holds for every accountant.

    Args:
        accountant: the one to check.
        delta: at which it is asked.
        events: what it is asked about.

    >>> from hushgrad.accounting import GDP
    >>> check_accountant(GDP())

    Events for which the accountant raises ``NoTheorem`` are skipped; at least one must be analysed.
    """
    ask = _Asker(accountant, delta)
    _check_ends(ask)
    analysed = list(_analysed(ask, events))
    assert analysed, f"{accountant.name} analyses none of the events"
    for event, relation in analysed:
        _check_counts(ask, event, relation)
        _check_answers(ask, event, relation)
        _check_relations(ask, event)
    _check_monotone(ask)
    _check_truths(ask)


@dataclass(frozen=True)
class _Asker:
    """One accountant at one delta."""

    accountant: Accountant
    delta: float

    def epsilon(self, event: Event, relation: Relation = Relation.ADD_REMOVE, delta: float | None = None) -> float:
        return self.accountant.loss(event, relation).epsilon(self.delta if delta is None else delta)

    def knows(self, event: Event, relation: Relation = Relation.ADD_REMOVE) -> bool:
        try:
            self.accountant.loss(event, relation)
        except NoTheorem:
            return False
        return True

    def __str__(self) -> str:
        return f"The {self.accountant.name} accountant"


def _analysed(ask: _Asker, events: tuple[Event, ...]) -> Iterator[tuple[Event, Relation]]:
    for event in events:
        for relation in Relation:
            if ask.knows(event, relation):
                yield event, relation
                break  # one relation each; _check_relations compares them


def _check_ends(ask: _Asker) -> None:
    """No release costs nothing, no privacy costs infinity, an unknown event is refused."""
    for nothing in (Compose(()), Repeat(Gaussian(1.0), 0), Repeat(NonPrivate(), 0)):
        assert ask.epsilon(nothing) == 0.0, f"{ask} charges for {nothing!r}, which is doing nothing"
    for lost in (NonPrivate(), Unanalysed("unknown"), NonPrivate() * 3, NonPrivate().sampled(rate=0.1)):
        assert ask.epsilon(lost) == math.inf, f"{ask} gives a finite epsilon for {lost}"
        assert ask.accountant.loss(lost).delta(1.0) == 1.0, f"{ask} gives a delta below 1 for {lost}"
    assert not ask.knows(_Unheard()), f"{ask} gives an answer for an event that it cannot know"


def _check_counts(ask: _Asker, event: Event, relation: Relation) -> None:
    """Repetitions cost the same in whatever form they are written."""
    one, many = ask.epsilon(event, relation), ask.epsilon(event * 12, relation)
    listed = ask.epsilon(Compose([event] * 12), relation)
    assert _same(many, listed), f"{ask} gives {many} for 12 x ({event}) and {listed} when they are listed"
    nested = ask.epsilon(Repeat(Compose([event * 2, event]), 4), relation)
    assert _same(many, nested), f"{ask} gives {many} for 12 x ({event}) and {nested} when they are nested"
    assert many > one * 1.001, f"{ask} charges {many} for 12 x ({event}) and {one} for one: it forgot the count"
    if ask.knows(PureDP(0.1), relation):
        first, last = (ask.epsilon(Compose(parts), relation) for parts in ([event * 3, PureDP(0.1)], [PureDP(0.1), event * 3]))
        assert _same(first, last), f"{ask} lets the order of {event} and PureDP(0.1) matter: {first}, {last}"


def _check_answers(ask: _Asker, event: Event, relation: Relation) -> None:
    """Epsilon and delta are numbers, are consistent, and each falls as the other grows."""
    loss = ask.accountant.loss(event * 4, relation)
    epsilons = [loss.epsilon(d) for d in (1e-9, 1e-7, ask.delta, 1e-3)]
    assert all(e >= 0.0 for e in epsilons), f"{ask} gives an epsilon that is no number of at least 0 for {event}: {epsilons}"
    assert all(a >= b * (1.0 - 1e-9) for a, b in pairwise(epsilons)), (
        f"{ask} lets epsilon grow with delta for 4 x ({event}): {epsilons}"
    )
    claimed = loss.delta(epsilons[2])
    assert claimed <= ask.delta * (1.0 + 1e-4), f"{ask} gives delta {claimed} at epsilon({ask.delta}) of 4 x ({event})"
    deltas = [loss.delta(e) for e in (0.0, 0.1, 1.0, 10.0)]
    assert all(0.0 <= d <= 1.0 for d in deltas), f"{ask} gives a delta outside [0, 1] for {event}: {deltas}"
    assert all(a >= b * (1.0 - 1e-9) for a, b in pairwise(deltas)), (
        f"{ask} lets delta grow with epsilon for 4 x ({event}): {deltas}"
    )


def _check_relations(ask: _Asker, event: Event) -> None:
    """Zeroing a record out is a special case of replacing it."""
    if ask.knows(event, Relation.ZERO_OUT) and ask.knows(event, Relation.REPLACE_ONE):
        zeroed, replaced = ask.epsilon(event, Relation.ZERO_OUT), ask.epsilon(event, Relation.REPLACE_ONE)
        assert zeroed <= replaced * (1.0 + 1e-6), f"{ask} gives {zeroed} for zero-out and {replaced} for replace-one: {event}"


def _check_monotone(ask: _Asker) -> None:
    """Less noise, a larger rate, more steps: never cheaper."""
    ladders: dict[str, list[Event]] = {
        "noise": [Gaussian(s) * 5 for s in (9.0, 3.0, 1.0, 0.5)],
        "scale": [Laplace(b) * 5 for b in (9.0, 3.0, 1.0)],
        "epsilon": [PureDP(e) * 5 for e in (0.01, 0.1, 1.0, 3.0)],
        "rate": [Gaussian(1.2).sampled(rate=q) * 20 for q in (0.001, 0.01, 0.1, 0.5, 1.0)],
        "sampled noise": [Gaussian(s).sampled(rate=0.02) * 50 for s in (8.0, 2.0, 1.0, 0.7)],
        "steps": [Gaussian(2.0).sampled(rate=0.02) * n for n in (1, 10, 100, 1000)],
    }
    for what, ladder in ladders.items():
        if all(ask.knows(event) for event in ladder):
            costs = [ask.epsilon(event) for event in ladder]
            assert all(a <= b * (1.0 + 1e-6) for a, b in pairwise(costs)), f"{ask} is not monotone in the {what}: {costs}"


def _check_truths(ask: _Asker) -> None:
    """No answer is below what is known exactly (or, for sampled Gaussians, to nine digits)."""
    for sigma, steps in ((0.5, 1), (1.0, 1), (10.0, 100), (300.0, 50)):
        _not_below(ask, Gaussian(sigma) * steps, gaussian_epsilon(math.sqrt(steps) / sigma, ask.delta) * (1.0 - 1e-9))
    for sigma, rate, steps in ((1.1, 0.01, 1000), (0.7, 0.004, 2000), (5.0, 0.2, 300)):
        event = Gaussian(sigma).sampled(rate=rate) * steps
        _not_below(ask, event, estimate(event, delta=ask.delta).epsilon * (1.0 - 1e-7))
    for epsilon, steps in ((1.0, 1), (0.1, 100), (0.02, 3000)):
        worst = Optimal().loss(PureDP(epsilon) * steps).epsilon(ask.delta)
        _not_below(ask, PureDP(epsilon) * steps, worst * (1.0 - 1e-6))
    one = 1.0 / 2.0 + 2.0 * math.log1p(-ask.delta)  # Laplace(2): delta = 1 - e^{(epsilon - 1/2)/2}
    _not_below(ask, Laplace(2.0), one * (1.0 - 1e-9))


def _not_below(ask: _Asker, event: Event, truth: float) -> None:
    if ask.knows(event):
        claimed = ask.epsilon(event)
        assert claimed >= truth, f"{ask} claims {claimed} for {event}, below the truth {truth}"


def _same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-9 * max(abs(a), abs(b))

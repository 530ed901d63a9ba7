"""The plans to compare: each mechanism's suggestions, with the sampling that suits its theorem best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hushgrad import noise, sampling
from hushgrad.clipping.flat import Flat
from hushgrad.noise.base import Mechanism
from hushgrad.noise.suggestions import Run, Skipped, Suggestion
from hushgrad.planner.question import Question
from hushgrad.sampling.base import Sampler
from hushgrad.train.plan import Plan


@dataclass(frozen=True)
class Proposal:
    """A plan without its noise multiplier, and its advantage in words; ``work`` and ``family`` are the mechanism's."""

    name: str
    make: Callable[[], Plan]
    why: str
    work: float
    family: str = ""


def proposals(question: Question) -> Iterator[Proposal | Skipped]:
    """All mechanisms that could answer ``question``, in no order."""
    if question.sampling_allowed:
        run = Run(steps=question.sampled_steps, rate=question.rate, workload=question.workload, tune=question.tune_bands)
        yield from _suggested(question, run, partial(_random, question))
    else:
        yield Skipped("random batches", "They were ruled out (sampling_allowed=False).")
    order = _order(question)
    if order is None:
        yield Skipped("fixed order", "A fixed order is passed in whole epochs, and these steps are not: give epochs=.")
    else:
        alone = not question.sampling_allowed
        run = Run(steps=order.steps, participation=order.participation(), workload=question.workload, alone=alone)
        yield from _suggested(question, run, lambda groups: order)
    yield from _own(question, order)


def _suggested(question: Question, run: Run, sampler: Callable[[int], Sampler]) -> Iterator[Proposal | Skipped]:
    """The suggestions of the library's mechanisms for ``run``, as plans with the sampler ``sampler(groups)``."""
    for kind in (vars(noise)[name] for name in noise.__all__ if name in vars(noise)):  # lazily imported names are no mechanisms
        for found in kind.suggestions(run) if isinstance(kind, type) and issubclass(kind, Mechanism) else ():
            yield found if isinstance(found, Skipped) else _proposal(question, found, sampler)


def _proposal(question: Question, found: Suggestion, sampler: Callable[[int], Sampler]) -> Proposal:
    return Proposal(found.name, lambda: _plan(question, sampler(found.groups), found.make()), found.why, found.work, found.family)


def _random(question: Question, groups: int) -> Sampler:
    # As many groups as bands: fewer have no theorem, more would be sampled at a higher rate.
    rate, steps = question.rate, question.sampled_steps
    if groups == 1:
        return sampling.Poisson(rate=rate, steps=steps)
    return sampling.CyclicPoisson(period=groups, rate=groups * rate, steps=steps)


def _order(question: Question) -> Sampler | None:
    epochs = question.whole_epochs
    if epochs is None:
        return None
    return sampling.RoundRobin(batch_size=question.size, dataset_size=question.dataset_size, epochs=epochs)


def _own(question: Question, order: Sampler | None) -> Iterator[Proposal]:
    """The caller's own mechanisms, with random batches and with a fixed order; the ranking drops those without a theorem."""
    samplers: list[tuple[str, Sampler]] = []
    if question.sampling_allowed:
        samplers.append(("random batches", _random(question, 1)))
    if order is not None:
        samplers.append(("fixed order", order))
    for own in question.mechanisms:
        for batches, sampler in samplers:
            make = partial(_plan, question, sampler, own)
            work = 1.0 + own.state_size(steps=sampler.steps)
            yield Proposal(f"your {type(own).__name__}, {batches}", make, "A mechanism of your own.", work)


def _plan(question: Question, sampler: Sampler, noise: Mechanism) -> Plan:
    return Plan(
        steps=sampler.steps,
        batch_size=question.size,
        sampler=sampler,
        clip=Flat(question.max_grad_norm),
        noise=noise,
        delta=question.delta,
        relation=question.relation,
        unit=question.unit,
    )

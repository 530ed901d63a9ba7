"""Which plans are worth comparing: each mechanism with the sampling that its theorem likes best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hushgrad import sampling
from hushgrad.clipping.flat import Flat
from hushgrad.noise import BLT, Banded, Dense, Independent, Nu, Toeplitz, Tree
from hushgrad.noise.base import Mechanism
from hushgrad.planner.question import Question
from hushgrad.sampling.base import Sampler
from hushgrad.train.plan import Plan

__all__ = ["Proposal", "Skipped", "proposals"]

_MOST_BANDS = 64
_DENSE = 64  # steps: the optimisation takes O(n³) for each of many iterations, and should answer within a second
_REGENERATED = 4096  # steps: beyond, drawing all earlier rows again costs more than a training step
_TREE = 1 << 17  # steps whose prefix variances are added up one by one


@dataclass(frozen=True)
class Proposal:
    """A plan without its noise multiplier, and why somebody might want it.

    ``work`` counts the rows of noise that are drawn or combined in an average step; it is 1 for independent noise.
    """

    name: str
    make: Callable[[], Plan]
    why: str
    work: float
    family: str = ""


@dataclass(frozen=True)
class Skipped:
    """A mechanism that cannot serve here, and why."""

    name: str
    why: str


def proposals(question: Question) -> Iterator[Proposal | Skipped]:
    """All mechanisms that could answer ``question``, in no order."""
    if question.sampling_allowed:
        yield from _sampled(question)
    else:
        yield Skipped("DP-SGD, banded", "Random secret batches were ruled out (sampling_allowed=False).")
    epochs = question.whole_epochs
    if epochs is None:
        yield Skipped("fixed order", "A fixed order is passed in whole epochs, and these steps are not: give epochs=.")
    else:
        yield from _ordered(question, epochs)
    yield from _own(question, epochs)


def _own(question: Question, epochs: int | None) -> Iterator[Proposal]:
    """The asker's own mechanisms, with either kind of batches; where one has no theorem, the ranking says so."""
    samplers: list[tuple[str, Sampler]] = []
    if question.sampling_allowed:
        samplers.append(("random batches", sampling.Poisson(rate=question.rate, steps=question.sampled_steps)))
    if epochs is not None:
        order = sampling.RoundRobin(batch_size=question.size, dataset_size=question.dataset_size, epochs=epochs)
        samplers.append(("fixed order", order))
    for noise in question.mechanisms:
        for batches, sampler in samplers:
            name = f"your {type(noise).__name__}, {batches}"
            make = partial(_plan, question, sampler, noise)
            work = 1.0 + noise.state_size(steps=sampler.steps)
            yield Proposal(name, make, "A mechanism of your own.", work)


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


# Random batches: the sampling amplifies ----------------------------------------------------------------------------------


def _sampled(question: Question) -> Iterator[Proposal | Skipped]:
    steps, q = question.sampled_steps, question.rate
    yield Proposal(
        "DP-SGD",
        lambda: _plan(question, sampling.Poisson(rate=q, steps=steps), Independent()),
        f"Every step is amplified by sampling at rate {q:.3g}; its noise adds up over the steps.",
        work=1,
    )
    bands = 2
    while bands <= min(_MOST_BANDS, steps) and bands * q <= 1:
        yield _banded(question, bands)
        bands *= 2
    if bands == 2:
        yield Skipped("Banded", f"Two groups of the data cannot fill batches at rate {q:.3g}, or there is one step only.")


def _banded(question: Question, bands: int) -> Proposal:
    rate = bands * question.rate

    def make() -> Plan:
        # As many groups as bands: fewer have no theorem, more would be sampled at a higher rate.
        sampler = sampling.CyclicPoisson(period=bands, rate=rate, steps=question.sampled_steps)
        return _plan(question, sampler, Banded(bands=bands) if question.tune_bands else Banded.square_root(bands=bands))

    why = f"{bands} bands cancel noise between neighbouring steps; sampling still amplifies, but at rate {rate:.3g}."
    return Proposal(f"Banded({bands})", make, why, work=bands)


# A fixed order: no sampling assumption ------------------------------------------------------------------------------------


def _ordered(question: Question, epochs: int) -> Iterator[Proposal | Skipped]:
    sampler = sampling.RoundRobin(batch_size=question.size, dataset_size=question.dataset_size, epochs=epochs)
    steps = sampler.steps

    def proposal(name: str, noise: Callable[[], Mechanism], why: str, work: float, family: str = "") -> Proposal:
        return Proposal(name, lambda: _plan(question, sampler, noise()), why, work, family)

    if not question.sampling_allowed:
        yield proposal("Independent", Independent, "Needs no sampling and no state, and cancels no noise.", 1)
    for buffers in (2, 3, 4):
        why = f"{buffers} buffers cancel noise over the whole run; no sampling assumption."
        yield proposal(f"BLT({buffers})", lambda k=buffers: BLT(buffers=k), why, 1 + 2 * buffers, "BLT")  # type: ignore[misc]
    if steps <= _TREE:
        levels = math.ceil(math.log2(steps + 1))
        yield proposal("Tree", Tree, "The classical tree of partial sums; no sampling assumption.", 2 + levels)
    else:
        yield Skipped("Tree", f"BLT is better at {steps} steps, and a tree of that size takes long to analyse.")
    yield from _regenerating(proposal, question, sampler)


def _regenerating(proposal: Callable[..., Proposal], question: Question, sampler: Sampler) -> Iterator[Proposal | Skipped]:
    """Mechanisms whose rows need all earlier draws; these are made again, several rows at a time."""
    steps = sampler.steps
    if steps > _REGENERATED:
        yield Skipped("Toeplitz, Nu, Dense", f"Each row would need up to {steps} earlier draws; BLT does with a few buffers.")
        return
    work = steps / 2
    yield proposal("Toeplitz", Toeplitz, "The square root of prefix sums; each row needs all earlier draws.", work)
    yield proposal("Nu", Nu, "The damped square root; each row needs all earlier draws.", work)
    if steps > _DENSE:
        yield Skipped("Dense", f"The best matrix is optimised for at most {_DENSE} steps here; BLT comes close to it.")
        return
    yield proposal(
        "Dense",
        lambda: Dense.optimal(steps=steps, participation=sampler.participation(), workload=question.workload),
        "The best matrix for a fixed order, with a certificate; each row needs all earlier draws.",
        work,
    )

"""The guarantee in plain words, for readers who sign but do not calculate."""

from __future__ import annotations

import math
from functools import lru_cache

from hushgrad._printed import at_most
from hushgrad.events import Relation, RepeatAndSelect
from hushgrad.guarantee import Guarantee
from hushgrad.train.plan import Plan

RELATIONS = {  # what two neighbouring data sets have different
    Relation.ADD_REMOVE: "with and without",
    Relation.REPLACE_ONE: "with one of two versions of",
    Relation.ZERO_OUT: "with and without the content (not the presence) of",
}


@lru_cache(maxsize=32)  # a page of many runs asks again and again
def in_plain_words(guarantee: Guarantee) -> tuple[str, ...]:
    """A few sentences that claim nothing beyond the guarantee.

    >>> from hushgrad.events import NonPrivate
    >>> in_plain_words(Guarantee(epsilon=float("inf"), delta=1e-5, accountant="pld", event=NonPrivate()))[0]
    'Nothing is promised about any example of the training data: this run has no finite epsilon.'
    """
    unit = guarantee.unit
    if math.isinf(guarantee.epsilon):
        return (f"Nothing is promised about any {unit} of the training data: this run has no finite epsilon.",)
    from hushgrad.accounting import attack

    best = attack(guarantee.event, accountant=guarantee.accountant, relation=guarantee.relation)
    delta = guarantee.delta
    return (
        f"Compare two trainings, {RELATIONS[guarantee.relation]} any one {unit}. Whatever is observed about the trained model is at "
        f"most {_factor(guarantee.epsilon)} times as likely in one as in the other, up to a probability of {at_most(delta, 6)}. This holds "
        "against everybody, whatever else they know.",
        str(best).replace("record", unit),
        f"It does not say that facts about one {unit} stay unknown: what many have in common can be learned, and is meant to be.",
    )


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up: the sentence must not promise more than holds."""
    if epsilon > 20:
        return f"e^{math.ceil(epsilon)}"
    return at_most(math.exp(epsilon) * (1 + 2**-50), 3)


def sampling_done(plan: Plan, guarantee: Guarantee, steps: int) -> str:
    """The ledger's account of the batches that were really taken."""
    if math.isinf(guarantee.epsilon):
        return "the ledger holds steps that no analysis covers"
    if steps <= plan.steps and guarantee.event in (plan.event(steps), plan.event()):
        return f"the ledger records {steps} steps on batches of the plan's {type(plan.sampler).__name__} sampler, as assumed"
    if isinstance(guarantee.event, RepeatAndSelect):
        return f"{steps} steps of the winner on batches of the plan's {type(plan.sampler).__name__} sampler, as in every trial"
    return (
        f"{steps} steps; the ledger records {guarantee.event}, which is not this plan alone (earlier phases, or declared batches)"
    )

"""Refuses plans whose parts contradict each other, or that no theorem covers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Participation, Relation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.ciphers import require_cipher
from hushgrad.noise.independent import Independent
from hushgrad.sampling.base import Sampler

if TYPE_CHECKING:
    from hushgrad.accounting import Accountant
    from hushgrad.train.plan import Plan


def require_consistent(plan: Plan) -> None:
    """Refuse parts that do not go together."""
    if plan.sampler.steps != plan.steps:
        _check.fail("steps", plan.steps, f"to be the sampler's steps={plan.sampler.steps}")
    require_comparable(plan.sampler, plan.relation)
    if isinstance(plan.clip, Adaptive):
        _require_adaptive(plan, plan.clip)
    if plan.secure:
        _require_rounding(plan)
    if plan.cipher is not None:
        require_cipher(plan.cipher, secure=plan.secure)
    if plan.pad_to is not None:
        _require_room(plan, _check.positive_int(pad_to=plan.pad_to))


def require_theorems(plan: Plan) -> None:
    """Look up the theorems now: a plan without an accounting is refused before any data is touched."""
    _require_theorem(plan.noise, plan.participation, plan.steps, plan.relation)
    if plan.before is not None:
        _require_finite(plan.before, plan.relation)


def _require_adaptive(plan: Plan, clip: Adaptive) -> None:
    """Refuse adaptive clipping if gradient and count are not one Gaussian mechanism: noise must be independent, and the divisor one."""
    if not isinstance(plan.noise, Independent):
        raise NoTheorem(
            "Adaptive clipping moves the clip norm, and correlated noise needs a constant one. Use independent noise."
        )
    if clip.batch_size != plan.batch_size:
        _check.fail("clip.batch_size", clip.batch_size, f"to be the plan's batch_size={plan.batch_size}")
    if plan.noise_multiplier is not None:
        clip.gradient_noise(plan.noise_multiplier)


def _require_room(plan: Plan, pad_to: int) -> None:
    """Require, for batches of one size, a sampler that never deals more."""
    most = plan.sampler.most
    if most is None:
        remedy = 'Use sampling="truncated_poisson", "fixed_size" or "round_robin".'
        _check.fail("pad_to", pad_to, "to go with a sampler whose batches have a public largest size", remedy)
    if most > pad_to:
        _check.fail("pad_to", pad_to, f"to be at least the sampler's largest batch of {most}")


def _require_rounding(plan: Plan) -> None:
    """Require fresh noise in each step for correct rounding of the sum plus noise."""
    if not isinstance(plan.noise, Independent):
        raise NoTheorem(
            "No theorem covers correlated rows that are correctly rounded: their recursion would need an error bound that grows "
            "with the steps. Use independent noise with secure=True."
        )
    if plan.noise_multiplier == 0:
        _check.fail("noise_multiplier", 0, "to be positive with secure=True", "Without noise there is no grid.")


def require_comparable(sampler: Sampler, relation: Relation) -> None:
    """Refuse a relation under which a neighbour's *other* records would be dealt to other steps.

    Raises:
        NoTheorem: for add/remove over a fixed order, where removing a record moves all later ones.
    """
    from hushgrad.sampling import RoundRobin

    if relation is Relation.ADD_REMOVE and isinstance(sampler, RoundRobin) and not sampler.shuffle:
        raise NoTheorem(
            "Adding or removing a record of a fixed order moves all later records to other steps, and no theorem covers that. "
            'Use relation="zero_out" (its place stays empty) or "replace_one", or RoundRobin(shuffle=True).'
        )


@lru_cache(maxsize=64)
def _require_theorem(noise: Mechanism, participation: Participation, steps: int, relation: Relation) -> None:
    """Require a theorem of the mechanism for the participation, and of the accountant for the resulting event."""
    from hushgrad import accounting

    accounting.epsilon(noise.event(1.0, participation, steps), delta=0.5, relation=relation)


def require_room(before: Event, *, delta: float, accountant: str | Accountant, relation: Relation, **budget: float) -> None:
    """Refuse a budget (a name and its epsilon) that is used up by what came before: no noise of the steps could meet it."""
    from hushgrad import accounting

    ((name, epsilon),) = budget.items()
    price = accounting.epsilon(before, delta=delta, accountant=accountant, relation=relation)
    if price >= epsilon:
        remedy = (
            "Allow more, or give what is released before the run more noise: in a recipe the noise_multiplier of [data] encoder."
        )
        _check.fail(name, epsilon, f"to be more than {at_most(price)}, which {before} before the run costs alone", remedy)


@lru_cache(maxsize=64)
def _require_finite(before: Event, relation: Relation) -> None:
    """Require a finite cost of what came before, or no noise of the steps could ever meet a budget."""
    from hushgrad import accounting

    if accounting.epsilon(before, delta=0.5, relation=relation) == float("inf"):
        _check.fail("before", str(before), "to have a finite epsilon", "Name the event of a private release.")

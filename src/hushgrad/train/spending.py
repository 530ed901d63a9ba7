"""Converts a ledger into the guarantee for everything in it."""

from __future__ import annotations

from hushgrad.clipping.certificate import KAPPA
from hushgrad.events import Compose, Event
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.train.plan import Plan

_SEEDED = "Reproducible: not private against whoever knows the seed"
_CERTIFIED = (
    f"Sums in double precision: no record moves one by more than 1 + kappa clip norms in the arithmetic that runs, kappa = {KAPPA:g}, "
    "which is counted; it is assumed that each example's activations do not depend on its batch to the last bit"
)


def guarantee_of(
    ledger: Ledger, plan: Plan, *, reproducible: bool = False, accountant: str = "pld", notes: tuple[str, ...] = ()
) -> Guarantee:
    """The guarantee for everything in ``ledger``, with the delta, relation and unit of ``plan``.

    Ledgers of several phases on the same data add up: ``guarantee_of(first.ledger + second.ledger, plan)``.

    Args:
        ledger: what happened.
        plan: its delta, relation and unit are used.
        reproducible: whether the noise came from a seed, which the guarantee then says.
        accountant: the accountant that computes epsilon.
        notes: further sentences for the guarantee.

    >>> from hushgrad.events import Gaussian
    >>> from hushgrad.train import Plan
    >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=64, dataset_size=1000, steps=10)
    >>> ledger = Ledger()
    >>> ledger.record(Gaussian(4.0))
    >>> print(f"{guarantee_of(ledger, plan).epsilon:.3f}")
    0.926
    """
    event = ledger.event()
    notes = ((_SEEDED,) if reproducible else ()) + ((_CERTIFIED,) if plan.certified else ()) + notes
    return Guarantee(
        epsilon=epsilon_of(event, plan, accountant),
        delta=plan.delta,
        event=event,
        accountant=accountant,
        relation=plan.relation,
        unit=plan.unit,
        notes=notes,
    )


def epsilon_of(event: Event, plan: Plan, accountant: str = "pld") -> float:
    """The epsilon of an event, with the delta and relation of ``plan``."""
    from hushgrad import accounting  # not needed to train, and takes a while to import

    if event == Compose(()):
        return 0.0
    return accounting.epsilon(event, delta=plan.delta, accountant=accountant, relation=plan.relation)

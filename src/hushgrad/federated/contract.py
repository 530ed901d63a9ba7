"""The plans and Flower strategies that a private server accepts, and why others are refused."""

from __future__ import annotations

import copy

from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

from hushgrad import _check
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import MinSep, Once, Relation
from hushgrad.federated.optimizers import ServerAdam, ServerOptimizer, ServerSGD
from hushgrad.noise.independent import Independent
from hushgrad.train.plan import Plan

_UNITS = ("user", "client")
_UNIFORM = "num-examples"  # FedAvg's default weighting, which everybody has and nobody chose: overridden, with a word


def require_plan(plan: Plan, *, correlated: bool) -> Plan:
    """The plan, if a server can run it as it is described.

    Raises:
        ArgumentError: if the unit is not a user, or the plan asks for something that only a training loop does.
        NoTheorem: for add/remove neighbours where users compete for places.
    """
    _check.instance(Plan, plan=plan)
    if plan.unit not in _UNITS:
        remedy = 'A client\'s update is about all of its examples at once: make the plan with unit="user".'
        _check.fail("plan.unit", plan.unit, f"to be one of {', '.join(map(repr, _UNITS))}", remedy)
    if plan.noise_multiplier is None:
        raise ArgumentError("Expected plan.noise_multiplier=None to be a number. Call plan.calibrated(epsilon=...) first.")
    if correlated == isinstance(plan.noise, Independent):
        other = "DPFedAvg" if correlated else "DPFTRL"
        _check.fail("plan.noise", plan.noise, f"to be {'correlated' if correlated else 'Independent()'}", f"Use {other}.")
    for name, value in (("denoise", plan.denoise), ("average", plan.average), ("projection", plan.projection)):
        if value is not None:
            _check.fail(f"plan.{name}", value, "to be None", "A federated server does not do that; leave it out.")
    if plan.clip.groups(["a", "b"]) is not None:
        _check.fail("plan.clip", plan.clip, "to clip all arrays together", "Use clipping.Flat or clipping.Adaptive.")
    if plan.relation is Relation.ADD_REMOVE and isinstance(plan.participation, (MinSep, Once)):
        raise NoTheorem(
            "Adding or removing a user changes who else finds a place in a cohort, and no theorem covers that. "
            'Use relation="zero_out" (the user is asked and contributes nothing) or "replace_one".'
        )
    return plan


def server_optimizer_of(strategy: Strategy, server: ServerOptimizer | None) -> ServerOptimizer:
    """The given server optimizer, or the equivalent of what the wrapped strategy does with the mean of the updates.

    | strategy | server optimizer |
    |---|---|
    | FedAvg, FedProx, a subclass that leaves ``aggregate_train`` alone | ``ServerSGD()``: plain averaging |
    | FedAvgM | ``ServerSGD`` with its learning rate and momentum |
    | FedAdam | ``ServerAdam`` with its four numbers |
    | anything else | refused: its aggregation is not a function of a clipped sum |
    """
    if not isinstance(strategy, FedAvg):
        _check.fail("strategy", strategy, "to be a FedAvg of flwr.serverapp.strategy, or a subclass of it")
    if server is not None:
        _check.instance(ServerOptimizer, server=server)
    if type(strategy).aggregate_train is FedAvg.aggregate_train:
        return server or ServerSGD()
    if isinstance(strategy, FedAvgM) and type(strategy).aggregate_train is FedAvgM.aggregate_train:
        return server or ServerSGD(learning_rate=strategy.server_learning_rate, momentum=strategy.server_momentum)
    if isinstance(strategy, FedAdam) and type(strategy).aggregate_train is FedAdam.aggregate_train:
        return server or ServerAdam(learning_rate=strategy.eta, beta_1=strategy.beta_1, beta_2=strategy.beta_2, tau=strategy.tau)
    remedy = "Its aggregation is not a function of a clipped sum. Use FedAvg with server=ServerSGD(...) or ServerAdam(...)."
    return _check.fail("strategy", type(strategy).__name__, "to be FedAvg, FedProx, FedAvgM or FedAdam", remedy)


def messenger_of(strategy: FedAvg) -> FedAvg:
    """A copy of the strategy that asks every node it is shown: the server chooses the cohort, not ``random.sample``.

    Raises:
        ArgumentError: if the strategy was told to weigh clients by a metric of theirs.
    """
    if strategy.weighted_by_key != _UNIFORM:
        remedy = (
            "A client's weight is private, and would multiply its clipped update: every user counts the same. "
            "Leave weighted_by_key alone."
        )
        _check.fail("strategy.weighted_by_key", strategy.weighted_by_key, "to be the default", remedy)
    if strategy.fraction_train == 0:
        _check.fail("strategy.fraction_train", 0.0, "to be greater than 0", "Nobody would train.")
    messenger = copy.copy(strategy)
    messenger.fraction_train, messenger.min_train_nodes, messenger.min_available_nodes = 1.0, 0, 0
    return messenger

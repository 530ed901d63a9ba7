"""DPFTRL and DPFedAvg: Flower strategies whose model is differentially private for whole users."""

from __future__ import annotations

from typing import final

from hushgrad.federated.base import PrivateStrategy


@final
class DPFTRL(PrivateStrategy):
    r"""Correlated noise over the rounds, without a sampling assumption: suitable for devices that come and go.

    Round t releases w_{t+1} = server(w_t, (sum_i clip(u_i) + ``noise_multiplier`` C (C⁻¹Z)_t) / ``batch_size``): u_i is the
    change that client i made to the model, clipped as one vector, and C⁻¹Z are the rows of ``plan.noise`` (``Tree(restart=)``,
    ``BLT``, ``Banded``, ...) from the run's keyed source.

    **Formal guarantee.** The sequence of all models that leave the server satisfies ``spent()``: (epsilon, delta)-DP for one
    user's whole data, under zero-out or replace-one. The server is trusted and enforces what the theorem assumes: each user
    at most ``times`` times, at least ``gap`` rounds apart (check-ins, entered before anybody is asked); norm at most C over
    all arrays together; a constant divisor. A client that is silent, fails, or sends anything but a finite update of the model
    counts as zero, which changes no one's sensitivity. Amplified plans (``CyclicPoisson`` with ``Banded``) need
    ``population``, and a server that samples all of it.

    Args:
        strategy: FedAvg or FedProx, or FedAvgM or FedAdam, whose server optimizer is taken over. It configures messages and
            evaluation; its sampling and its weights by number of examples are not used.
        plan: a calibrated plan with ``unit="user"``; its steps are rounds, its batch size is the fixed divisor.
        server: the server optimizer, if not the strategy's own.
        population: the ids of all users, for plans whose sampler deals a known population.
        users: whose device a node is, where node ids change between restarts or a user has several devices.
        key: 32 secret bytes for noise and cohorts; fresh by default, or the directory's. One key, one run.
        seed: instead of a key, for experiments: the guarantee then says so.
        max_epsilon: a budget, ``prior`` included, at which the rounds end.
        prior: ledger of earlier phases on the same users.
        directory: where a killed server finds its state again.
        raw_evaluation: let clients evaluate as the wrapped strategy says; their metrics are not covered, and ``spent()`` says so.

        >>> from flwr.serverapp.strategy import FedAvg
        >>> from hushgrad import noise
        >>> from hushgrad.federated import ServerSGD
        >>> from hushgrad.train import Plan
        >>> plan = Plan.dpftrl(epsilon=8, delta=1e-5, batch_size=100, dataset_size=2000, epochs=3, unit="user", noise=noise.Tree())
        >>> DPFTRL(FedAvg(), plan, server=ServerSGD(momentum=0.9), seed=0)  # doctest: +ELLIPSIS
        DPFTRL(FedAvg, plan ..., round 0 of 60, MinSep(20, 3), noise Tree)

    Reference: Kairouz et al. 2021 (arXiv:2103.00039), algorithm 1; Denisov et al. 2022, theorem 2.1; McMahan et al. 2024
    (arXiv:2408.08868), algorithm 1 (BLT with min-separation in production).
    """

    _correlated = True


@final
class DPFedAvg(PrivateStrategy):
    r"""Independent noise in each round: the classical private federated averaging.

    Round t releases w_{t+1} = server(w_t, (sum_i clip(u_i) + ``noise_multiplier`` C Z_t) / ``batch_size``).

    **Formal guarantee.** As :class:`DPFTRL`; and if the plan samples users at random (``Poisson``, ``FixedSize``,
    ``TruncatedPoisson``), amplified by the secrecy of the cohort: ``population`` must name every user, the server samples from
    all of them, and one who cannot be reached drops out instead of being replaced. Without a known population take
    ``sampling=MinSeparation(...)`` and ``relation="zero_out"``: no amplification is then claimed. Adaptive clipping
    (``clip=clipping.Adaptive(...)``) releases the number of norms below the clip norm with noise of its own; both releases
    together are the plan's event. The arguments are those of :class:`DPFTRL`.

        >>> from flwr.serverapp.strategy import FedAvg
        >>> from hushgrad.train import Plan
        >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=100, dataset_size=2000, steps=50, unit="user")
        >>> print(DPFedAvg(FedAvg(), plan, population=range(2000), seed=0).plan.event())
        50 x Poisson(0.05) Gaussian(1)
        >>> DPFedAvg(FedAvg(), plan, seed=0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        hushgrad.errors.ArgumentError: Expected population=None to be the ids of all users: ...

    Reference: McMahan et al. 2018 (arXiv:1710.06963), algorithm 1; Andrew et al. 2021, algorithm 1 (adaptive clipping).
    """

    _correlated = False

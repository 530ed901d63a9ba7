"""Builds plans from the usual numbers (epochs, batch size, epsilon). The implementation of ``Plan.dpsgd`` and its siblings."""

from __future__ import annotations

import math

from hushgrad import _check
from hushgrad import sampling as samplers
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.flat import Flat
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import ArgumentError
from hushgrad.events import Event, Relation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.workload import Workload
from hushgrad.sampling.base import Sampler
from hushgrad.train.after.averaging import Average
from hushgrad.train.after.projection import Projection
from hushgrad.train.plan import Plan


def dpsgd(
    *,
    batch_size: int,
    dataset_size: int,
    epochs: float | None,
    steps: int | None,
    sampling: str | Sampler,
    noise: Mechanism | None,
    pad_to: int | None,
    **common: object,
) -> Plan:
    """See :meth:`Plan.dpsgd`."""
    sampler = _sampler(sampling, _SAMPLED, batch_size, dataset_size, epochs, steps, pad_to)
    return _plan(sampler, batch_size, _independent() if noise is None else noise, pad_to=pad_to, **common)  # type: ignore[arg-type]


def dpftrl(
    *,
    batch_size: int,
    dataset_size: int,
    epochs: int | None,
    steps: int | None,
    sampling: str | Sampler,
    noise: Mechanism | None,
    workload: Workload | None,
    **common: object,
) -> Plan:
    """See :meth:`Plan.dpftrl`."""
    from hushgrad.noise.blt import BLT

    sampler = _sampler(sampling, _ORDERED, batch_size, dataset_size, epochs, steps)
    noise = BLT(buffers=4) if noise is None else _check.instance(Mechanism, noise=noise)
    if workload is not None:
        followed = noise.following(workload)
        if followed is None:
            remedy = "BLT and Banded without coefficients are; Dense.optimal(workload=) takes it itself."
            _check.fail("workload", workload, f"to be left out: {type(noise).__name__} is not optimised for one", remedy)
        noise = followed
    return _plan(sampler, batch_size, noise, **common)  # type: ignore[arg-type]


def dpgd(*, dataset_size: int, steps: int, noise: Mechanism | None, **common: object) -> Plan:
    """See :meth:`Plan.dpgd`."""
    size = _check.positive_int(dataset_size=dataset_size)
    return _plan(samplers.FullBatch(steps=steps), size, _independent() if noise is None else noise, **common)  # type: ignore[arg-type]


def _plan(
    sampler: Sampler,
    batch_size: float,
    noise: Mechanism,
    *,
    delta: float,
    max_grad_norm: float,
    epsilon: float | None,
    noise_multiplier: float | None,
    clip: Clipper | None,
    denoise: Denoiser | None,
    relation: Relation | str,
    unit: str,
    average: str | Average | None,
    projection: Projection | None,
    secure: bool,
    certified: bool,
    before: Event | None,
    augmentations: int,
    cipher: str | None,
    pad_to: int | None,
    accountant: str,
) -> Plan:
    if (epsilon is None) == (noise_multiplier is None):
        raise ArgumentError("Expected exactly one of epsilon and noise_multiplier. The other one follows from it.")
    plan = Plan(
        steps=sampler.steps,
        batch_size=batch_size,
        sampler=sampler,
        clip=Flat(_check.positive(max_grad_norm=max_grad_norm)) if clip is None else clip,
        noise=noise,
        noise_multiplier=noise_multiplier,
        denoise=denoise,
        relation=Relation.of(relation),
        unit=unit,
        delta=delta,
        average=Average.of(average),
        projection=projection,
        secure=secure,
        certified=certified,
        before=before,
        augmentations=augmentations,
        cipher=cipher,
        pad_to=pad_to,
    )
    return plan if epsilon is None else plan.calibrated(epsilon=epsilon, accountant=accountant)


# Samplers by name ---------------------------------------------------------------------------------------------------

_SAMPLED = ("poisson", "truncated_poisson", "fixed_size", "balls_in_bins")
_ORDERED = ("round_robin", "cyclic_poisson", "balls_in_bins")


def _sampler(
    sampling: str | Sampler,
    names: tuple[str, ...],
    batch_size: int,
    dataset_size: int,
    epochs: float | None,
    steps: int | None,
    pad_to: int | None = None,
) -> Sampler:
    size, n = _check.positive_int(batch_size=batch_size), _check.positive_int(dataset_size=dataset_size)
    if size > n:
        _check.fail("batch_size", size, f"to be at most dataset_size={n}")
    if isinstance(sampling, Sampler):
        if epochs is not None or steps not in (None, sampling.steps):
            name, value = ("steps", steps) if epochs is None else ("epochs", epochs)
            _check.fail(name, value, f"to be left to the sampler, which deals {sampling.steps} steps")
        return sampling
    name = _check.one_of(names, sampling=sampling)
    if (epochs is None) == (steps is None):
        raise ArgumentError("Expected exactly one of epochs and steps. The other one follows from it.")
    if name in ("round_robin", "balls_in_bins"):
        return _in_epochs(name, size, n, epochs, steps)
    if steps is None:
        steps = math.ceil(_check.positive(epochs=epochs) * n / size)
    return _in_steps(name, size, n, steps, pad_to)


def _in_steps(name: str, size: int, n: int, steps: int, pad_to: int | None) -> Sampler:
    if name in ("poisson", "truncated_poisson") and pad_to is not None:
        room = min(n, _check.positive_int(pad_to=pad_to))
        return samplers.TruncatedPoisson(rate=size / n, size=room, dataset_size=n, steps=steps)
    if name == "poisson":
        return samplers.Poisson(rate=size / n, steps=steps)
    if name == "truncated_poisson":
        room = min(n, size + math.ceil(4 * math.sqrt(size)))  # cuts one batch in about 3e4
        return samplers.TruncatedPoisson(rate=size / n, size=room, dataset_size=n, steps=steps)
    if name == "fixed_size":
        return samplers.FixedSize(size=size, dataset_size=n, steps=steps)
    # Half of each group per step: the period that keeps the expected batch at batch_size.
    return samplers.CyclicPoisson(period=max(1, n // (2 * size)), rate=_cyclic_rate(size, n), steps=steps)


def _cyclic_rate(size: int, n: int) -> float:
    period = max(1, n // (2 * size))
    return min(1.0, size * period / n)


def _in_epochs(name: str, size: int, n: int, epochs: float | None, steps: int | None) -> Sampler:
    per_epoch = -(-n // size)
    if epochs is None:
        steps = _check.positive_int(steps=steps)
        if steps % per_epoch:
            _check.fail("steps", steps, f"to be whole epochs of {per_epoch} steps", "Give epochs=, or a sampler.")
        epochs = steps // per_epoch
    whole = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
    whole = _check.positive_int(remedy="A fixed order is passed in whole epochs.", epochs=whole)
    if name == "round_robin":
        return samplers.RoundRobin(batch_size=size, dataset_size=n, epochs=whole)
    return samplers.BallsInBins(bins=per_epoch, epochs=whole)


def _independent() -> Mechanism:
    from hushgrad.noise.independent import Independent

    return Independent()

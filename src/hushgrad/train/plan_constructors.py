"""Constructors of the common plans: DP-SGD, DP-FTRL and noisy full-batch descent. The arithmetic is in build_plan.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hushgrad import _check
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import Denoiser
from hushgrad.events import Event, Relation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.workload import Workload
from hushgrad.sampling.base import Sampler
from hushgrad.train.after.averaging import Average
from hushgrad.train.after.projection import Projection
from hushgrad.train.opacus_names import OPACUS

if TYPE_CHECKING:
    from hushgrad.train.plan import Plan


class PlanConstructors:
    """Constructors of plans from the usual numbers; the base class of :class:`hushgrad.train.Plan`."""

    @classmethod
    @_check.answering(OPACUS)
    def dpsgd(
        cls,
        *,
        delta: float,
        batch_size: int,
        dataset_size: int,
        max_grad_norm: float = 1.0,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        sampling: str | Sampler = "poisson",
        clip: Clipper | None = None,
        noise: Mechanism | None = None,
        denoise: Denoiser | None = None,
        relation: Relation | str = Relation.ADD_REMOVE,
        unit: str = "example",
        average: str | Average | None = None,
        projection: Projection | None = None,
        secure: bool = False,
        certified: bool = False,
        before: Event | None = None,
        augmentations: int = 1,
        cipher: str | None = None,
        pad_to: int | None = None,
        accountant: str = "pld",
    ) -> Plan:
        r"""DP-SGD: random batches, independent noise in each step, privacy amplified by the secrecy of the sampling.

        Each record takes part in a step with probability q = ``batch_size / dataset_size``. Give ``epsilon`` (the noise is
        calibrated) or ``noise_multiplier``; ``epochs`` or ``steps``. With ``before`` the noise is calibrated so that epsilon covers
        what was released before the run as well. ``dataset_size`` must be a number that may be known;
        under add/remove it only sets the rate, and the real size stays private; with ``pad_to`` Poisson batches are cut, and it is public.

        | ``sampling`` | batches |
        |---|---|
        | ``"poisson"`` | each record independently with probability q |
        | ``"truncated_poisson"`` | the same, cut to at most batch_size + 4 sqrt(batch_size) records, or to ``pad_to`` |
        | ``"fixed_size"`` | exactly batch_size records, without replacement (replace-one only) |
        | ``"balls_in_bins"`` | each record in one random batch per epoch, the same in all epochs |
        | a :class:`~hushgrad.sampling.Sampler` | as it says |

        Args:
            delta: of the guarantee; well below 1 / dataset_size.
            batch_size: the expected number of records in a step, and the constant by which every sum is divided.
            dataset_size: a public number of records (of users, for ``unit="user"``).
            max_grad_norm: the clip norm C of one record's gradient, for the flat clipper.
            epsilon: of the whole run; the noise is calibrated to it. Give this or ``noise_multiplier``.
            noise_multiplier: standard deviation of the noise in units of the clip norm.
            epochs: expected passes over the data. Give this or ``steps``.
            steps: number of steps.
            sampling: how batches are dealt, by a name of the table or as a sampler.
            clip: another clipper than the flat one.
            noise: the mechanism that correlates the noise of different steps.
            denoise: post-processing of each noisy gradient; costs no privacy.
            relation: which data sets are neighbours.
            unit: what is protected, "example" or "user"; a run with users takes ``groups``.
            average: "ema" or another average of the iterates, for the model that is used.
            projection: a set to which the parameters are projected after each step.
            secure: certified, and sum plus noise are rounded correctly to a public grid.
            certified: add up in double precision, with a proved bound that the event counts.
            before: what was released from the same records before the run; part of its event and of its calibration.
            augmentations: K, how often each record of a batch is read and augmented; the mean of its K gradients is clipped.
            cipher: what the noise is drawn from, "aes256" or "chacha20"; None: as the device draws it.
            pad_to: fill every batch up to so many records with some of weight 0; None: batches have their own sizes.
            accountant: who calibrates.

            >>> from hushgrad import Plan
            >>> Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=256, dataset_size=60_000, epochs=10).steps
            2344

        Reference: Abadi et al. 2016, algorithm 1.
        """
        from hushgrad.train import build_plan

        return build_plan.dpsgd(**_arguments(locals()))

    @classmethod
    @_check.answering(OPACUS)
    def dpftrl(
        cls,
        *,
        delta: float,
        batch_size: int,
        dataset_size: int,
        max_grad_norm: float = 1.0,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        sampling: str | Sampler = "round_robin",
        clip: Clipper | None = None,
        noise: Mechanism | None = None,
        workload: Workload | None = None,
        denoise: Denoiser | None = None,
        relation: Relation | str = Relation.ZERO_OUT,
        unit: str = "example",
        average: str | Average | None = None,
        projection: Projection | None = None,
        secure: bool = False,
        certified: bool = False,
        before: Event | None = None,
        augmentations: int = 1,
        cipher: str | None = None,
        pad_to: int | None = None,
        accountant: str = "pld",
    ) -> Plan:
        r"""DP-FTRL: correlated noise over a fixed order of the data; no sampling assumption.

        The data are passed ``epochs`` times in one order, so that a record's participations are an epoch apart. ``noise`` is
        BLT with four buffers if not given; a mechanism that can be optimised is, for this plan's steps and participation, and for the
        ``workload``: ``noise.SGDWorkload(momentum=0.9, schedule="linear")`` is torch's SGD with this momentum and a rate that falls to 0.
        The noise of the steps then cancels in what *this* optimizer makes of them; the guarantee is the same for any other.

        **Relation.** The theorem compares two data sets whose *other* records take part in the same steps. With the data in
        their own order, removing a record would move every later one to another step; so the honest default is ``ZERO_OUT``
        (the record is replaced by one that contributes nothing, and the size is public), and add/remove is refused unless
        records get random places (``RoundRobin(shuffle=True)``, the default sampler here) or batches are random.

        | ``sampling`` | batches |
        |---|---|
        | ``"round_robin"`` | one fixed order, drawn once; participations one epoch apart |
        | ``"cyclic_poisson"`` | Poisson samples of a fixed partition: amplifies banded noise |
        | ``"balls_in_bins"`` | each record in one random batch, the same in all epochs |
        | a :class:`~hushgrad.sampling.Sampler` | as it says |

        Args:
            delta: of the guarantee; well below 1 / dataset_size.
            batch_size: the expected number of records in a step, and the constant by which every sum is divided.
            dataset_size: a public number of records (of users, for ``unit="user"``).
            max_grad_norm: the clip norm C of one record's gradient, for the flat clipper.
            epsilon: of the whole run; the noise is calibrated to it. Give this or ``noise_multiplier``.
            noise_multiplier: standard deviation of the noise in units of the clip norm.
            epochs: expected passes over the data. Give this or ``steps``.
            steps: number of steps.
            sampling: how batches are dealt, by a name of the table or as a sampler.
            clip: another clipper than the flat one.
            noise: the mechanism that correlates the noise of different steps.
            workload: what the optimizer makes of the gradients, for which ``noise`` is optimised; SGD at a constant rate by default.
            denoise: post-processing of each noisy gradient; costs no privacy.
            relation: which data sets are neighbours.
            unit: what is protected, "example" or "user"; a run with users takes ``groups``.
            average: "ema" or another average of the iterates, for the model that is used.
            projection: a set to which the parameters are projected after each step.
            secure: certified, and sum plus noise are rounded correctly to a public grid.
            certified: add up in double precision, with a proved bound that the event counts.
            before: what was released from the same records before the run; part of its event and of its calibration.
            augmentations: K, how often each record of a batch is read and augmented; the mean of its K gradients is clipped.
            cipher: what the noise is drawn from, "aes256" or "chacha20"; None: as the device draws it.
            pad_to: fill every batch up to so many records with some of weight 0; None: batches have their own sizes.
            accountant: who calibrates.

        Reference: Kairouz et al. 2021; Denisov et al. 2022, theorem 2.1; Choquette-Choo et al. 2023 (several epochs).
        """
        from hushgrad.train import build_plan

        return build_plan.dpftrl(**_arguments(locals()))

    @classmethod
    @_check.answering(OPACUS)
    def dpgd(
        cls,
        *,
        delta: float,
        dataset_size: int,
        steps: int,
        max_grad_norm: float = 1.0,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        clip: Clipper | None = None,
        noise: Mechanism | None = None,
        denoise: Denoiser | None = None,
        relation: Relation | str = Relation.ADD_REMOVE,
        unit: str = "example",
        average: str | Average | None = None,
        projection: Projection | None = None,
        secure: bool = False,
        certified: bool = False,
        before: Event | None = None,
        augmentations: int = 1,
        cipher: str | None = None,
        pad_to: int | None = None,
        accountant: str = "pld",
    ) -> Plan:
        r"""DP-GD: the full data in every step. The sum is divided by the public ``dataset_size``.

        Args:
            delta: of the guarantee; well below 1 / dataset_size.
            dataset_size: a public number of records (of users, for ``unit="user"``).
            steps: number of steps.
            max_grad_norm: the clip norm C of one record's gradient, for the flat clipper.
            epsilon: of the whole run; the noise is calibrated to it. Give this or ``noise_multiplier``.
            noise_multiplier: standard deviation of the noise in units of the clip norm.
            clip: another clipper than the flat one.
            noise: the mechanism that correlates the noise of different steps.
            denoise: post-processing of each noisy gradient; costs no privacy.
            relation: which data sets are neighbours.
            unit: what is protected, "example" or "user"; a run with users takes ``groups``.
            average: "ema" or another average of the iterates, for the model that is used.
            projection: a set to which the parameters are projected after each step.
            secure: certified, and sum plus noise are rounded correctly to a public grid.
            certified: add up in double precision, with a proved bound that the event counts.
            before: what was released from the same records before the run; part of its event and of its calibration.
            augmentations: K, how often each record of a batch is read and augmented; the mean of its K gradients is clipped.
            cipher: what the noise is drawn from, "aes256" or "chacha20"; None: as the device draws it.
            pad_to: fill every batch up to so many records with some of weight 0; None: batches have their own sizes.
            accountant: who calibrates.

            >>> from hushgrad import Plan
            >>> str(Plan.dpgd(noise_multiplier=20.0, delta=1e-6, dataset_size=1000, steps=60).participation)
            'Everyone()'

        Reference: Bassily, Smith and Thakurta 2014, with the noise of a tight accountant.
        """
        from hushgrad.train import build_plan

        return build_plan.dpgd(**_arguments(locals()))


def _arguments(scope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scope.items() if name not in ("cls", "build_plan")}

"""Plan: a frozen, public description of a private run. From it come both the run and its event."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad._value import LATER, Value
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.certificate import KAPPA
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import Compose, Event, Participation, Relation
from hushgrad.guarantee import Guarantee
from hushgrad.noise.base import Mechanism
from hushgrad.noise.ciphers import CIPHERS, require_cipher
from hushgrad.noise.independent import Independent
from hushgrad.sampling.base import Sampler
from hushgrad.train.after.averaging import Average
from hushgrad.train.after.projection import Projection
from hushgrad.train.words import OPACUS

if TYPE_CHECKING:
    from hushgrad.accounting.base import Accountant

__all__ = ["Plan", "require_comparable"]


class _Description(Value, family="plan"):
    """Family of the plans."""


@dataclass(frozen=True, kw_only=True)
class Plan(_Description):
    r"""A private run as data: who takes part, how gradients are clipped, what noise is added, for how many steps.

    Step t releases (sum_i clip(g_i) + ``noise_multiplier`` C (C⁻¹Z)_t) / ``batch_size``: C is the clip norm, C⁻¹Z the rows of
    the ``noise`` mechanism, the sum runs over the records that ``sampler`` deals. Every field is public. ``batch_size`` is the
    only divisor there is: a constant, whatever the real batch. Denoising, averaging and projection are post-processing.
    With ``secure`` the run is certified, and the sum plus its noise is correctly rounded, once, to a public grid
    (:mod:`hushgrad.noise.secure`).
    With ``certified`` the sum is added up in double precision, and no record moves it by more than (1 + kappa) C in the arithmetic that
    runs, kappa = 1e-4, which the event counts; else that bound holds in real numbers, and in single precision is measured.
    ``before`` is what was released from the same records before the first step (a private mean, private bounds of columns): it is part
    of the run's event, so the noise of the steps is calibrated for both together.
    With ``augmentations`` = K each record of a batch is read K times, by a data set that augments at random, and the mean of its K
    gradients is clipped (De et al. 2022): a record still moves the sum by at most C, so the event is the same.
    ``cipher`` is what the noise is drawn from, ``"aes256"`` or ``"chacha20"``; None: AES in main memory, ChaCha20 on a device that
    draws for itself, as the plan of the run then says.
    With ``pad_to`` every batch is filled up to this public number of records with some that have weight 0, so that all steps have the
    same shapes; the sampler never deals more (a truncated Poisson batch is cut, and its event says so).

    **Formal guarantee.** A run of this plan satisfies ``plan.guarantee()``: (epsilon, ``delta``)-DP per ``unit`` under
    ``relation``, for the event that the mechanism's theorem gives for the sampler's participation. Where there is no such
    theorem the plan cannot be constructed (:class:`~hushgrad.errors.NoTheorem`).

        >>> plan = Plan.dpsgd(noise_multiplier=1.1, delta=1e-5, max_grad_norm=1.0, batch_size=100, dataset_size=10_000, steps=500)
        >>> print(plan.event())
        500 x Poisson(0.01) Gaussian(1.1)
        >>> Plan.from_json(plan.to_json()) == plan
        True

    Reference: Abadi et al. 2016, algorithm 1 (DP-SGD); Kairouz et al. 2021, algorithm 1 (DP-FTRL); Denisov et al. 2022,
    theorem 2.1 (matrix mechanisms under adaptive inputs).
    """

    steps: int
    batch_size: float
    sampler: Sampler
    clip: Clipper
    noise: Mechanism
    delta: float
    noise_multiplier: float | None = None
    denoise: Denoiser | None = None
    relation: Relation = Relation.ADD_REMOVE
    unit: str = "example"
    average: Average | None = None
    projection: Projection | None = None
    secure: bool = field(default=False, metadata=LATER)
    certified: bool = field(default=False, metadata=LATER)
    before: Event | None = field(default=None, metadata=LATER)
    augmentations: int = field(default=1, metadata=LATER)
    cipher: str | None = field(default=None, metadata=LATER)
    pad_to: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        size = _check.positive(batch_size=self.batch_size)
        fields = {
            "steps": _check.positive_int(steps=self.steps),
            "batch_size": int(size) if size.is_integer() else size,  # one form of each number, so equal plans have one hash
            "delta": _check.delta(delta=self.delta),
            "relation": Relation.of(self.relation),
        }
        _check.instance(Sampler, sampler=self.sampler)
        _check.instance(Clipper, clip=self.clip)
        _check.instance(Mechanism, noise=self.noise)
        _check.instance((Denoiser, type(None)), denoise=self.denoise)
        _check.instance((Average, type(None)), average=self.average)
        _check.instance((Projection, type(None)), projection=self.projection)
        _check.instance((Event, type(None)), before=self.before)
        _check.positive_int(augmentations=self.augmentations)
        if self.noise_multiplier is not None:
            fields["noise_multiplier"] = _check.non_negative(noise_multiplier=self.noise_multiplier)
        if not _check.instance(str, unit=self.unit) or not self.unit.isprintable():  # it stands in sentences and in reports
            _check.fail("unit", self.unit, 'to name what is protected, in a word such as "example" or "user"')
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if self.sampler.steps != self.steps:
            _check.fail("steps", self.steps, f"to be the sampler's steps={self.sampler.steps}")
        require_comparable(self.sampler, self.relation)
        _check.instance(bool, certified=self.certified)
        if isinstance(self.clip, Adaptive):
            self._require_adaptive(self.clip)
        if _check.instance(bool, secure=self.secure):
            self._require_rounding()
            object.__setattr__(self, "certified", True)  # rounding correctly a sum that is not bounded would prove nothing
        if self.cipher is not None:
            require_cipher(self.cipher, secure=self.secure)
        if self.pad_to is not None:
            self._require_room(_check.positive_int(pad_to=self.pad_to))
        object.__setattr__(self, "noise", self.noise.resolved(steps=self.steps, participation=self.participation))
        # The theorems are asked for now: a plan that nobody can account for is refused before any data is touched.
        _require_theorem(self.noise, self.participation, self.steps, self.relation)
        if self.before is not None:
            _require_finite(self.before, self.relation)

    def _require_adaptive(self, clip: Adaptive) -> None:
        """Gradient and count are one Gaussian mechanism only if the noise is independent, and the divisor is one."""
        if not isinstance(self.noise, Independent):
            raise NoTheorem(
                "Adaptive clipping moves the clip norm, and correlated noise needs a constant one. Use independent noise."
            )
        if clip.batch_size != self.batch_size:
            _check.fail("clip.batch_size", clip.batch_size, f"to be the plan's batch_size={self.batch_size}")
        if self.noise_multiplier is not None:
            clip.gradient_noise(self.noise_multiplier)

    def _require_room(self, pad_to: int) -> None:
        """Batches of one size need a sampler that never deals more."""
        most = self.sampler.most
        if most is None:
            remedy = 'Use sampling="truncated_poisson", "fixed_size" or "round_robin".'
            _check.fail("pad_to", pad_to, "to go with a sampler whose batches have a public largest size", remedy)
        if most > pad_to:
            _check.fail("pad_to", pad_to, f"to be at least the sampler's largest batch of {most}")

    def _require_rounding(self) -> None:
        """Sum plus noise is correctly rounded where the noise of a step is fresh, and there is some."""
        if not isinstance(self.noise, Independent):
            raise NoTheorem(
                "No theorem covers correlated rows that are correctly rounded: their recursion would need an error bound that grows "
                "with the steps. Use independent noise with secure=True."
            )
        if self.noise_multiplier == 0:
            _check.fail("noise_multiplier", 0, "to be positive with secure=True", "Without noise there is no grid.")

    @property
    def participation(self) -> Participation:
        """What the sampler promises about any one record."""
        return self.sampler.participation()

    @property
    def max_grad_norm(self) -> float:
        """The L2 norm of one record's clipped gradient, at most: the unit of the noise multiplier."""
        return self.clip.sensitivity(Relation.ADD_REMOVE)

    @property
    def kappa(self) -> float:
        """How much farther than the clip norm a record may move the sum by rounding: 1e-4 if ``certified``; else not counted."""
        return KAPPA if self.certified else 0.0

    @property
    def capacity(self) -> int:
        """Contributions to a step at most, in a certified run: four times ``batch_size``, and a thousand. More are refused."""
        return int(4 * self.batch_size) + 1000

    @property
    def drawn_by(self) -> str:
        """The cipher that the noise comes from: what ``cipher`` says, or AES."""
        return self.cipher or CIPHERS[0]

    @property
    def noise_std(self) -> float:
        """What a row of C⁻¹Z is multiplied by before it is added to the *sum*: noise_multiplier x clip norm."""
        return self._multiplier() * self.max_grad_norm

    def event(self, steps: int | None = None) -> Event:
        """What the run costs, or what its first ``steps`` steps cost (early stopping).

        Strategies are lower triangular, so the first t rows of a run are a mechanism of their own, with the leading t x t block
        as its strategy. The cost of t steps is a guarantee for a t that was fixed beforehand or chosen without looking at the
        data; if t was chosen after looking at the (private) results, quote the whole plan's.
        """
        taken = self.steps if steps is None else _check.integer(0, steps=steps)
        if taken > self.steps:
            _check.fail("steps", taken, f"to be at most the plan's {self.steps}", "Make a longer plan.")
        if taken == 0:
            return Compose(() if self.before is None else (self.before,))
        try:
            return self.event_with(self._multiplier(), steps=taken)
        except NoTheorem:
            if taken == self.steps:
                raise
            return self.event()  # a prefix is post-processing of the whole run

    def event_with(
        self, noise_multiplier: float, *, participation: Participation | None = None, steps: int | None = None
    ) -> Event:
        """What the run would cost with this noise multiplier, for another participation or number of steps if given.

        In a certified run a record moves the sum by (1 + kappa) clip norms at most: its noise counts for 1 / (1 + kappa) of itself.
        What came ``before`` is counted too.

        Args:
            noise_multiplier: in units of the clip norm.
            participation: another one than the sampler's.
            steps: another number of steps than the plan's.
        """
        counted = noise_multiplier / (1 + self.kappa)
        steps_alone = self.noise.event(counted, participation or self.participation, self.steps if steps is None else steps)
        return steps_alone if self.before is None else self.before + steps_alone

    def guarantee(self, accountant: str | Accountant = "pld", *, steps: int | None = None) -> Guarantee:
        """The (epsilon, delta) of the whole run, or of its first ``steps`` steps."""
        from hushgrad import accounting  # scipy is not needed to train, and takes a while to import

        event = self.event(steps)
        epsilon = accounting.epsilon(event, delta=self.delta, accountant=accountant, relation=self.relation)
        name = accountant if isinstance(accountant, str) else accountant.name
        return Guarantee(epsilon=epsilon, delta=self.delta, event=event, accountant=name, relation=self.relation, unit=self.unit)

    def calibrated(self, *, epsilon: float, accountant: str | Accountant = "pld") -> Plan:
        """This plan with the smallest noise multiplier whose guarantee is at most (``epsilon``, delta)."""
        from hushgrad import accounting

        multiplier = accounting.calibrate(
            self.event_with,
            epsilon=_check.positive(epsilon=epsilon),
            delta=self.delta,
            accountant=accountant,
            relation=self.relation,
        )
        return replace(self, noise_multiplier=multiplier)

    @property
    def digest(self) -> str:
        """SHA-256 of this plan's canonical JSON: equal plans have equal digests, in every process and version."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _multiplier(self) -> float:
        if self.noise_multiplier is None:
            raise ArgumentError("Expected noise_multiplier=None to be a number. Call plan.calibrated(epsilon=...) first.")
        return self.noise_multiplier

    def __str__(self) -> str:
        noise = "not calibrated" if self.noise_multiplier is None else f"{self.noise_multiplier:.6g} x clip norm"
        rows = [
            ("steps", f"{self.steps}"),
            ("batches", f"{self.participation}; the sum is divided by {self.batch_size:g}, always"),
            ("clipping", f"{self.clip!r}"),
            ("noise", f"{noise}, {_brief(self.noise)}"),
            ("neighbours", f"{self.relation} {self.unit}, delta = {at_most(self.delta, 6)}"),
        ]
        rows += (
            [("augmented", f"{self.augmentations} copies of each record; their mean is clipped")]
            if self.augmentations > 1
            else []
        )
        rows += [("before", f"{self.before}, counted")] if self.before is not None else []
        options = (("denoising", self.denoise), ("averaging", self.average), ("projection", self.projection))
        rows += [(name, _brief(value)) for name, value in options if value is not None]
        rows += [("secure", "sum plus noise correctly rounded to a public grid")] if self.secure else []
        rows += [("cipher", self.cipher)] if self.cipher else []
        rows += [("padded to", f"{self.pad_to} records in every batch")] if self.pad_to else []
        rows += [("certified", f"sums in double precision; kappa = {KAPPA:g}, counted")] if self.certified else []
        return "\n".join([f"Plan {self.digest[:12]}", *(f"  {name:<11}{text}" for name, text in rows)])

    # The recipes: the common plans by their common names -------------------------------------------------------------

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

            >>> Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=256, dataset_size=60_000, epochs=10).steps
            2344

        Reference: Abadi et al. 2016, algorithm 1.
        """
        from hushgrad.train import recipes

        return recipes.dpsgd(**_arguments(locals()))

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
        BLT with four buffers if not given; a mechanism that can be optimised is, for this plan's steps and participation.

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
        from hushgrad.train import recipes

        return recipes.dpftrl(**_arguments(locals()))

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

            >>> str(Plan.dpgd(noise_multiplier=20.0, delta=1e-6, dataset_size=1000, steps=60).participation)
            'Everyone()'

        Reference: Bassily, Smith and Thakurta 2014, with the noise of a tight accountant.
        """
        from hushgrad.train import recipes

        return recipes.dpgd(**_arguments(locals()))


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
    """The mechanism must have a theorem for the participation, and the accountant one for the resulting event."""
    from hushgrad import accounting

    accounting.epsilon(noise.event(1.0, participation, steps), delta=0.5, relation=relation)


@lru_cache(maxsize=64)
def _require_finite(before: Event, relation: Relation) -> None:
    """What came before must have a finite price, or no noise of the steps could ever meet a budget."""
    from hushgrad import accounting

    if accounting.epsilon(before, delta=0.5, relation=relation) == float("inf"):
        _check.fail("before", str(before), "to have a finite epsilon", "Name the event of a private release.")


def _arguments(scope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scope.items() if name not in ("cls", "recipes")}


def _brief(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."

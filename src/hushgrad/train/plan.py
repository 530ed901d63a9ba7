"""Plan: a frozen, public description of a private run. From it come both the run and its event."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad._value import LATER, Value
from hushgrad.clipping.certificate import KAPPA
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import Compose, Event, Participation, Relation
from hushgrad.guarantee import Guarantee
from hushgrad.noise.base import Mechanism
from hushgrad.noise.ciphers import CIPHERS
from hushgrad.sampling.base import Sampler
from hushgrad.train.after.averaging import Average
from hushgrad.train.after.projection import Projection
from hushgrad.train.plan_checks import require_comparable, require_consistent, require_room, require_theorems
from hushgrad.train.plan_constructors import PlanConstructors

if TYPE_CHECKING:
    from hushgrad.accounting.base import Accountant

__all__ = ["Plan", "require_comparable"]


class _Description(Value, family="plan"):
    """Family of the plans."""


@dataclass(frozen=True, kw_only=True)
class Plan(PlanConstructors, _Description):
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
        _check.instance(bool, certified=self.certified)
        _check.instance(bool, secure=self.secure)
        require_consistent(self)
        if self.secure:
            object.__setattr__(self, "certified", True)  # rounding correctly a sum that is not bounded would prove nothing
        object.__setattr__(self, "noise", self.noise.resolved(steps=self.steps, participation=self.participation))
        require_theorems(self)

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
        from hushgrad.accounting.calibration_target import likely_factor

        epsilon = _check.positive(epsilon=epsilon)
        if self.before is not None:
            require_room(self.before, epsilon=epsilon, delta=self.delta, accountant=accountant, relation=self.relation)
        multiplier = accounting.calibrate(
            self.event_with,
            epsilon=epsilon,
            delta=self.delta,
            accountant=accountant,
            relation=self.relation,
            start=likely_factor(self.event_with(1.0), epsilon, self.delta, self.relation),
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


def _brief(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."

"""Choose features, model, batch size, steps, clip norm and learning rate from public facts; predict the accuracy and give reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.advice import rules
from hushgrad.advice.codebook import Codebook
from hushgrad.events import Gaussian
from hushgrad.recipes.image_features import LARGEST
from hushgrad.recipes.learning import LearningEncoder
from hushgrad.recipes.patches import CELLS, PATCHES
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.scattering import MAPS
from hushgrad.recipes.text_features import LOOKS
from hushgrad.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recipe without the location of its data, the expected accuracy, and the reasons."""

    tables: Mapping[str, Any]
    plan: Plan
    gap: float
    reasons: tuple[str, ...]

    def recipe(self, path: str, *, test_path: str | None = None, test_fraction: float = 0.2) -> Recipe:
        """The recipe for the data at ``path``.

        Args:
            path: the file, or the folder.
            test_path: public records to test on; else a part of ``path`` is split off.
            test_fraction: the size of that part.
        """
        tested = {"test_fraction": test_fraction} if test_path is None else {"test_path": test_path}
        return Recipe.from_tables({**self.tables, "data": {**self.tables["data"], "path": path, **tested}})

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"recipe": dict(self.tables), "expected_gap_points": self.gap, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        return "\n".join([f"- {reason}" for reason in self.reasons])


def advise(codebook: Codebook, *, epsilon: float, delta: float, records: int | None = None, minutes: float = 5.0) -> Advice:
    """A recipe for a budget, from public facts alone; the rules and their evidence are in :mod:`hushgrad.advice.rules`.

    **Formal guarantee.** Nothing is read but the arguments. The recipe's plan is calibrated to (epsilon, delta), what is learned before
    the run included.

    Args:
        codebook: what is publicly known about the data.
        epsilon: the budget.
        delta: the failure probability.
        records: the number of records to train on, as far as it may be known; else that of the codebook.
        minutes: how long training may take on one core.

        >>> from hushgrad.recipes.column import Category
        >>> book = Codebook(kind="table", classes=("no", "yes"), label="y", columns=(Category(name="job", values=("a", "b")),))
        >>> advise(book, epsilon=1.0, delta=1e-5, records=20_000).tables["plan"]["batch_size"]
        5000
    """
    count = records if records is not None else codebook.records
    if count is None:
        remedy = "Give a number that may be known (rounded, if need be): it sets the rates; the real one stays private."
        _check.fail("records", None, "to be a number", remedy)
    n, kind = _check.positive_int(records=count), codebook.kind
    mu = gaussian_mu(_check.positive(epsilon=epsilon), _check.delta(delta=delta))
    weight = rules.word_weight(records=n, mu=mu)
    encoder = codebook.encoder(buckets=rules.WORD_BUCKETS, weight=weight, noise_multiplier=rules.mean_noise(mu=mu))
    batch = rules.batch_for(kind, records=n)
    steps = rules.steps_for(kind, batch=batch, width=_width(codebook), minutes=_check.positive(minutes=minutes))
    learns = encoder.learns if isinstance(encoder, LearningEncoder) else None
    numbers = {"delta": delta, "batch_size": batch, "dataset_size": n, "steps": steps, "max_grad_norm": rules.CLIP[kind]}
    unit = {"unit": "user"} if codebook.user is not None else {}
    before = None if learns is None else Gaussian(learns)
    plan = Plan.dpsgd(epsilon=epsilon, before=before, **numbers, **unit)  # type: ignore[arg-type]
    rate = rules.learning_rate(kind, batch=batch, noise_multiplier=plan.noise_multiplier or 0.0, steps=steps)
    gap = rules.expected_gap(kind, records=n, mu=mu)
    tables = {
        "model": {"name": "linear"},
        "data": {"name": "encoded", "encoder": encoder.to_json(), "classes": list(codebook.classes)},
        "plan": {"method": "dpsgd", "epsilon": epsilon, **numbers, **unit},
        "optimizer": {"name": "sgd", "lr": rate, "schedule": "linear"},
    }
    return Advice(tables=tables, plan=plan, gap=gap, reasons=_reasons(codebook, plan, rate, gap, learns))


def _width(codebook: Codebook) -> int:
    if codebook.kind == "table":
        return codebook.width
    if codebook.kind == "text":
        return LOOKS + rules.WORD_BUCKETS
    across = min(codebook.width_of_image, LARGEST) // 4
    waves = codebook.channels * MAPS * across * (-(-across // 2) if codebook.mirrored else across)
    return waves + PATCHES * CELLS**2 // (2 if codebook.mirrored else 1)


_FEATURES = {
    "table": "one-hot blocks of the declared bins and categories, centred, rows of length 1",
    "text": "what a text looks like, centred by a private mean, and hashed words, rows of length 1",
    "images": "fixed wavelets and likeness to patches, balanced by pictures of nobody, centred by a private mean, rows of length 1",
}


_LEARNED = {"table": "cut points of columns", "text": "the mean of the looks", "images": "the mean of the rows"}


def _reasons(codebook: Codebook, plan: Plan, rate: float, gap: float, learns: float | None) -> tuple[str, ...]:
    kind, std = codebook.kind, plan.max_grad_norm * (plan.noise_multiplier or 0.0) / plan.batch_size
    deviation = rate * std * (plan.steps / 3) ** 0.5  # of a row's score after all steps of a rate that falls linearly to 0
    points = "more than 10 points" if gap > 10 else f"about {max(gap, 0.1):.1f} points"
    found = [
        f"Features: {_FEATURES[kind]}. Nothing in them is estimated from the records but what is named here.",
        "Model: linear, weights 0 at first. On tables objective perturbation and full-batch descent gained 0.3 points at most.",
        f"Batches of {plan.batch_size} in {plan.steps} steps: many steps beat large batches at the same work.",
        f"Clip norm {plan.max_grad_norm:g} for rows of length 1, noise multiplier {plan.noise_multiplier:.4g}.",
        f"Learning rate {rate:.4g}, falling to 0: the noise of a logit ends at a deviation of about {deviation:.1f}.",
        f"Expect {points} behind the same model without privacy; where that is little it was a few tenths more on public tables, "
        "up to a few points on texts and images. How accurate that one is, nobody can tell "
        "without the data; the report compares with always naming the most frequent class.",
    ]
    if learns is not None:
        from hushgrad.accounting import epsilon

        what, price = _LEARNED[kind], at_most(epsilon(Gaussian(learns), delta=plan.delta))
        found.insert(
            1,
            f"Learned before the run, privately: {what}, noise {learns:g} (alone epsilon {price}; it is in the plan's calibration).",
        )
    return tuple(found)

"""compare and plan_for: the candidates of a question, ranked by their predicted error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import Relation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.suggestions import Skipped
from hushgrad.noise.workload import AnyWorkload
from hushgrad.planner.candidates import Proposal, proposals
from hushgrad.planner.question import Question
from hushgrad.train.plan import Plan

_FLOAT = 4  # bytes of a number of noise state, for float32 parameters
_WORTH = 1e-3  # relative improvement that makes a larger member of a family worth its state


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A calibrated plan with what the planner knows about it.

    | field | meaning |
    |---|---|
    | ``rmse`` | noise multiplier x error of the workload per unit noise: the rms noise in the sums A G at clip norm 1 |
    | ``relative`` | rmse per step, divided by that of the best candidate (1 for the best) |
    | ``gap`` | how far above the best possible rmse for this fixed order at most; None where sampling amplifies (no bound known) |
    | ``state`` | numbers of noise state per model parameter |
    | ``state_bytes`` | the same in bytes, if the number of parameters is known |
    | ``work`` | rows of noise drawn or combined in an average step; 1 for independent noise |

        >>> from hushgrad.planner import compare
        >>> best, *others = compare(epsilon=8.0, delta=1e-6, dataset_size=2000, batch_size=100, epochs=5)
        >>> best.relative, all(other.relative >= 1 for other in others)
        (1.0, True)
    """

    name: str
    plan: Plan
    rmse: float
    relative: float
    gap: float | None
    state: int
    state_bytes: int | None
    work: float
    reason: str

    @property
    def noise_multiplier(self) -> float:
        """The calibrated noise, in units of the clip norm."""
        assert self.plan.noise_multiplier is not None
        return self.plan.noise_multiplier

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, the plan included."""
        return {**vars(self), "noise_multiplier": self.noise_multiplier, "plan": self.plan.to_json()}


class Comparison(list[Candidate]):
    """Candidates, best first; ``dropped`` says which mechanisms were left out, and why.

    >>> from hushgrad.planner import compare
    >>> found = compare(epsilon=8.0, delta=1e-6, dataset_size=2000, batch_size=100, epochs=5)
    >>> found[0].name
    'BLT(2)'
    """

    def __init__(self, question: Question, candidates: Iterable[Candidate], dropped: Iterable[Skipped]) -> None:
        super().__init__(candidates)
        self.question = question
        self.dropped = tuple(dropped)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"candidates": [candidate.to_json() for candidate in self], "dropped": [vars(dropped) for dropped in self.dropped]}


def compare(
    *,
    epsilon: float,
    delta: float,
    dataset_size: int,
    batch_size: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    parameters: int | None = None,
    memory: float | None = None,
    sampling_allowed: bool = True,
    max_grad_norm: float = 1.0,
    workload: AnyWorkload = None,
    relation: Relation | str = Relation.ADD_REMOVE,
    unit: str = "example",
    tune_bands: bool = False,
    mechanisms: Sequence[Mechanism] = (),
) -> Comparison:
    r"""All mechanisms under one budget, best first: predicted error, memory, work, and a reason in one sentence.

    The predicted error is sigma ||A C⁻¹||_F / sqrt(n): the calibrated noise times the workload's error per unit noise
    (Denisov et al. 2022, section 2). It does not see clipping or the loss: it ranks mechanisms at equal batches and steps.

    **Formal guarantee.** Every plan that is returned satisfies (``epsilon``, ``delta``)-DP under ``relation``; the choice uses
    public numbers only and costs nothing.

    Args:
        epsilon: of the whole run, which every ranked plan meets.
        delta: of the guarantee.
        dataset_size: a public number of records.
        batch_size: expected records in a step; by default the power of two nearest to the square root of ``dataset_size``.
        epochs: passes over the data. Give this or ``steps``.
        steps: number of steps.
        parameters: how many the model has, to say what the noise state takes.
        memory: bytes that the noise state may take; needs ``parameters``.
        sampling_allowed: whether batches may be random and secret; else only plans over a fixed order are ranked.
        max_grad_norm: the clip norm.
        workload: what the optimizer makes of the gradients, for example ``SGDWorkload(momentum=0.9)``; prefix sums by default.
        relation: which data sets are neighbours.
        unit: what is protected.
        tune_bands: optimise banded noise for the workload, which takes longer.
        mechanisms: mechanisms of your own, ranked among the library's wherever they have a theorem.

        >>> found = compare(epsilon=8.0, delta=1e-6, dataset_size=2000, batch_size=100, epochs=5)
        >>> found[0].relative, found[0].rmse <= found[-1].rmse
        (1.0, True)
    """
    return answer(Question(**{**locals(), "relation": Relation.of(relation), "mechanisms": tuple(mechanisms)}))


def plan_for(
    *,
    epsilon: float,
    delta: float,
    dataset_size: int,
    batch_size: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    parameters: int | None = None,
    memory: float | None = None,
    sampling_allowed: bool = True,
    max_grad_norm: float = 1.0,
    workload: AnyWorkload = None,
    relation: Relation | str = Relation.ADD_REMOVE,
    unit: str = "example",
    tune_bands: bool = False,
    mechanisms: Sequence[Mechanism] = (),
) -> list[Plan]:
    """Calibrated plans for a budget, best first: the plans of :func:`compare`, whose arguments these are.

    Args:
        epsilon: of the whole run, which every ranked plan meets.
        delta: of the guarantee.
        dataset_size: a public number of records.
        batch_size: expected records in a step; by default the power of two nearest to the square root of ``dataset_size``.
        epochs: passes over the data. Give this or ``steps``.
        steps: number of steps.
        parameters: how many the model has, to say what the noise state takes.
        memory: bytes that the noise state may take; needs ``parameters``.
        sampling_allowed: whether batches may be random and secret; else only plans over a fixed order are ranked.
        max_grad_norm: the clip norm.
        workload: what the optimizer makes of the gradients, for example ``SGDWorkload(momentum=0.9)``; prefix sums by default.
        relation: which data sets are neighbours.
        unit: what is protected.
        tune_bands: optimise banded noise for the workload, which takes longer.
        mechanisms: mechanisms of your own, ranked among the library's wherever they have a theorem.

    >>> plans = plan_for(epsilon=0.5, delta=1e-6, dataset_size=2000, batch_size=100, epochs=5)
    >>> print(plans[0].participation, type(plans[0].noise).__name__)
    Poisson(0.05) Independent
    """
    return [candidate.plan for candidate in compare(**locals())]


def answer(question: Question) -> Comparison:
    """The comparison that answers ``question``."""
    scored: list[Candidate] = []
    dropped: list[Skipped] = []
    ended: dict[str, str] = {}  # families whose last member was no improvement
    for proposal in proposals(question):
        family = "" if isinstance(proposal, Skipped) else proposal.family
        if family in ended:
            dropped.append(Skipped(proposal.name, ended[family]))
            continue
        found = _scored(question, proposal, scored)
        if isinstance(found, Skipped):
            dropped.append(found)
            if family:
                ended[family] = f"Not tried: {proposal.name}, which keeps less, is left out already."
        else:
            scored.append(found)
    if not scored:
        raise ArgumentError("Expected a question that some mechanism can answer. " + " ".join(d.reason for d in dropped))
    scored.sort(key=_per_step)
    best = _per_step(scored[0])
    return Comparison(question, [_placed(candidate, best) for candidate in scored], dropped)


def _per_step(candidate: Candidate) -> float:
    """Noise per step: plans may differ in their number of steps by a short last batch."""
    return candidate.rmse / candidate.plan.steps


def _scored(question: Question, proposal: Proposal | Skipped, earlier: list[Candidate]) -> Candidate | Skipped:
    if isinstance(proposal, Skipped):
        return proposal
    try:
        plan = proposal.make()
        state = plan.noise.state_size(steps=plan.steps)
        bytes_ = None if question.parameters is None else state * question.parameters * _FLOAT
        size, unit = (state, "numbers per parameter") if bytes_ is None else (bytes_, "bytes")
        if question.memory is not None and size > question.memory:
            return Skipped(proposal.name, f"Its noise state takes {size:.3g} {unit}; {question.memory:.3g} are allowed.")
        plan = _calibrated(plan, question.epsilon)
    except NoTheorem as error:
        return Skipped(proposal.name, str(error))
    assert plan.noise_multiplier is not None
    rmse = plan.noise_multiplier * plan.noise.unit_error(steps=plan.steps, workload=question.workload)[0]
    for other in earlier:
        if proposal.family and other.name.startswith(proposal.family) and rmse > (1 - _WORTH) * other.rmse:
            return Skipped(proposal.name, f"It is no better than {other.name}, which keeps less.")
    return Candidate(
        name=proposal.name,
        plan=plan,
        rmse=rmse,
        relative=1.0,
        gap=_gap(plan, question.workload),
        state=state,
        state_bytes=bytes_,
        work=proposal.work,
        reason=proposal.why,
    )


def _gap(plan: Plan, workload: AnyWorkload) -> float | None:
    """The relative distance to the certified lower bound; None with sampling, for which no bound is known."""
    from hushgrad.sampling import RoundRobin

    if not isinstance(plan.sampler, RoundRobin):
        return None
    return plan.noise.error(steps=plan.steps, participation=plan.participation, workload=workload).gap


def _placed(candidate: Candidate, best: float) -> Candidate:
    relative = _per_step(candidate) / best
    words = [candidate.reason]
    if candidate.gap is not None:
        words.append(f"At most {candidate.gap:.1%} above the best possible for this order.")
    words.append("Least predicted error here." if relative == 1 else f"{relative - 1:.1%} more error than the best.")
    return dataclasses.replace(candidate, relative=relative, reason=" ".join(words))


@lru_cache(maxsize=256)
def _calibrated(plan: Plan, epsilon: float) -> Plan:
    # Cached: sweeps repeat questions, and calibration takes most of the time.
    return plan.calibrated(epsilon=epsilon)

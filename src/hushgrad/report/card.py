"""The privacy card: everything about a run that a reader needs to judge its guarantee."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hushgrad.budget import Ledger, Policy, read_policy
from hushgrad.errors import NoTheorem
from hushgrad.events import Gaussian, RepeatAndSelect
from hushgrad.guarantee import Guarantee, questions
from hushgrad.recipes.spending import require_allowed
from hushgrad.report.citations import citation
from hushgrad.report.folder import Folder, read_folder
from hushgrad.report.provenance import budget_of, provenance
from hushgrad.report.words import in_plain_words, sampling_done
from hushgrad.train.plan import Plan

_POINTS = 49
_LONGEST = 400  # points of a curve: more cannot be seen


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts of a run, ready for print. ``interval``, ``gap``, ``audit``, ``tuning`` and ``budget`` are None where unknown;
    ``provenance`` has what is known of the data, of who ran it and when, and of the model file.

    ``curve`` holds (epsilon, delta) pairs, ``trade_off`` (false alarms, misses) pairs; both are valid bounds at every point.
    ``series`` are the metrics over the steps; those that begin with ``raw_`` are not covered by the guarantee.
    """

    name: str
    guarantee: Guarantee
    plan: Plan
    steps: int
    plain: tuple[str, ...] = ()
    sampling: dict[str, str]
    interval: tuple[float, float] | None = None
    curve: tuple[tuple[float, float], ...] = ()
    trade_off: tuple[tuple[float, float], ...] = ()
    noise_source: str
    gap: float | None
    gap_note: str
    audit: dict[str, Any] | None
    tuning: dict[str, Any] | None
    results: dict[str, float]
    series: dict[str, tuple[tuple[float, float], ...]]
    versions: dict[str, str]
    caveats: tuple[str, ...]
    citations: str
    budget: dict[str, Any] | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        content = vars(self) | {
            "privacy_card": 1,
            "claim": str(self.guarantee),
            "guarantee": self.guarantee.to_json(),
            "plan": self.plan.to_json(),
            "plan_digest": self.plan.digest,
            "kappa": self.plan.kappa if self.plan.certified else None,
            "plain": list(self.plain),
            "caveats": list(self.caveats),
        }
        return dict(sorted(content.items()))

    def to_markdown(self) -> str:
        """As a section of a model card."""
        from hushgrad.report.page import to_markdown

        return to_markdown(self)

    def to_html(self) -> str:
        """As one self-contained page: no network, no scripts, light and dark, good on paper. Needs ``hushgrad[report]``."""
        from hushgrad.report.page import to_html

        return to_html(self)


def privacy_card(
    run_folder: str | Path, *, raw: bool = False, policy: Policy | None = None, ledger: Ledger | None = None
) -> Card:
    """The card of a finished ``hushgrad train`` run.

    The files are checked against each other, and epsilon against the ledger. The checkpoint folder, which may contain a key, is
    never opened.

    Args:
        run_folder: the ``--out`` of ``hushgrad train`` or ``tune``.
        raw: add metrics computed without noise; show such a card only to people who may see the data.
        policy: what is allowed; by default the policy that HUSHGRAD_POLICY names, if any.
        ledger: the ledger to look the run up in; without it the card repeats what the folder says, and says so.

    Raises:
        PolicyRefused: where the policy does not allow the claim, or wants a ledger and none was given.
        ArgumentError: where the folder holds no finished run, or its files contradict each other.
    """
    card = facts_of(run_folder, raw=raw, policy=policy, ledger=ledger)
    claim = card.guarantee
    curves: dict[str, Any] = {"curve": _curve(claim), "trade_off": _trade_off(claim)}
    return dataclasses.replace(card, plain=in_plain_words(claim), interval=_interval(claim), **curves)


def facts_of(run_folder: str | Path, *, raw: bool = False, policy: Policy | None = None, ledger: Ledger | None = None) -> Card:
    """A card with the same checks as :func:`privacy_card`, but without plain words, interval and curves, which take most of the time."""
    folder = read_folder(run_folder)
    rules = read_policy() if policy is None else policy
    budget = budget_of(folder, ledger, rules)
    require_allowed(rules, folder.plan, paid=budget is not None, guarantee=folder.guarantee)
    guarantee, plan, steps = folder.guarantee, folder.plan, folder.ledger.steps
    gap, gap_note = _distance(plan)
    return Card(
        name=folder.name,
        guarantee=guarantee,
        plan=plan,
        steps=steps,
        sampling={"assumed": str(plan.participation), "done": sampling_done(plan, guarantee, steps)},
        noise_source=_noise_source(folder),
        gap=gap,
        gap_note=gap_note,
        audit=_audit(folder.audit),
        tuning=_tuning(folder.tuning),
        results=_results(folder),
        series=_series(folder, raw),
        versions=_versions(folder),
        caveats=_caveats(folder, raw),
        citations=citation(plan, accountant=guarantee.accountant) + _cited_search(guarantee),
        budget=budget,
        provenance=provenance(folder, rules),
    )


def _interval(guarantee: Guarantee) -> tuple[float, float] | None:
    from hushgrad.accounting import epsilon_interval

    try:
        return epsilon_interval(guarantee.event, delta=guarantee.delta, relation=guarantee.relation)
    except NoTheorem:
        return None


@lru_cache(maxsize=32)
def _curve(guarantee: Guarantee) -> tuple[tuple[float, float], ...]:
    """Delta over epsilon, from 0 to a little beyond the claim."""
    if not math.isfinite(guarantee.epsilon):
        return ()
    from hushgrad.accounting import delta_curve

    epsilons = [1.25 * guarantee.epsilon * k / (_POINTS - 1) for k in range(_POINTS)]
    deltas = delta_curve(guarantee.event, epsilons, accountant=guarantee.accountant, relation=guarantee.relation)
    return tuple(zip(epsilons, deltas, strict=True))


@lru_cache(maxsize=32)
def _trade_off(guarantee: Guarantee) -> tuple[tuple[float, float], ...]:
    if not math.isfinite(guarantee.epsilon):
        return ()
    from hushgrad.accounting import trade_off

    alphas = [(k / (_POINTS - 1)) ** 2 for k in range(_POINTS)]  # dense where false alarms are rare
    misses = trade_off(guarantee.event, alphas, accountant=guarantee.accountant, relation=guarantee.relation, points=80)
    return tuple(zip(alphas, misses, strict=True))


def _distance(plan: Plan) -> tuple[float | None, str]:
    """How far the mechanism is from the best possible one, where a bound is known."""
    try:
        error = plan.noise.error(steps=plan.steps, participation=plan.participation)
    except NoTheorem:
        return None, "No bound is known for the best mechanism under this sampling."
    if not isinstance(plan.event(), Gaussian):  # its theorem is better than the worst case over who takes part
        return None, "Sampling amplifies this mechanism, and no bound is known for the best one under it."
    return error.gap, f"Prefix-sum rmse at most {error.gap:.1%} above the certified bound ({error.certificate})."


def _noise_source(folder: Folder) -> str:
    seeded = folder.recipe.get("run", {}).get("seed") is not None or any(
        "seed" in note.lower() for note in folder.guarantee.notes
    )
    if seeded:
        return "A seed: the run can be repeated, and is not private against whoever knows or guesses the seed."
    return "A secret 256-bit key from the operating system, erased when the run was finished. It is in no report."


def _audit(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """The lower bounds and the verdict; single scores are left out, as they show un-noised data."""
    if found is None:
        return None
    bounds = [b for b in found.get("lower_bounds", ()) if isinstance(b, dict) and isinstance(b.get("epsilon"), (int, float))]
    keep = ("verdict", "confidence", "canaries", "steps", "refuted_by")
    shown = ("method", "epsilon", "confidence", "assumption")
    return {
        **{key: found[key] for key in keep if key in found},
        "lower_bound": max((float(b["epsilon"]) for b in bounds), default=0.0),
        "lower_bounds": [{key: b[key] for key in shown if key in b} for b in bounds],
    }


def _tuning(found: dict[str, Any] | None) -> dict[str, Any] | None:
    keep = ("method", "mean_trials", "trials", "candidates", "over", "score", "chosen", "naive_epsilon", "epsilon", "delta")
    return None if found is None else {key: found[key] for key in keep if key in found}


def _cited_search(guarantee: Guarantee) -> str:
    """The papers behind a search, if the run was found by one."""
    if not isinstance(guarantee.event, RepeatAndSelect):
        return ""
    return "".join(f"\n{paper.bibtex()}\n" for paper in RepeatAndSelect.papers)


def _results(folder: Folder) -> dict[str, float]:
    outcome = folder.report.get("outcome", {})
    names = [name for name in outcome if name.startswith("test_")] + ["seconds"]
    return {name: float(outcome[name]) for name in names if isinstance(outcome.get(name), (int, float))}


def _series(folder: Folder, raw: bool) -> dict[str, tuple[tuple[float, float], ...]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for line in folder.metrics:
        for name, value in line.items():
            usable = isinstance(value, (int, float)) and isinstance(line.get("step"), (int, float)) and math.isfinite(value)
            if usable and name not in ("step", "steps") and (raw or not name.startswith("raw_")):
                found.setdefault(name, []).append((float(line["step"]), float(value)))
    return {name: tuple(_thinned(points)) for name, points in found.items()}


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // _LONGEST)
    return points if every == 1 else [*points[::every], points[-1]]


def _versions(folder: Folder) -> dict[str, str]:
    found = folder.report.get("versions", {})
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def _caveats(folder: Folder, raw: bool) -> tuple[str, ...]:
    found = [*questions(folder.guarantee.epsilon, folder.guarantee.delta)]
    found += [str(caveat) for caveat in folder.report.get("caveats", ())]
    if not folder.named:
        found.append(
            "An earlier version wrote report.json: it does not say which files are the run's own, so only what they say agrees."
        )
    if folder.tuning is not None and not isinstance(folder.guarantee.event, RepeatAndSelect):
        found.append("Somebody added tuning.json: the guarantee does not count a search, and nothing here vouches for that file.")
    if folder.audit is not None and "plan_digest" not in folder.audit:
        found.append("Somebody added audit.json: it does not name the plan that was audited, so it may be another run's.")
    if folder.tuning is None:
        found.append("What was tuned, and on which data, is not recorded in the run folder: its cost is unknown and not counted.")
    if raw:
        found.append("This card shows metrics (raw_...) that the guarantee does not cover: it is as sensitive as the data.")
    return tuple(dict.fromkeys(found))

"""Two runs side by side: their guarantees, their settings, and whether the guarantees can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hushgrad._printed import at_most
from hushgrad.budget import Policy
from hushgrad.errors import NoTheorem
from hushgrad.report.card import Card, facts_of

ANYTHING = Policy(delta_below_one_over_n=False)  # to look at two runs is to claim nothing


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Rows (what, first run, second run) and sentences about them."""

    names: tuple[str, str]
    rows: tuple[tuple[str, str, str], ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        rows = [{"what": what, "first": first, "second": second} for what, first, second in self.rows]
        return {"runs": list(self.names), "rows": rows, "remarks": list(self.remarks)}


def compare_runs(first: str | Path | Card, second: str | Path | Card) -> SideBySide:
    """Compare two finished runs. Epsilons are computed again from the ledgers, and at one delta where the runs' differ.

    Args:
        first: the folder of a run, or its card.
        second: the other one.

    Raises:
        ArgumentError: where a folder holds no finished run, or its files contradict each other.
    """
    a, b = (one if isinstance(one, Card) else facts_of(one, policy=ANYTHING) for one in (first, second))
    pairs = zip(_facts(a).items(), _facts(b).values(), strict=True)
    rows = [(what, mine, others) for (what, mine), others in pairs if mine or others]
    names = sorted({*a.results, *b.results} - {"seconds"})
    rows += [(name.replace("_", " "), _number(name, a.results.get(name)), _number(name, b.results.get(name))) for name in names]
    return SideBySide(names=(a.name, b.name), rows=tuple(rows), remarks=tuple(_remarks(a, b)))


def _facts(card: Card) -> dict[str, str]:
    guarantee, plan = card.guarantee, card.plan
    return {
        "epsilon": at_most(guarantee.epsilon),
        "delta": at_most(guarantee.delta, 6),
        "protected": f"one {guarantee.unit}, {guarantee.relation}",
        "accountant": guarantee.accountant,
        "steps": str(card.steps),
        "batches": str(plan.participation),
        "clip norm": f"{plan.max_grad_norm:.6g}",
        "noise": f"{type(plan.noise).__name__}, {plan.noise_multiplier or 0:.6g} x clip norm",
        "sums": "certified" if plan.certified else "measured",
        "search counted": "yes" if card.tuning is not None else "no",
        "data": card.provenance.get("data", ""),
        "identity": card.provenance.get("identity", ""),
        "records": card.provenance.get("records", ""),
        "run by": card.provenance.get("by", ""),
        "finished": card.provenance.get("finished", ""),
        "model": card.provenance.get("model_sha256", "")[:16],
        "plan": plan.digest[:12],
    }


def _number(name: str, value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if name.endswith("records") else f"{value:.4f}"


def _remarks(a: Card, b: Card) -> list[str]:
    mine, others = a.guarantee, b.guarantee
    if (mine.unit, mine.relation) != (others.unit, others.relation):
        return [
            "The runs protect different things, so their epsilons cannot be compared: an epsilon per example is none per user."
        ]
    if mine.delta == others.delta:
        return [_smaller(a, b, mine.epsilon, others.epsilon, mine.delta)]
    from hushgrad.accounting import epsilon

    delta = min(mine.delta, others.delta)
    try:
        first, second = (
            epsilon(one.event, delta=delta, accountant=one.accountant, relation=one.relation) for one in (mine, others)
        )
    except NoTheorem:
        return ["Their deltas differ, and an epsilon at the other one's delta is not known."]
    return [f"Their deltas differ. {_smaller(a, b, first, second, delta)}"]


def _smaller(a: Card, b: Card, first: float, second: float, delta: float) -> str:
    at = f"At delta {at_most(delta, 6)} the epsilons are {at_most(first)} and {at_most(second)}"
    if first == second:
        return f"{at}: the same."
    return f"{at}: {(a if first < second else b).name} promises more."

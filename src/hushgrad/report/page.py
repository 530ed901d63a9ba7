"""The card as Markdown, a section of a model card, and as one HTML page: no network, no scripts, light and dark, printable."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from hushgrad._printed import at_least, at_most
from hushgrad.errors import ArgumentError
from hushgrad.report.charts import Chart, above, number, smoothed, upper
from hushgrad.report.provenance import provenance_words

if TYPE_CHECKING:
    from hushgrad.report.card import Card
    from hushgrad.train.plan import Plan


def to_markdown(card: Card) -> str:
    """The whole card; see :meth:`Card.to_markdown`."""
    lines = ["## Privacy", "", f"**{_escaped(str(card.guarantee))}**", ""]
    lines += [f"{_escaped(sentence)}\n" for sentence in card.plain]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {_escaped(name)} | {_escaped(value)} |" for name, value in details(card)]
    lines += ["", "### What the guarantee does not say", "", *(f"- {_escaped(caveat)}" for caveat in card.caveats)]
    lines += ["", "### Plan", "", "```", str(card.plan), "```"]
    lines += ["", "### Citations", "", "```bibtex", card.citations.strip(), "```", ""]
    return "\n".join(lines)


def details(card: Card) -> list[tuple[str, str]]:
    """The card's facts as (name, words)."""
    claim = card.guarantee
    rows = [
        ("epsilon, delta", f"{_up(claim.epsilon)}, {at_most(claim.delta, 6)}"),
        ("certified interval", interval_words(card)),
        ("unit", claim.unit),
        ("neighbours", str(claim.relation)),
        ("sampling assumed", card.sampling["assumed"]),
        ("sampling done", card.sampling["done"]),
        ("mechanism", f"{type(card.plan.noise).__name__}, noise multiplier {_number(card.plan.noise_multiplier)}"),
        ("distance from the optimum", card.gap_note),
        ("clipping", f"{type(card.plan.clip).__name__}, norm {card.plan.max_grad_norm:g}; divided by {card.plan.batch_size:g}"),
        ("sums", _sums_words(card.plan)),
        ("vouched for, and other notes", " ".join(f"{note.rstrip('.')}." for note in claim.notes) or "nothing"),
        ("accountant", claim.accountant),
        ("noise source", card.noise_source),
        ("tuning", tuning_words(card.tuning)),
        ("budget ledger", budget_words(card.budget)),
        ("audit", audit_words(card.audit)),
        *provenance_words(card.provenance),
        ("steps", f"{card.steps} of {card.plan.steps}"),
        *((name.replace("_", " "), f"{value:.4g}") for name, value in card.results.items()),
        ("versions", ", ".join(f"{name} {version}" for name, version in card.versions.items()) or "not recorded"),
        ("plan (SHA-256)", card.plan.digest),
    ]
    return rows


def _sums_words(plan: Plan) -> str:
    """How far a record can move a clipped sum in the arithmetic that ran."""
    if plan.certified:
        return f"certified: at most 1 + kappa clip norms in double precision, kappa = {plan.kappa:g}, counted in epsilon"
    return "measured, not proved: at most one clip norm in real numbers; no kappa is certified"


def interval_words(card: Card) -> str:
    """The tight epsilon lies in it, proved from both sides."""
    if card.interval is None:
        return "no two-sided analysis"
    lower, upper = card.interval
    return f"the tight epsilon of this event lies between {at_least(lower, 6)} and {at_most(upper, 6)}"


def audit_words(audit: dict[str, Any] | None) -> str:
    """What was found from below, beside the claim."""
    if audit is None:
        return "not audited"
    where = f" over {audit['steps']} steps with {audit['canaries']} canaries" if {"steps", "canaries"} <= set(audit) else ""
    return f"epsilon is at least {at_least(audit['lower_bound'], 3)}{where}; the claim is {audit.get('verdict', 'not judged')}"


def tuning_words(tuning: dict[str, Any] | None) -> str:
    """What the choice of hyper-parameters cost."""
    if tuning is None:
        return "unknown: nothing is recorded; trials on the same data would cost more than the epsilon above"
    if {"naive_epsilon", "epsilon", "delta"} <= set(tuning):
        return _search_words(tuning)
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in tuning.items())
    return words or "recorded, without details"


def _search_words(tuning: dict[str, Any]) -> str:
    """Both epsilons, side by side: the winner's alone, and that of how it was found."""
    words = (
        f"naive epsilon {_up(float(tuning['naive_epsilon']))} (the winner alone, not a claim); "
        f"true epsilon {_up(float(tuning['epsilon']))} at delta {at_most(tuning['delta'], 6)} (the search included)"
    )
    chosen = tuning.get("chosen")
    details = {
        "candidates": tuning.get("candidates"),
        "mean number of trials": tuning.get("mean_trials"),
        "by": tuning.get("method"),
        "chosen": ", ".join(f"{k} = {v}" for k, v in chosen.items()) if isinstance(chosen, dict) else None,
        "scored by": tuning.get("score"),
    }
    return "; ".join([words, *(f"{name}: {value}" for name, value in details.items() if value is not None)])


def budget_words(budget: dict[str, Any] | None) -> str:
    """Where the run is booked, and how much was spent once it was."""
    if budget is None:
        return "not booked in a ledger: other releases about the same data are not counted here"
    words = f"{budget.get('state', 'reserved')} as {budget.get('reservation', 'unknown')} on {budget.get('dataset', 'unknown')!r}"
    words += "" if budget.get("looked_up") else " (as the run's folder says; not looked up in the ledger)"
    if not {"spent_epsilon", "budget_epsilon", "budget_delta", "head"} <= set(budget):
        return words
    spent = f"{_up(float(budget['spent_epsilon']))} of {at_most(budget['budget_epsilon'], 6)} at delta {at_most(budget['budget_delta'], 6)}"
    return f"{words}; epsilon spent on it then: {spent}; head of the ledger: {budget['head']}"


def _up(epsilon: float) -> str:
    return "infinite" if epsilon == float("inf") else at_most(epsilon)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _escaped(text: str) -> str:
    """Table cells and sentences must not end early or turn into mark-up."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")


def to_html(card: Card) -> str:
    """The page; see :meth:`Card.to_html`.

    The policy in ``card.html`` forbids every load, so that a page which was tampered with cannot call home either.
    """
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError:
        raise ArgumentError(
            "Expected jinja2 for the HTML page of a card. Install it with pip install 'hushgrad[report]'."
        ) from None
    environment = Environment(autoescape=True, trim_blocks=False)
    environment.filters |= {"at_least": at_least, "at_most": at_most}
    template = environment.from_string(resources.files("hushgrad.report").joinpath("card.html").read_text(encoding="utf-8"))
    plots = [(chart.title, chart.words, Markup(chart.svg())) for chart in figures(card)]  # drawn here, from numbers only
    rows = details(card)
    headline = [("epsilon", rows[0][1].split(",")[0]), ("delta", at_most(card.guarantee.delta, 6))]
    headline += [("protects one", card.guarantee.unit), ("neighbours", str(card.guarantee.relation))]
    if card.audit is not None:
        headline.append(("audit: epsilon at least", at_least(card.audit["lower_bound"], 3)))
    return template.render(card=card, details=rows, headline=headline, plots=plots)


_TITLES = {
    "epsilon": ("epsilon spent", "epsilon"),
    "learning_rate": ("learning rate", "rate"),
    "signal_to_noise": ("signal to noise", "ratio of norms"),
    "test_accuracy": ("test accuracy", "accuracy"),
    "test_loss": ("test loss", "loss"),
    "raw_loss": ("training loss (not private)", "loss"),
    "raw_accuracy": ("training accuracy (not private)", "accuracy"),
    "raw_clipped_fraction": ("clipped gradients (not private)", "fraction"),
}


def figures(card: Card) -> list[Chart]:
    """The charts of a card; each says in words what it shows."""
    found = [_curve(card)] if card.curve else []
    if card.trade_off:
        words = "The fewest misses of any attacker for each rate of false alarms; the dashed line is a coin flip."
        coin = ((0.0, 1.0), (1.0, 0.0))
        title = "trade-off of every attacker"
        found.append(Chart(title=title, words=words, x="false alarms", y="misses", points=card.trade_off, second=coin))
    for name, points in card.series.items():
        if len(points) > 1:
            title, label = _TITLES.get(name, (name.replace("_", " "), name))
            shown, printed = (above(points), upper) if name == "epsilon" else (smoothed(points), number)
            words = f"Over the steps, from {printed(shown[0][1])} to {printed(shown[-1][1])}."
            found.append(Chart(title=title, words=words, x="step", y=label, points=shown))
    return found


def _curve(card: Card) -> Chart:
    epsilon, delta = card.guarantee.epsilon, card.guarantee.delta
    words = f"Delta falls as epsilon grows; the dot is the claim, epsilon {at_most(epsilon)}, delta {at_most(delta, 6)}."
    shown = [(e, d) for e, d in card.curve if d >= delta / 100]
    second: tuple[tuple[float, float], ...] = ()
    if card.audit is not None:
        bound = card.audit["lower_bound"]
        words += f" The dashed line is the audit: epsilon at least {at_least(bound, 3)}."
        second = ((bound, min(d for _, d in shown)), (bound, max(d for _, d in shown)))
    options = {"mark": (epsilon, delta), "second": second, "log_y": True}
    return Chart(title="delta over epsilon", words=words, x="epsilon", y="delta", points=shown, **options)  # type: ignore[arg-type]

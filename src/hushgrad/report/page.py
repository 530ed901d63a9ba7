"""The card as one HTML page: no network, no scripts, light and dark, printable."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from hushgrad._printed import at_least, at_most
from hushgrad.errors import ArgumentError
from hushgrad.report.charts import Chart, above, number, smoothed, upper
from hushgrad.report.markdown import details

if TYPE_CHECKING:
    from hushgrad.report.card import Card


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

"""The card as one HTML page: no network, no scripts, light and dark, printable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._printed import at_least, at_most
from hushgrad.errors import ArgumentError
from hushgrad.report.charts import Chart, above, number, smoothed, upper
from hushgrad.report.markdown import details

if TYPE_CHECKING:
    from hushgrad.report.card import Card

# The policy forbids every load, so that a page which was tampered with cannot call home either.
_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy card: {{ card.name }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --paper: #ffffff; --panel: #f4f6f9; --rule: #d8dee7; --accent: #2459a9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #a2adbb; --paper: #14181f; --panel: #1d232c; --rule: #343d4a; --accent: #8db8ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
header p.kicker { margin: 0; color: var(--soft); letter-spacing: .06em; text-transform: uppercase; font-size: .78rem; }
h1 { margin: .1rem 0 1.1rem; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .7rem; font-size: 1.12rem; border-bottom: 1px solid var(--rule); padding-bottom: .3rem; }
.claim { display: flex; flex-wrap: wrap; gap: 1rem 2.4rem; background: var(--panel); border-left: 4px solid var(--accent);
         padding: 1rem 1.3rem; border-radius: 0 8px 8px 0; }
.claim div span { display: block; color: var(--soft); font-size: .8rem; }
.claim div strong { font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.formal { color: var(--soft); font-size: .92rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(9rem, 13rem) 1fr; gap: .35rem 1.2rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: .8rem .8rem .3rem; break-inside: avoid; }
figcaption { font-size: .9rem; margin-bottom: .3rem; } figcaption small { display: block; color: var(--soft); }
.chart { width: 100%; height: auto; display: block; } .chart text { fill: var(--soft); font-size: 12px; }
.chart .grid { stroke: var(--rule); } .chart .base { stroke: var(--soft); } .chart .area { fill: var(--accent); opacity: .09; }
.chart .line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; } .chart .mark { fill: var(--accent); }
.chart .second { fill: none; stroke: var(--soft); stroke-width: 1.4; stroke-dasharray: 5 4; }
pre { background: var(--panel); padding: .9rem 1rem; border-radius: 8px; overflow-x: auto;
      font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
      white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; } }
@media print {
  :root { --ink: #000; --soft: #444; --paper: #fff; --panel: #fff; --rule: #bbb; --accent: #000; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, pre, .claim { border: 1px solid #ccc; }
  .plots { grid-template-columns: 1fr 1fr; }
}
</style>
</head>
<body>
<main>
<header><p class="kicker">Privacy card</p><h1>{{ card.name }}</h1></header>
<section class="claim" aria-label="The claim">
{% for name, value in headline %}<div><span>{{ name }}</span><strong>{{ value }}</strong></div>
{% endfor %}</section>
<section aria-labelledby="plain"><h2 id="plain">In plain words</h2>
{% for sentence in card.plain %}<p>{{ sentence }}</p>
{% endfor %}<p class="formal">{{ card.guarantee }}</p></section>
<section aria-labelledby="full"><h2 id="full">In full</h2>
<dl>{% for name, value in details %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl></section>
{% if plots %}<section aria-labelledby="curves"><h2 id="curves">Curves</h2>
<div class="plots">{% for title, words, picture in plots %}<figure>
<figcaption>{{ title }}<small>{{ words }}</small></figcaption>{{ picture }}</figure>
{% endfor %}</div></section>{% endif %}
{% if card.audit and card.audit.lower_bounds %}<section aria-labelledby="audit"><h2 id="audit">Audit: lower bounds beside the claim</h2>
<dl>{% for bound in card.audit.lower_bounds %}<dt>{{ bound.method }}</dt><dd>
epsilon at least {{ bound.epsilon|at_least(3) }}{% if bound.assumption %}, if {{ bound.assumption }}{% endif %}</dd>
{% endfor %}<dt>claimed</dt><dd>epsilon at most {{ card.guarantee.epsilon|at_most }}</dd></dl></section>{% endif %}
<section aria-labelledby="not"><h2 id="not">What the guarantee does not say</h2>
<ul>{% for caveat in card.caveats %}<li>{{ caveat }}</li>
{% endfor %}</ul></section>
<section aria-labelledby="plan"><h2 id="plan">Plan</h2><pre>{{ card.plan }}</pre></section>
<section aria-labelledby="cite"><h2 id="cite">Citations</h2><pre>{{ card.citations }}</pre></section>
</main>
</body>
</html>
"""


def to_html(card: Card) -> str:
    """The page; see :meth:`Card.to_html`."""
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError:
        raise ArgumentError(
            "Expected jinja2 for the HTML page of a card. Install it with pip install 'hushgrad[report]'."
        ) from None
    environment = Environment(autoescape=True, trim_blocks=False)
    environment.filters |= {"at_least": at_least, "at_most": at_most}
    template = environment.from_string(_TEMPLATE)
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

"""The pictures of a card, as SVG text whose ink follows the page (light, dark, paper)."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hushgrad._printed import at_least, at_most
from hushgrad.errors import ArgumentError

if TYPE_CHECKING:
    from hushgrad.report.card import Card

__all__ = ["figures", "svg"]

_INK = "#010203"  # a colour that nothing else has: replaced by the page's own ink
_LINE, _SECOND, _MARK = "#3b7dd8", "#d9822b", "#c23030"
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

Draw = Callable[[Any], None]


def figures(card: Card) -> list[tuple[str, str, Draw]]:
    """(title, description for those who cannot see it, drawing function) of each picture."""
    found: list[tuple[str, str, Draw]] = []
    if card.curve:
        found.append(("delta over epsilon", _curve_words(card), lambda axes: _curve(card, axes)))
    if card.trade_off:
        words = "The least miss rate of any attacker against its false-alarm rate; the diagonal is a coin flip."
        found.append(("trade-off of every attacker", words, lambda axes: _trade_off(card, axes)))
    for name, points in card.series.items():
        if len(points) > 1:
            title, label = _TITLES.get(name, (name.replace("_", " "), name))
            words = f"{title} over the steps, from {points[0][1]:.3g} to {points[-1][1]:.3g}."
            found.append((title, words, lambda axes, p=points, y=label: _series(p, y, axes)))  # type: ignore[misc]
    return found


def _curve_words(card: Card) -> str:
    return (
        f"Delta falls as epsilon grows; the claim is the point epsilon {at_most(card.guarantee.epsilon)}, "
        f"delta {at_most(card.guarantee.delta, 6)}."
    )


def svg(draw: Draw) -> str:
    """One picture as SVG text, without fonts, scripts or references to elsewhere."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError(
            "Expected matplotlib for the plots of a card. Install it with pip install 'hushgrad[report]'."
        ) from None
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "hushgrad", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        _in_ink(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    content = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)  # addresses of vocabularies
    return content[content.index("<svg") :].replace(_INK, "currentColor")


def _in_ink(axes: Any) -> None:
    axes.tick_params(colors=_INK, which="both")
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    for side, spine in axes.spines.items():
        spine.set_color(_INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.grid(True, color=_INK, alpha=0.12, linewidth=0.6)
    legend = axes.get_legend()
    if legend is not None:
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set_color(_INK)


def _curve(card: Card, axes: Any) -> None:
    shown = [(e, d) for e, d in card.curve if d > 0]
    axes.plot(*zip(*shown, strict=True), color=_LINE, linewidth=1.6)
    axes.plot([card.guarantee.epsilon], [card.guarantee.delta], "o", color=_MARK, markersize=5, label="claim")
    if card.audit is not None:
        bound = card.audit["lower_bound"]
        axes.axvline(bound, color=_SECOND, linestyle="--", linewidth=1.2, label=f"audit: at least {at_least(bound, 3)}")
    axes.set(xlabel="epsilon", ylabel="delta", yscale="log", xlim=(0, None), ylim=(card.guarantee.delta / 100, 1.5))
    axes.legend(loc="upper right")


def _trade_off(card: Card, axes: Any) -> None:
    alphas, misses = zip(*card.trade_off, strict=True)
    axes.plot([0, 1], [1, 0], color=_SECOND, linestyle="--", linewidth=1, label="coin flip")
    axes.plot(alphas, misses, color=_LINE, linewidth=1.6, label="best attacker, at best")
    axes.set(xlabel="false alarms", ylabel="misses", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(loc="upper right")


def _series(points: Sequence[tuple[float, float]], label: str, axes: Any) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=_LINE, linewidth=1.2)
    axes.set(xlabel="step", ylabel=label, xlim=(0, None))
    if min(values) >= 0:
        axes.set_ylim(bottom=0)

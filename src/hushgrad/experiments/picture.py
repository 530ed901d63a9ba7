"""Pictures: matplotlib, imported only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hushgrad.errors import HushgradError

# One look per method in all pictures: colour-blind safe (Okabe and Ito), distinct in black and white by marker and line.
MARKS: dict[str, dict[str, Any]] = {
    "independent": {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    "anti": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    "nu": {"color": "#0072B2", "marker": "^", "linestyle": "-."},
    "best": {"color": "#009E73", "marker": "D", "linestyle": "-"},
    "other": {"color": "#CC79A7", "marker": "v", "linestyle": ":"},
    "more": {"color": "#56B4E9", "marker": "P", "linestyle": "--"},
    "bound": {"color": "black", "marker": "", "linestyle": ":"},
}


class MissingExtra(HushgradError, ImportError):
    """An optional package is not installed; the message says how to get it."""


def save(path: Path, draw: Callable[[Any], None], *, size: tuple[float, float] = (10.0, 4.2), dpi: int = 90) -> None:
    """Draw into a fresh figure and write it as a PNG of few colours, the same bytes for the same numbers."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "Pictures need matplotlib. Install it with pip install 'hushgrad[report]', or pass --no-picture."
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    for axes in figure.axes:
        _plain_ticks(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    from PIL import Image  # matplotlib needs it anyway

    Image.open(buffer).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)


def panel(figure: Any, where: Any, *, title: str, x: str, y: str, log: str = "xy") -> Any:
    """Axes with a title, labels with units, and logarithmic scales where asked."""
    axes = figure.add_subplot(where)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _plain_ticks(axes: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers; at 1, 2 and 5 where the axis spans less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, scale, (low, high) in (
        (axes.xaxis, axes.get_xscale(), axes.get_xlim()),
        (axes.yaxis, axes.get_yscale(), axes.get_ylim()),
    ):
        if scale != "log":
            continue
        narrow = high < 100 * low
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=12))
        axis.set_minor_formatter(NullFormatter())
        if low >= 1e-3 and high <= 1e5:
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))

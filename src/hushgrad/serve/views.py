"""Templates: HTML from values, everything escaped; nothing in them is computed."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hushgrad import __version__
from hushgrad._printed import size
from hushgrad.report import charts


@lru_cache(maxsize=1)
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("hushgrad.serve"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {
        "number": charts.number,
        "upper": charts.upper,
        "lower": charts.lower,
        "percent": _percent,
        "ago": ago,
        "bytes": lambda count: "–" if count is None else size(count),
        "typed": _typed,
    }
    # Drawn from numbers, and their words are escaped where they are drawn.
    found.globals |= {"bar": lambda *a, **k: Markup(charts.bar(*a, **k)), "picture": lambda chart: Markup(chart.svg())}
    found.globals |= {"version": __version__, "share": _share}
    return found


def page(
    request: Request, template: str, *, status: int = 200, headers: dict[str, str] | None = None, **context: Any
) -> HTMLResponse:
    """The filled template."""
    text = _environment().get_template(template).render(path=request.url.path, settings=request.app.state.settings, **context)
    return HTMLResponse(text, status, headers=headers)


def _share(spent: object, budget: float) -> float:
    """How full a bar is; an infinite epsilon comes as a word."""
    return spent / budget if isinstance(spent, (int, float)) else 2.0


def _typed(x: float) -> str:
    """A number as a person would type it: 1e-6 and 60000."""
    return f"{x:g}".replace("e-0", "e-") if x < 1e-3 else f"{x:.10g}"


def _percent(x: float, digits: int = 1) -> str:
    return f"{100 * x:.{digits}f} %"


def ago(then: float) -> str:
    """How long ago, in words.

    >>> import time
    >>> ago(time.time() - 150)
    '2 min ago'
    """
    seconds = max(0.0, time.time() - then)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} ago"
    return "just now" if seconds < 5 else f"{seconds:.0f} s ago"

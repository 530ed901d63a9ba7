"""Templates: HTML from values, everything escaped; nothing in them is computed. And errors, as a page and as JSON (RFC 9457)."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException

from hushgrad import __version__
from hushgrad._printed import size
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.report import charts
from hushgrad.serve.access_control import HEADERS
from hushgrad.serve.files import Unreadable
from hushgrad.serve.worker_queue import Busy, Refused, TooLong


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


# Errors: one clear sentence, as a page for people and as a JSON problem for programs ---------------------------------------


_STATUS: dict[type[Exception], int] = {ArgumentError: 422, Refused: 422, Unreadable: 422, TooLong: 504, Busy: 503}
_TITLES = {404: "Not there", 405: "Read only", 422: "Refused", 500: "A defect", 503: "Busy", 504: "Too long"}
_WORDS = {
    404: "There is no such page here.",
    405: "This page is read-only: it answers GET and HEAD.",
    422: "The question could not be understood.",
    500: "Something went wrong in this program, and not in your question.",
}


class NotThere(HushgradError):
    """The requested thing does not exist."""


_STATUS[NotThere] = 404


def status_of(error: Exception) -> int:
    """The HTTP status of one of hushgrad's errors."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 422)


def problem(request: Request, status: int, sentence: str) -> Response:
    """The error response, in the format of the address."""
    title = _TITLES.get(status, "Not possible")
    headers = {"Retry-After": "3"} if status == 503 else {"Allow": "GET, HEAD"} if status == 405 else {}
    if request.url.path.startswith("/api"):
        content = {"title": title, "status": status, "detail": sentence}
        return JSONResponse(content, status, headers=headers, media_type="application/problem+json")
    template = "_problem.html" if request.url.path.startswith("/part") else "problem.html"
    return page(request, template, status=status, headers=headers, title=title, sentence=sentence)


def answer_problems(app: FastAPI) -> None:
    """Install the answers. What the visitor sent is not repeated, but for the short values in our own sentences."""

    @app.exception_handler(HushgradError)
    async def known(request: Request, error: HushgradError) -> Response:
        return problem(request, status_of(error), str(error))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        return problem(request, error.status_code, _WORDS.get(error.status_code, "This is not possible."))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem(request, 422, _WORDS[422])

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        answer = problem(request, 500, _WORDS[500])
        answer.headers.update(HEADERS)  # an unexpected error is answered outside the access control
        return answer

"""Errors: one clear sentence, as a page for people and as a JSON problem (RFC 9457) for programs."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.serve.access_control import HEADERS
from hushgrad.serve.files import Unreadable
from hushgrad.serve.views import page
from hushgrad.serve.worker_queue import Busy, Refused, TooLong

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

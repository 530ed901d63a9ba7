"""The application: pages and API behind the access control."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hushgrad.errors import ArgumentError
from hushgrad.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI


def require_extra() -> None:
    """Raise one sentence where the web page's packages are missing."""
    try:
        import fastapi  # noqa: F401
        import jinja2  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ArgumentError(f"Expected {error.name} for the web page. Install it with pip install 'hushgrad[serve]'.") from None


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application of ``hushgrad serve``, to be run by any ASGI server, or tested without one.

    Every answer is read-only, is made from public numbers, from files that a run wrote for its readers or from the ledger, and
    carries a policy under which a browser loads nothing from elsewhere.

        >>> create_app(Settings()).title
        'hushgrad'
    """
    require_extra()
    from fastapi import FastAPI

    from hushgrad import __version__
    from hushgrad.serve import api, pages
    from hushgrad.serve.access_control import AccessControl
    from hushgrad.serve.problems import answer_problems
    from hushgrad.serve.site import Site

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        app.state.site = Site(settings)
        try:
            yield
        finally:
            app.state.site.close()

    # The interactive documentation of FastAPI loads scripts from elsewhere: only the description itself is served.
    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": "/api/openapi.json"}
    about = "Planner, runs, privacy cards and the budget ledger. Read-only."
    app = FastAPI(title="hushgrad", version=__version__, description=about, lifespan=alive, redirect_slashes=False, **options)
    app.state.settings = settings
    app.include_router(pages.router)
    app.include_router(api.router)
    answer_problems(app)
    app.add_middleware(AccessControl, settings=settings)
    return app

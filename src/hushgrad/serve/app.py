"""The application, pages and API behind the access control, and the server around it: its socket is opened before its address is told."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import AsyncIterator, Callable
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
    from hushgrad.serve.services import Services
    from hushgrad.serve.views import answer_problems

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        app.state.services = Services(settings)
        try:
            yield
        finally:
            app.state.services.close()

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


def serve(settings: Settings, *, ready: Callable[[str], Any] = print) -> None:
    """Serve until interrupted; ``ready`` is called with the page's address as soon as it can be opened.

    Raises:
        ArgumentError: where the port is taken or the address is not this machine's.
    """
    require_extra()
    with _bound(settings) as listener:
        app = create_app(settings)
        _run(app, listener, lambda: ready(address(settings, listener.getsockname()[1])))


def address(settings: Settings, port: int) -> str:
    """The address to open in a browser, with the token if one is required."""
    host = "127.0.0.1" if settings.any_host and ":" not in settings.host else settings.host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={settings.token}" if settings.token else "")


def _bound(settings: Settings) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        raise ArgumentError(_why(settings, error)) from None
    return listener


def _why(settings: Settings, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {settings.port} is in use. Choose another one with --port, or --port 0 for any that is free."
    if error.errno == errno.EACCES:
        return f"Port {settings.port} needs rights that you do not have. Choose one above 1023 with --port."
    return f"Cannot listen at {settings.host}: {error.strerror}. Leave --host out to be seen from this machine only."


def _run(app: FastAPI, listener: socket.socket, ready: Callable[[], Any]) -> None:
    import uvicorn

    from hushgrad.serve.connections import waiting_room

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            app.state.services.warm_up()
            ready()
            sys.stdout.flush()

    options: dict[str, Any] = {"http": waiting_room(), "ws": "none", "h11_max_incomplete_event_size": 16 << 10}
    options |= {"access_log": False, "server_header": False, "date_header": False}  # a log would show the token
    options |= {"limit_concurrency": 64, "timeout_keep_alive": 5, "timeout_graceful_shutdown": 2}
    Server(uvicorn.Config(app, log_level="critical", **options)).run(sockets=[listener])

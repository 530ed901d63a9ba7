"""The server: its socket is opened before its address is announced."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hushgrad.errors import ArgumentError
from hushgrad.serve.app import create_app, require_extra
from hushgrad.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI


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
            app.state.site.warm_up()
            ready()
            sys.stdout.flush()

    options: dict[str, Any] = {"http": waiting_room(), "ws": "none", "h11_max_incomplete_event_size": 16 << 10}
    options |= {"access_log": False, "server_header": False, "date_header": False}  # a log would show the token
    options |= {"limit_concurrency": 64, "timeout_keep_alive": 5, "timeout_graceful_shutdown": 2}
    Server(uvicorn.Config(app, log_level="critical", **options)).run(sockets=[listener])

"""Access control and the headers of every answer: the outermost layer of the application.

The page is read-only, so nothing can be changed by a forged request. What is left to prevent is reading by others: another
site in the same browser (the Host check defeats DNS rebinding, Sec-Fetch-Site refuses its subresource requests, no CORS header
lets it read an answer), a frame around the page, and visitors from the network (the token).
"""

from __future__ import annotations

import hmac
from typing import Any
from urllib.parse import parse_qsl, quote

from hushgrad.serve.settings import Settings

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# A card brings its own style and no script; see report/card.html.
CARD_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_LONGEST = 2048  # bytes of a path or a query
_COOKIE = "hushgrad"


class AccessControl:
    """ASGI middleware: checks before, headers after."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Refuse, or let pass."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _completed(message.get("headers", []))
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app({**scope, "method": "GET"}, receive, with_headers)  # the server leaves the body of a HEAD out
        else:
            await _send(with_headers, *refusal)

    def _refusal(self, scope: dict[str, Any]) -> tuple[int, str, dict[str, str]] | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page is read-only: it answers GET and HEAD.", {"allow": "GET, HEAD"}
        if len(scope.get("raw_path") or b"") > _LONGEST or len(scope["query_string"]) > _LONGEST:
            return 414, "The address is too long.", {}
        if sum(len(name) + len(value) for name, value in scope["headers"]) > 16 * _LONGEST:
            return 431, "The headers are too long.", {}
        if not self._is_ours(headers.get("host", "")):
            return 400, "This page answers under its own name only: open the address that hushgrad serve printed.", {}
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and headers.get("sec-fetch-dest") != "document":
            return 403, "Other sites may link to this page, and not use it.", {}
        return self._locked(scope, headers) if self._settings.token else None

    def _is_ours(self, host: str) -> bool:
        """Whether the Host header names this server; the port may be another one (a tunnel)."""
        name, _, port = host.rpartition(":") if ":" in host and not host.endswith("]") else (host, "", "")
        if port and not (port.isascii() and port.isdigit()):
            return False
        name = name.removeprefix("[").removesuffix("]").lower()
        return bool(name) and (self._settings.any_host or name in self._settings.hosts)

    def _locked(self, scope: dict[str, Any], headers: dict[str, str]) -> tuple[int, str, dict[str, str]] | None:
        """Refuse a visitor without the token; a visitor with the token in the address gets a cookie and is redirected without it."""
        cookies = [part.strip() for part in headers.get("cookie", "").split(";")]
        shown = [c.partition("=")[2] for c in cookies if c.startswith(_COOKIE + "=")]
        shown.append(headers.get("authorization", "").removeprefix("Bearer "))
        if any(self._matches(text) for text in shown):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        if any(self._matches(value) for name, value in query if name == "token"):
            cookie = f"{_COOKIE}={self._settings.token}; HttpOnly; SameSite=Strict; Path=/"
            # One slash, and not two: //name would lead elsewhere.
            return 303, "", {"location": "/" + quote(scope["path"].lstrip("/")), "set-cookie": cookie}
        return 401, "This page asks for a token: open the address that hushgrad serve printed.", {"www-authenticate": "Bearer"}

    def _matches(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._settings.token.encode())


def _completed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = {name.lower() for name, _ in headers}
    return [*headers, *((n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in given)]


async def _send(send: Any, status: int, sentence: str, more: dict[str, str]) -> None:
    body = (sentence + "\n").encode()
    # Whoever is refused keeps no connection: those are few.
    headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), "connection": "close", **more}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})

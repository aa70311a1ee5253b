"""CORS: which web pages of other origins a browser lets use the API (Fetch Standard, "HTTP-CORS").

It lies around the relay, so that streams, errors and refusals have the headers too. Django's
packages for CORS are middleware, which none of these pass. A key is sent by the page itself, never
by the browser, so no answer allows credentials.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings

from inference_site.gateway.access import Application, Scope, Send
from inference_site.gateway.delivery import Headers

_ANY = "*"
_PATHS = ("/v1", "/api", "/health")
_METHODS = b"GET, POST, DELETE, OPTIONS"
_KEPT_S = b"600"
"""For how long a browser need not ask again."""
_LONGEST_LIST = 1000


def with_cors(application: Application) -> Application:
    """Return the application with the headers for the origins of ``CORS_ALLOWED_ORIGINS``."""
    if not settings.CORS_ALLOWED_ORIGINS:
        return application

    async def app(scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http" or not _is_api(scope["path"]):
            await application(scope, receive, send)
            return
        given = dict(scope["headers"])
        headers = _headers(given.get(b"origin", b""))
        if len(headers) > 1 and _is_preflight(scope, given):
            await _answer_preflight([*headers, *_permissions(given)], send)
            return
        await application(scope, receive, _adding(headers, send))

    return app


def _is_api(path: str) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in _PATHS)


def _headers(origin: bytes) -> Headers:
    """Return what an answer to this origin says: only that it varies, to one that may not read."""
    allowed: list[str] = settings.CORS_ALLOWED_ORIGINS
    if _ANY in allowed:
        permitted = b"*"
    elif origin and origin.decode("latin-1") in allowed:
        permitted = origin
    else:
        return [(b"vary", b"Origin")]
    return [
        (b"vary", b"Origin"),
        (b"access-control-allow-origin", permitted),
        (b"access-control-expose-headers", b"*"),
    ]


def _is_preflight(scope: Scope, given: dict[bytes, bytes]) -> bool:
    return (
        scope["method"] == "OPTIONS"
        and b"origin" in given
        and b"access-control-request-method" in given
    )


def _permissions(given: dict[bytes, bytes]) -> Headers:
    """Return what a page may send: any header, because SDKs add many of their own."""
    asked = given.get(b"access-control-request-headers", b"")[:_LONGEST_LIST]
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", asked),
        (b"access-control-max-age", _KEPT_S),
    ]


async def _answer_preflight(headers: Headers, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _adding(headers: Headers, send: Send) -> Send:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return sending

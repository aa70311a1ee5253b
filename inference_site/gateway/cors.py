"""CORS: which web pages of other origins may use the API (Fetch Standard, "HTTP-CORS").

It wraps the relay, so that streams, errors and refused requests have the headers too. Packages for
CORS in Django are middleware, and these requests do not pass Django's middleware. The page itself
sends the key, never the browser, so no answer allows credentials.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings

from inference_site.gateway.access import Application, Scope, Send
from inference_site.gateway.delivery import Headers

_PATHS = ("/v1", "/v2", "/api", "/health")
_METHODS = b"GET, POST, DELETE, OPTIONS"
_MAX_AGE_S = b"600"
"""How long a browser may cache the answer to a preflight request."""
_MAX_HEADER_LIST = 1000
_PREFLIGHT = {b"origin", b"access-control-request-method"}


def with_cors(application: Application) -> Application:
    """Return the application with the headers for the origins of ``CORS_ALLOWED_ORIGINS``."""
    if not settings.CORS_ALLOWED_ORIGINS:
        return application

    async def app(scope: Scope, receive: Any, send: Send) -> None:
        path = scope.get("path", "")
        is_api = any(path == root or path.startswith(f"{root}/") for root in _PATHS)
        if scope["type"] != "http" or not is_api:
            await application(scope, receive, send)
            return
        request_headers = dict(scope["headers"])
        allowed: list[str] = settings.CORS_ALLOWED_ORIGINS
        origin = request_headers.get(b"origin", b"")
        is_allowed = "*" in allowed or (origin and origin.decode("latin-1") in allowed)
        headers: Headers = [(b"vary", b"Origin")]
        if is_allowed:
            headers += [
                (b"access-control-allow-origin", b"*" if "*" in allowed else origin),
                (b"access-control-expose-headers", b"*"),
            ]
        if is_allowed and scope["method"] == "OPTIONS" and request_headers.keys() >= _PREFLIGHT:
            # Any header is allowed, because SDKs add many of their own.
            requested = request_headers.get(b"access-control-request-headers", b"")
            headers += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", requested[:_MAX_HEADER_LIST]),
                (b"access-control-max-age", _MAX_AGE_S),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await application(scope, receive, send_with_headers)

    return app

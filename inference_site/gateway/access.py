"""The access log: one line and the metrics of each HTTP request that has been answered.

It wraps the whole application, so it times streams to their last byte and also logs admin pages.
While a request runs, its facts (id, project, model …) are collected in
``core.observability.logs`` and added to every line that is logged meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from inference_site.accounts.keys import digest_of, read_secret
from inference_site.core.errors.api_errors import ApiError, AuthenticationError
from inference_site.core.observability.logs import LogFields, add_log_fields, log_fields, redacted
from inference_site.core.observability.tracing import Span, is_tracing, start_span, trace_id
from inference_site.gateway.delivery import SAFE_HEADERS
from inference_site.gateway.head import resolve_cached
from inference_site.runs.request_log.models import LONGEST_MODEL, LONGEST_PATH
from inference_site.runs.request_log.refusals import RefusedRequest, refusals

logger = logging.getLogger("inference_site.access")

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Any, Send], Awaitable[None]]

SCOPE_KEY = "inference_site.access"
_SAFE_HEADERS = [(k.lower().encode(), v.encode()) for k, v in SAFE_HEADERS.items()]
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_QUIET = ("/health", "/metrics", "/static/")
"""Paths that are requested every few seconds or with every page: they are logged at ``DEBUG``.

So are refusals with 503 that the request log only counts: thousands come at once, and a line takes
longer than the rest of the refusal. ``request_log.refusals`` logs their number."""
_LOGGED = ("/v1", "/api/", "/infill", "/tokenize", "/detokenize", "/tokenizer_info", "/v2/")
_CUT_OFF = 499
"""The client left before the answer was complete, or the server stopped."""
_LONGEST_PATH = 200
_LONGEST_MESSAGE = 4_000
"""Characters of a message that are held until the writer of refusals takes values out of it."""

_REQUESTS = Counter(
    "inference_http_requests",
    "Requests that were answered; status 499: cut off before the end.",
    ["method", "route", "status"],
)
_DURATION = Histogram(
    "inference_http_request_duration_seconds",
    "From the request to the last byte of its answer.",
    ["route"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
_IN_FLIGHT = Gauge("inference_http_requests_in_flight", "Requests that are being answered.")


arrived_at: ContextVar[float | None] = ContextVar("arrived_at", default=None)
"""When the current request arrived, on the monotonic clock; None outside of HTTP requests."""


class Access:
    """One request. The code that answers it fills in ``facts`` and uses ``span``.

    ``error`` is the error that it was answered with, if any. Only the log of refused requests has a
    part of its message; log lines have none.
    """

    __slots__ = (
        "_is_complete",
        "_scope",
        "_send",
        "_status",
        "arrived_at",
        "error",
        "facts",
        "span",
    )

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.arrived_at = time.monotonic()
        self._status = 0
        self._is_complete = False
        self.facts: LogFields = {}
        self.error: ApiError | None = None
        self.span = Span()
        if is_tracing() and scope["path"].startswith("/v1"):
            parent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
            name = f"{scope['method']} {_route(scope['path'])}"
            self.span = start_span(name, "server", parent, http__request__method=scope["method"])
        if self.span.traceparent:
            self.facts["trace_id"] = trace_id(self.span.traceparent)

    async def send(self, message: dict[str, Any]) -> None:
        """Forward an ASGI message of the answer; add the ``SAFE_HEADERS`` that it lacks."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            headers += [header for header in _SAFE_HEADERS if header[0] not in names]
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    def end(self) -> None:
        """Count, time and log the request."""
        duration_s = time.monotonic() - self.arrived_at
        method, path = self._scope["method"], self._scope["path"]
        status = self._status if self._is_complete else _CUT_OFF
        is_quiet = path.startswith(_QUIET)
        if self._status >= 400 and "error_code" in self.facts and path.startswith(_LOGGED):
            is_kept = refusals.add(_refused(self, self._scope, self._status, duration_s))
            is_quiet |= not is_kept and self._status == HTTPStatus.SERVICE_UNAVAILABLE
        route = self.facts.pop("route", None) or _route(path)
        _REQUESTS.labels(method if method in _METHODS else "other", route, status).inc()
        _DURATION.labels(route).observe(duration_s)
        level = logging.DEBUG if is_quiet else logging.INFO
        if logger.isEnabledFor(level):
            answered = {"method": method, "path": _one_line(path), "status": status}
            facts = {**self.facts, **answered, "duration_ms": round(duration_s * 1000, 1)}
            logger.log(level, "answered", extra=facts)
        self.span.set(http__route=route, http__response__status_code=status, **self.facts)
        self.span.end(str(status) if status >= 500 else "")


def with_access_log(application: Application) -> Application:
    """Return the application with an ``Access`` around each HTTP request."""

    async def app(scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        access = Access(scope, send)
        with log_fields(access.facts), _IN_FLIGHT.track_inprogress():
            try:
                await application({**scope, SCOPE_KEY: access}, receive, access.send)
            finally:
                access.end()

    return app


def note_error(request: Any, error: ApiError) -> None:
    """Add the code of an error to the facts of the log, and the error to its ``Access``."""
    add_log_fields(error_code=error.code or error.type)
    access: Access | None = getattr(request, "scope", {}).get(SCOPE_KEY)  # None for pages.
    if access is not None:
        access.error = error


def _route(path: str) -> str:
    """Return the URL pattern of a path: ids must not become labels of metrics."""
    match = resolve_cached(path.rstrip("/") if path.startswith("/v1") else path)
    if match is None:
        return "static" if path.startswith("/static/") else "unknown"
    return str(match.route)


def _refused(access: Access, scope: Scope, status: int, duration_s: float) -> RefusedRequest:
    """Return the entry of the request log for a request that became no generation.

    If the caller is unknown, the entry has the digest of the key that was sent, if any.
    """
    digest, facts, error = "", access.facts, access.error
    if "api_key" not in facts:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            secret = read_secret(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
            digest = digest_of(secret)
        except AuthenticationError:
            pass
    return RefusedRequest(
        status,
        facts["error_code"],
        scope["method"][:16],
        _one_line(scope["path"])[:LONGEST_PATH],
        facts.get("model", "")[:LONGEST_MODEL],
        facts.get("request_id", ""),
        duration_s * 1000,
        facts.get("project"),
        facts.get("api_key"),
        digest,
        param=(error and error.param) or "",
        message=error.message[:_LONGEST_MESSAGE] if error else "",
        trace_id=facts.get("trace_id", ""),
    )


def _one_line(path: str) -> str:
    """Return a path for the log: one line, bounded in length, without secrets."""
    return redacted(path)[:_LONGEST_PATH].encode("unicode_escape").decode("ascii")

"""A small HTTP server for metrics and health, in processes that serve no other HTTP."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from prometheus_client import REGISTRY, Gauge
from prometheus_client.exposition import choose_encoder

from inference_site.observability.metrics import BUILD, MAINTENANCE_DONE
from inference_site.process_lifecycle import is_replacement

logger = logging.getLogger(__name__)

_RETRY_S = 0.5

Health = Callable[[], str]
"""Returns a description of the fault, or an empty text while the process is healthy."""


_SIGNS_OF_A_PROXY = re.compile(
    r"via|forwarded|x-(?!prometheus-).+|proxy-.+|cf-.+|cdn-.+|fastly-.+|max-forwards|(.*-)?ip",
    re.IGNORECASE,
)


def is_forwarded(header_names: Iterable[str]) -> bool:
    """Return whether a request has a header that proxies add and scrapers do not."""
    return any(_SIGNS_OF_A_PROXY.fullmatch(name) for name in header_names)


def may_scrape(address: str, authorization: str, forwarded: bool) -> bool:
    """Return whether this peer may read metrics.

    It may if it sends ``METRICS_TOKEN`` or its address is in ``METRICS_ALLOWED_NETWORKS``. The
    address of a forwarded request does not count: it is that of a proxy.
    """
    token = settings.METRICS_TOKEN
    if token and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        return True
    return not forwarded and _is_allowed(address)


def _is_allowed(address: str) -> bool:
    try:
        peer = ipaddress.ip_address(address)
    except ValueError:  # A unix socket has no address.
        return False
    peer = getattr(peer, "ipv4_mapped", None) or peer
    return any(peer in network for network in settings.METRICS_ALLOWED_NETWORKS)


def rendered(accept: str) -> tuple[bytes, str]:
    """Return the metrics of this process, and their content type."""
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type


def serve_telemetry(health: Health, ready: Health | None = None) -> None:
    """Serve ``/metrics``, ``/health``, ``/health/ready`` on ``METRICS_PORT``, if it is set.

    A thread does. A process is ready when it is well, unless ``ready`` names a fault.

    Raise ImproperlyConfigured when the port is not available.
    """
    if not settings.METRICS_PORT:
        return
    where = (settings.METRICS_HOST, settings.METRICS_PORT)
    methods = {
        "health": staticmethod(health),
        "ready": staticmethod(ready or health),
    }
    handler = type("Telemetry", (_Handler,), methods)
    try:
        server = _Server(where, handler)
    except OSError as exc:
        if is_replacement():  # The process before this one may still have the port.
            threading.Thread(target=_serve_later, args=(where, handler), daemon=True).start()
            return
        raise ImproperlyConfigured(
            f"METRICS_PORT: cannot listen on {where[0]}:{where[1]}: {exc.strerror}."
        ) from exc
    threading.Thread(target=server.serve_forever, name="telemetry", daemon=True).start()


def _serve_later(where: tuple[str, int], handler: type[_Handler]) -> None:
    """Serve once the port is free."""
    while True:
        try:
            server = _Server(where, handler)
        except OSError:
            time.sleep(_RETRY_S)
        else:
            server.serve_forever()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong; the library writes a traceback to stderr instead."""
        if not isinstance(sys.exc_info()[1], ConnectionError):  # The client has left.
            logger.exception("telemetry: a request from %s failed", client_address[0])


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # Seconds; frees the thread of a client that sends nothing.
    health: Health
    ready: Health

    def do_GET(self) -> None:  # http.server requires this name.
        """Answer a request."""
        match self.path.partition("?")[0]:
            case "/metrics" if self._may_scrape():
                self._answer(200, *rendered(self.headers.get("Accept", "")))
            case "/metrics":
                self._answer(401, b"Send METRICS_TOKEN in 'Authorization: Bearer'.\n")
            case "/health" | "/health/ready" as path:
                fault = self.health() or (self.ready() if path == "/health/ready" else "")
                self._answer(503 if fault else 200, f"{fault or 'ok'}\n".encode())
            case _:
                self._answer(404, b"Not found. Paths: /metrics, /health, /health/ready.\n")

    def _may_scrape(self) -> bool:
        authorization = self.headers.get("Authorization", "")
        return may_scrape(self.client_address[0], authorization, is_forwarded(self.headers))

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: Prometheus sends a request every few seconds."""


# The module's text:
# """Whether a process without HTTP of its own is well."""


_UNWELL_S = 15.0
"""After so long without a sign of life a process is ill; both give one every second or two."""


def watch_maintenance() -> None:
    """Serve the metrics and health of beat on ``METRICS_PORT``, if that is set."""
    BUILD.labels(settings.VERSION, "beat", "").set(1)
    serve_telemetry(fresh(MAINTENANCE_DONE, "maintenance has not come to an end"))


def fresh(sign: Gauge, fault: str) -> Health:
    """Return a health that is good while this timestamp is a fresh one."""

    def health() -> str:
        at = next(iter(sign.collect())).samples[0].value
        silent_s = time.time() - at
        return f"{fault} for {silent_s:.0f} s" if silent_s > _UNWELL_S else ""

    return health

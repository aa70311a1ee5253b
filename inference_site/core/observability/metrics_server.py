"""Access to metrics, and a small HTTP server for metrics and health.

Workers and beat, which serve no other HTTP, start the server when ``METRICS_PORT`` is set.
"""

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

from inference_site.core.observability.metrics import BUILD, MAINTENANCE_DONE
from inference_site.core.process_lifecycle import is_replacement

logger = logging.getLogger(__name__)

HealthCheck = Callable[[], str]
"""Returns a description of the fault, or an empty text while the process is healthy."""

_RETRY_S = 0.5
_STALE_S = 15.0
"""A process whose timestamp is older is unhealthy; it is set every second or two."""
_PROXY_HEADERS = re.compile(
    r"via|forwarded|x-(?!prometheus-).+|proxy-.+|cf-.+|cdn-.+|fastly-.+|max-forwards|(.*-)?ip",
    re.IGNORECASE,
)


def is_forwarded(header_names: Iterable[str]) -> bool:
    """Return whether a request has a header that proxies add and scrapers do not."""
    return any(_PROXY_HEADERS.fullmatch(name) for name in header_names)


def may_scrape(address: str, authorization: str, forwarded: bool) -> bool:
    """Return whether this client may read metrics.

    It may if it sends ``METRICS_TOKEN`` or its address is in ``METRICS_ALLOWED_NETWORKS``. The
    address of a forwarded request does not count, because it is that of a proxy.
    """
    token = settings.METRICS_TOKEN
    if token and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        return True
    if forwarded:
        return False
    try:
        peer = ipaddress.ip_address(address)
    except ValueError:  # A unix socket has no address.
        return False
    peer = getattr(peer, "ipv4_mapped", None) or peer
    return any(peer in network for network in settings.METRICS_ALLOWED_NETWORKS)


def render_metrics(accept: str) -> tuple[bytes, str]:
    """Return the metrics of this process, and their content type."""
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type


def serve_beat_metrics() -> None:
    """Serve the metrics and the health of beat."""
    BUILD.labels(settings.VERSION, "beat", "").set(1)
    serve_metrics(timestamp_check(MAINTENANCE_DONE, "maintenance has not come to an end"))


def timestamp_check(timestamp: Gauge, fault: str) -> HealthCheck:
    """Return a check that reports the fault when this Unix timestamp is old."""

    def check() -> str:
        at = next(iter(timestamp.collect())).samples[0].value
        age_s = time.time() - at
        return f"{fault} for {age_s:.0f} s" if age_s > _STALE_S else ""

    return check


def serve_metrics(health: HealthCheck, ready: HealthCheck | None = None) -> None:
    """Serve ``/metrics``, ``/health`` and ``/health/ready`` on ``METRICS_PORT``, if it is set.

    Threads serve. A healthy process is ready, unless ``ready`` returns a fault. A process that
    replaces another waits until that one has released the port. Raise ImproperlyConfigured when
    the port is not available.
    """
    if not settings.METRICS_PORT:
        return
    address = (settings.METRICS_HOST, settings.METRICS_PORT)
    checks = {"health": staticmethod(health), "ready": staticmethod(ready or health)}
    handler = type("MetricsHandler", (_Handler,), checks)
    server: _Server | None = None
    try:
        server = _Server(address, handler)
    except OSError as exc:
        if not is_replacement():
            raise ImproperlyConfigured(
                f"METRICS_PORT: cannot listen on {address[0]}:{address[1]}: {exc.strerror}."
            ) from exc

    def serve(server: _Server | None) -> None:
        while server is None:
            time.sleep(_RETRY_S)
            try:
                server = _Server(address, handler)
            except OSError:
                continue
        server.serve_forever()

    threading.Thread(target=serve, args=(server,), name="telemetry", daemon=True).start()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error; the library would write a traceback to stderr."""
        if not isinstance(sys.exc_info()[1], ConnectionError):  # The client has disconnected.
            logger.exception("telemetry: a request from %s failed", client_address[0])


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # Seconds; frees the thread of a client that sends nothing.
    health: HealthCheck
    ready: HealthCheck

    def do_GET(self) -> None:  # http.server requires this name.
        """Answer a request."""
        match self.path.partition("?")[0]:
            case "/metrics":
                authorization = self.headers.get("Authorization", "")
                forwarded = is_forwarded(self.headers)
                if may_scrape(self.client_address[0], authorization, forwarded):
                    self._answer(200, *render_metrics(self.headers.get("Accept", "")))
                else:
                    self._answer(401, b"Send METRICS_TOKEN in 'Authorization: Bearer'.\n")
            case "/health" | "/health/ready" as path:
                fault = self.health() or (self.ready() if path == "/health/ready" else "")
                self._answer(503 if fault else 200, f"{fault or 'ok'}\n".encode())
            case _:
                self._answer(404, b"Not found. Paths: /metrics, /health, /health/ready.\n")

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

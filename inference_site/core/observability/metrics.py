"""Prometheus metrics of generations in one process, and a small HTTP server for metrics and health.

Prometheus sums over processes. Each generation is counted once, by the process that ended it: its
worker, a web process or the beat process. Workers and beat, which serve no other HTTP, start the
server when ``METRICS_PORT`` is set. docs/operations.md lists all metrics.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inference_site.core.domain.deltas import Usage
from inference_site.core.process_lifecycle import is_replacement

logger = logging.getLogger(__name__)

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)

disable_created_metrics()  # type: ignore[no-untyped-call]  # Nothing reads the extra series.

BUILD = Gauge(
    "inference_build_info", "Always 1; the labels name the process.", ["version", "role", "worker"]
)
_ENDED = Counter(
    "inference_generations",
    "Generations that have ended.",
    ["model", "kind", "status", "error_code"],
)
_TOKENS = Counter(
    "inference_tokens", "Tokens by sort; cached ⊂ input, reasoning ⊂ output.", ["model", "sort"]
)
_QUEUE_WAIT = Histogram(
    "inference_queue_wait_seconds",
    "From acceptance to the first claim.",
    ["model"],
    buckets=_WAITS,
)
_FIRST_TOKEN = Histogram(
    "inference_time_to_first_token_seconds",
    "From acceptance to the first delta; first attempts only.",
    ["model"],
    buckets=_WAITS,
)
_RUN = Histogram(
    "inference_run_seconds", "From the claim to the final row.", ["model"], buckets=_WAITS
)
EVENT_LOG_LAG = Histogram(
    "inference_event_log_lag_seconds",
    "How long the oldest frame of an append waited until it was in the event log.",
    buckets=(0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30),
)
LEASE_RENEWED = Gauge(
    "inference_worker_lease_renewed_timestamp_seconds",
    "When this worker last renewed its lease, in Unix time; 0 before the first time.",
)
MAINTENANCE_DONE = Gauge(
    "inference_maintenance_done_timestamp_seconds",
    "When this process last finished a maintenance pass, in Unix time; 0 before the first.",
)
_RETRY_S = 0.5
_STALE_S = 15.0
"""A process whose timestamp is older is not ready, or unhealthy; it is set every second or two."""
_PROXY_HEADERS = re.compile(
    r"via|forwarded|x-(?!prometheus-).+|proxy-.+|cf-.+|cdn-.+|fastly-.+|max-forwards|(.*-)?ip",
    re.IGNORECASE,
)


def count_ended(
    model: str, kind: str, status: str, error_code: str = "", usage: Usage | None = None
) -> None:
    """Count a generation that this process moved to a terminal state, with its tokens."""
    _ENDED.labels(model, kind, status, error_code).inc()
    if usage is not None:
        for sort in ("input", "cached", "output", "reasoning"):
            _TOKENS.labels(model, sort).inc(getattr(usage, f"{sort}_tokens"))


class _Gaps(Collector):
    """Histogram of the times between two deltas of a run.

    A histogram of prometheus_client takes a lock and several calls for each value, which is too
    slow for every token. Each run counts its own gaps and adds them here when it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add(self, model: str, counts: Sequence[int], sum_s: float) -> None:
        with self._lock:
            known = self._counts.setdefault(model, [0] * len(counts))
            self._counts[model] = [old + new for old, new in zip(known, counts, strict=True)]
            self._sums[model] = self._sums.get(model, 0.0) + sum_s

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "inference_inter_token_seconds", "Between two deltas of a run.", labels=["model"]
        )
        with self._lock:
            bounds = [*(str(float(bound)) for bound in _GAPS), "+Inf"]
            for model, counts in self._counts.items():
                # Prometheus' buckets are cumulative.
                buckets = list(zip(bounds, accumulate(counts), strict=True))
                family.add_metric([model], buckets, self._sums[model])
        yield family


_gaps = _Gaps()
REGISTRY.register(_gaps)


class Meter:
    """Measures one attempt of a generation, starting at its claim."""

    __slots__ = ("_attempt", "_began", "_counts", "_first", "_last", "_model", "_waited_s")

    def __init__(self, model: str, attempt: int, waited_s: float) -> None:
        self._model, self._attempt, self._waited_s = model, attempt, waited_s
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._counts = [0] * (len(_GAPS) + 1)
        if attempt == 1:
            _QUEUE_WAIT.labels(model).observe(waited_s)

    def tick(self) -> None:
        """Record a delta. Called for every delta; benchmarks/metrics.py measures its cost."""
        now = time.perf_counter()
        if self._last:
            self._counts[bisect_left(_GAPS, now - self._last)] += 1
        else:
            self._first = now
        self._last = now

    def end(self, kind: str, status: str, error_code: str, usage: Usage) -> None:
        """Record that the attempt has ended in this terminal state."""
        model = self._model
        count_ended(model, kind, status, error_code, usage)
        _RUN.labels(model).observe(time.perf_counter() - self._began)
        if self._first:
            if self._attempt == 1:
                _FIRST_TOKEN.labels(model).observe(self._waited_s + self._first - self._began)
            _gaps.add(model, self._counts, self._last - self._first)


HealthCheck = Callable[[], str]
"""Returns a description of the fault, or an empty text while the process is healthy."""


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
    """Return a check that reports the fault when this Unix timestamp is old.

    One of the future is old as well: the clock was set back, and what hangs does not set it again.
    """

    def check() -> str:
        at = next(iter(timestamp.collect())).samples[0].value
        age_s = abs(time.time() - at)
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

"""Prometheus metrics of generations in one process; docs/operations.md lists them all.

Prometheus sums over processes. Each generation is counted once, by the process that ended it: its
worker, a web process or the beat process.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_site.core.domain.deltas import Usage

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


def count_ended(model: str, kind: str, status: str, error_code: str = "") -> None:
    """Count a generation that this process moved to a terminal state."""
    _ENDED.labels(model, kind, status, error_code).inc()


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
        count_ended(model, kind, status, error_code)
        _RUN.labels(model).observe(time.perf_counter() - self._began)
        if self._first:
            if self._attempt == 1:
                _FIRST_TOKEN.labels(model).observe(self._waited_s + self._first - self._began)
            _gaps.add(model, self._counts, self._last - self._first)
        for sort in ("input", "cached", "output", "reasoning"):
            _TOKENS.labels(model, sort).inc(getattr(usage, f"{sort}_tokens"))

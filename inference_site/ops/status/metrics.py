"""``GET /metrics``: the metrics of this web process, and gauges of the whole site.

The gauges are read at each scrape, from partial indexes of unfinished generations and from the
leases; finished generations are never counted. Every web process reports the same values, so
dashboards take their maximum, not their sum.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import psycopg
import redis.exceptions
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.core.errors.api_errors import AuthenticationError
from inference_site.core.observability.metrics import (
    BUILD,
    is_forwarded,
    may_scrape,
    render_metrics,
)
from inference_site.core.storage.postgresql import unpooled_connection
from inference_site.gateway.hub import hub
from inference_site.ops.status.health import is_expected
from inference_site.runs.wake_ups import count_wake_ups

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_pool = ThreadPoolExecutor(4, thread_name_prefix="metrics")

_IN_FLIGHT = """
SELECT model, status, count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float
FROM generations_generation WHERE finished_at IS NULL GROUP BY model, status
"""


class SiteMetrics(Collector):
    """Collects the gauges; all but ``inference_open_streams`` are equal in all web processes."""

    def describe(self) -> Iterator[Metric]:
        """Announce no metrics in advance: the list depends on which sources answer."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Query PostgreSQL and Redis in parallel; leave out a source that does not answer."""
        yield GaugeMetricFamily(
            "inference_open_streams", "Streams that this process follows.", value=hub.followed()
        )
        scrape_ok = GaugeMetricFamily(
            "inference_scrape_ok", "1 if the source answered this scrape.", labels=["source"]
        )
        answers = {source: _pool.submit(read) for source, read in _SOURCES.items()}
        wait(answers.values(), timeout=_TIMEOUT_S)
        for source, answer in answers.items():
            try:
                found = answer.result(timeout=0)
            except (psycopg.Error, redis.exceptions.RedisError, TimeoutError) as exc:
                logger.warning("metrics: no answer from %s: %s", source, type(exc).__name__)
                scrape_ok.add_metric([source], 0)
            else:
                scrape_ok.add_metric([source], 1)
                yield from found
        yield scrape_ok


def _of_generations() -> list[Metric]:
    with unpooled_connection() as connection:
        connection.execute("SET LOCAL statement_timeout = 1500")
        rows: list[tuple[str, str, int, float]] = connection.execute(_IN_FLIGHT).fetchall()
    waiting = _by_model("inference_queue_length", "Generations that wait for a slot.")
    oldest = _by_model("inference_queue_oldest_seconds", "How long the oldest of them has waited.")
    running = _by_model("inference_running", "Generations that run.")
    known = {(model, status): (count, age_s) for model, status, count, age_s in rows}
    for model in {*catalogue().models, *(row[0] for row in rows)}:
        count, age_s = known.get((model, "queued"), (0, 0.0))
        waiting.add_metric([model], count)
        oldest.add_metric([model], age_s)
        running.add_metric([model], known.get((model, "running"), (0, 0.0))[0])
    return [waiting, oldest, running]


def _of_workers() -> list[Metric]:
    workers = live_workers()
    live = _by_model("inference_live_workers", "Workers that take work for the model.")
    slots = _by_model("inference_slots", "Slots of these workers.")
    busy = _by_model("inference_busy_slots", "Slots of these workers that are busy.")
    for model in catalogue().models:
        serving = [worker for worker in workers if worker.serves(model)]
        served = [found for worker in serving if (found := worker.model(model)) is not None]
        # No sample for a model that need not be loaded: a value of 0 raises an alert.
        if served or is_expected(model, fleet.status_among(workers, model)):
            live.add_metric([model], len(served))
        slots.add_metric([model], sum(found.slots for found in served))
        busy.add_metric([model], sum(found.busy for found in served))
    return [live, slots, busy]


def _of_wake_ups() -> list[Metric]:
    unread = _by_model("inference_wake_ups_pending", "Wake-ups that no worker has received yet.")
    for model in catalogue().models:
        unread.add_metric([model], count_wake_ups(model))
    return [unread]


def _by_model(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=["model"])


_SOURCES: dict[str, Callable[[], list[Metric]]] = {
    "postgres": _of_generations,
    "leases": _of_workers,
    "broker": _of_wake_ups,
}


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer clients that send ``METRICS_TOKEN`` or are in ``METRICS_ALLOWED_NETWORKS``."""
    meta = request.META
    forwarded = is_forwarded(request.headers)
    if not may_scrape(meta.get("REMOTE_ADDR", ""), meta.get("HTTP_AUTHORIZATION", ""), forwarded):
        raise AuthenticationError("Send METRICS_TOKEN in 'Authorization: Bearer'.")
    body, content_type = render_metrics(meta.get("HTTP_ACCEPT", ""))
    return HttpResponse(body, content_type=content_type)


def register() -> None:
    """Add the version and the gauges of the site to the metrics of this process."""
    BUILD.labels(settings.VERSION, "web", f"{socket.gethostname()}:{os.getpid()}").set(1)
    REGISTRY.register(SiteMetrics())

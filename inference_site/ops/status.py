"""What the site says of its state: ``/health``, ``/health/ready``, ``/version`` and ``/metrics``.

The first three are public and without secrets. ``/metrics`` has the metrics of this web process,
and gauges of the whole site. These are read at each scrape, from partial indexes of unfinished
generations and from the leases; finished generations are never counted. Every web process reports
the same values, so dashboards take their maximum, not their sum.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Literal

import psycopg
import redis
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.fleet import ModelStatus
from inference_site.catalogue.fleet.leases import LiveWorker, ModelState, live_view, live_workers
from inference_site.core.errors.api_errors import AuthenticationError
from inference_site.core.observability.metrics import (
    BUILD,
    is_forwarded,
    may_scrape,
    render_metrics,
)
from inference_site.core.storage.migrations import migrations_of_release
from inference_site.core.storage.postgresql import NotMigrated, unpooled_connection
from inference_site.core.storage.redis import client_options, takes_writes
from inference_site.gateway.api.payload import WireObject
from inference_site.gateway.api.schema import ErrorEnvelope, documented
from inference_site.gateway.api.views import OpenView
from inference_site.gateway.hub import hub
from inference_site.runs.models import ServiceClass
from inference_site.runs.wake_ups import count_wake_ups

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
"""How long PostgreSQL, Redis and the workers are waited for."""
_NOT_MIGRATED = "it lacks migrations of this release"
_REMOTE_ENGINE = "openai_upstream"
_NOT_LOADED = (ModelStatus.LOADING, ModelStatus.UNLOADED)
_checks_pool = ThreadPoolExecutor(8, thread_name_prefix="health")
_sources_pool = ThreadPoolExecutor(4, thread_name_prefix="metrics")

_IN_FLIGHT = """
SELECT model, status, count(*), coalesce(extract(epoch FROM clock_timestamp() - min(created_at)
    FILTER (WHERE service_class < %(background)s)), 0)::float
FROM generations_generation WHERE finished_at IS NULL GROUP BY model, status
"""


class Health(WireObject):
    """The answer of ``GET /health``."""

    status: Literal["ok"] = "ok"


class Readiness(WireObject):
    """The answer of ``GET /health/ready``; each of ``checks`` is "ok" or describes a fault.

    ``models`` lists the models that cannot be used although the site is ready: ``failed`` while a
    model's own server is down, ``unloaded`` if an operator unloaded it, ``no_host`` if no worker
    has a label that it needs, ``restarting`` while its only worker is being replaced: requests
    wait for that.
    """

    status: Literal["ready", "unavailable"]
    checks: dict[str, str]
    models: dict[str, str] = {}


class Version(WireObject):
    """The answer of ``GET /version``."""

    version: str


class VersionView(OpenView):
    """``GET /version``."""

    @documented(answer=Version)
    def get(self, request: Request) -> Response:
        """Return the release that runs."""
        return Response(Version(version=settings.VERSION).model_dump())


class HealthView(OpenView):
    """``GET /health``: the web process answers."""

    @documented(answer=Health)
    def get(self, request: Request) -> Response:
        """Check that the web process answers."""
        return Response(Health().model_dump())


class ReadyView(OpenView):
    """``GET /health/ready``: PostgreSQL, Redis, and a live worker for each model.

    The site is ready without a model whose own server is down, while another model can be used. The
    status is 503 when a check fails; ``checks`` has ``ok`` or the fault of each part.
    """

    @documented(answer=Readiness, also={503: Readiness | ErrorEnvelope})
    def get(self, request: Request) -> Response:
        """Check that PostgreSQL, Redis and a worker for each model answer."""
        checks = _run({"postgres": _check_postgres, "redis": _check_redis})
        absent: dict[str, str] = {}
        if checks["redis"] == "ok":
            checks |= _run({"workers": lambda: _check_workers(absent)})
        else:
            checks["workers"] = "unknown while Redis is down"
        ready = all(result == "ok" for result in checks.values())
        answer = Readiness(status="ready" if ready else "unavailable", checks=checks, models=absent)
        headers = None if ready else {"Retry-After": "5"}
        return Response(answer.model_dump(), status=200 if ready else 503, headers=headers)


def _run(checks: dict[str, Callable[[], str]]) -> dict[str, str]:
    """Run the checks in parallel, and report a check that exceeds ``_TIMEOUT_S`` as a fault."""
    futures = {name: _checks_pool.submit(check) for name, check in checks.items()}
    wait(futures.values(), timeout=_TIMEOUT_S)
    return {
        name: future.result() if future.done() else f"no answer within {_TIMEOUT_S:.0f} s"
        for name, future in futures.items()
    }


def _check_postgres() -> str:
    try:
        with unpooled_connection() as own:
            found = own.execute("SHOW transaction_read_only").fetchone()
            applied = own.execute("SELECT app, name FROM django_migrations").fetchall()
    except NotMigrated:
        return _NOT_MIGRATED
    except psycopg.Error as exc:
        return f"{type(exc).__name__}: not reachable"
    if found == ("on",):
        return "it takes no writes"
    return "ok" if migrations_of_release() <= set(applied) else _NOT_MIGRATED


def _check_redis() -> str:
    urls = {*settings.EVENT_LOG_URLS, settings.BROKER_URL, *settings.CHANNEL_LAYER_URLS}
    if not settings.RATE_LIMITS_FAIL_OPEN:
        urls.add(settings.RATE_LIMIT_URL)
    try:
        for url in urls:
            with redis.Redis.from_url(url, **client_options(1)) as client:
                client.ping()
                if not takes_writes(client):
                    return "it takes no writes"
    except redis.RedisError as exc:
        return f"{type(exc).__name__}: not reachable"
    return "ok"


def _check_workers(absent: dict[str, str]) -> str:
    """Return "ok" or the missing models; put models that may be missing into ``absent``."""
    # The next request reads the same view, so a model that is reported as ready is used at once.
    workers = live_view.refresh()
    unloaded = fleet.unloaded_on_purpose(workers)
    statuses = {model: fleet.status_among(workers, model) for model in catalogue().models}
    can_serve = ModelStatus.LOADED in statuses.values()
    missing = []
    not_loaded = [model for model, status in statuses.items() if status in _NOT_LOADED]
    reports = [served for worker in workers for served in worker.models]
    # Models that are loading and whose server has been ready before.
    reloading = {r.id for r in reports if r.away_since and r.state == ModelState.LOADING}
    restarting = fleet.restarting(not_loaded) | reloading
    for model, status in statuses.items():
        if status == ModelStatus.LOADED or not is_expected(model, status):
            continue
        if model in restarting:
            absent[model] = "restarting"
        elif can_serve and _why_no_host(model, workers):
            absent[model] = "no_host"
        elif _may_be_absent(model, status, unloaded, can_serve):
            absent[model] = status.value
        elif status == ModelStatus.UNLOADED:
            why = _why_no_host(model, workers)
            missing.append(f"{model} ({why[0].lower()}{why[1:-1]})" if why else model)
        else:
            loads = [served for worker in workers if (served := worker.model(model)) is not None]
            known = [served.progress for served in loads if served.progress is not None]
            progress = f", {max(known):.0%}" if known else ""
            missing.append(f"{model} ({status.value}{progress})")
    return f"no live worker for: {', '.join(missing)}" if missing else "ok"


def _may_be_absent(
    model: str, status: ModelStatus, unloaded: frozenset[str], can_serve: bool
) -> bool:
    """Whether the site is ready without this model."""
    if status == ModelStatus.UNLOADED:
        return model in unloaded
    # Its server belongs to somebody else; a file that cannot be loaded is a fault of this site.
    spec = catalogue().models.get(model)  # It may just have been removed.
    is_remote = spec is None or spec.engine == _REMOTE_ENGINE
    return status == ModelStatus.FAILED and is_remote and can_serve


def _why_no_host(model: str, workers: list[LiveWorker]) -> str:
    """Return a sentence if the model needs a label that no worker has now."""
    spec = catalogue().models.get(model)
    return "" if spec is None else fleet.why_no_host(spec, workers)


def is_expected(model: str, status: ModelStatus) -> bool:
    """Return whether workers should have this model at all times, and not only on demand.

    A model beside the entries of a models file is not expected, because the workers may be
    configured not to load it.
    """
    if settings.START_MODELS:
        named = map(catalogue().find, settings.START_MODELS)
        return any(spec is not None and spec.id == model for spec in named)
    if model in catalogue().optional:
        return False
    spec = catalogue().models.get(model)
    on_demand = settings.LOAD_ON_DEMAND if spec is None else fleet.is_on_demand(spec)
    return not (on_demand and status == ModelStatus.UNLOADED)


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
        answers = {source: _sources_pool.submit(read) for source, read in _SOURCES.items()}
        wait(answers.values(), timeout=_TIMEOUT_S)
        for source, answer in answers.items():
            try:
                found = answer.result(timeout=0)
            except (psycopg.Error, redis.RedisError, TimeoutError) as exc:
                logger.warning("metrics: no answer from %s: %s", source, type(exc).__name__)
                scrape_ok.add_metric([source], 0)
            else:
                scrape_ok.add_metric([source], 1)
                yield from found
        yield scrape_ok


def _of_generations() -> list[Metric]:
    with unpooled_connection() as connection:
        connection.execute("SET LOCAL statement_timeout = 1500")
        given = {"background": ServiceClass.BACKGROUND.value}
        rows: list[tuple[str, str, int, float]] = connection.execute(_IN_FLIGHT, given).fetchall()
    waiting = _by_model("inference_queue_length", "Generations that wait for a slot.")
    oldest = _by_model("inference_queue_oldest_seconds", "How long a client has waited at most.")
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

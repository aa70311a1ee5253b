"""The metrics and the health of a worker process."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_site.catalogue.fleet.leases import LiveWorker
from inference_site.core.observability import metrics
from inference_site.core.observability.metrics import BUILD, LEASE_RENEWED, timestamp_check
from worker.model_servers.telemetry import MEASURES
from worker.runtime.runtime import Runtime


def serve_metrics(runtime: Runtime) -> None:
    """Serve a worker's metrics and health on ``METRICS_PORT``, if that is set."""

    def why_not_ready() -> str:
        models = runtime.not_ready()
        return f"not ready: {', '.join(models)}" if models else ""

    BUILD.labels(settings.VERSION, "worker", runtime.id).set(1)
    REGISTRY.register(_RuntimeCollector(runtime))
    metrics.serve_metrics(
        timestamp_check(LEASE_RENEWED, "the lease was not renewed"), why_not_ready
    )


class _RuntimeCollector(Collector):
    """Gauges that are read from the runtime at each scrape."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        worker = self._runtime.described()
        slots = GaugeMetricFamily(
            "inference_worker_slots", "Slots of this worker.", labels=["model", "state"]
        )
        running = GaugeMetricFamily(
            "inference_worker_running", "Generations that run on this worker.", labels=["model"]
        )
        for model in worker.models:
            slots.add_metric([model.id, model.state], model.slots)
            running.add_metric([model.id], model.busy)
        yield from _server_metrics(worker)
        yield slots
        yield running
        yield GaugeMetricFamily(
            "inference_worker_draining", "1 while it takes no new work.", value=worker.is_draining
        )
        yield GaugeMetricFamily(
            "inference_event_log_backlog_seconds",
            "How long the oldest frame has waited that is not in the event log.",
            value=self._runtime.lag_s,
        )


def _server_metrics(worker: LiveWorker) -> Iterator[Metric]:
    """Return the memory of the models' servers, and what these report."""
    memory = GaugeMetricFamily(
        "inference_model_server_memory_bytes",
        "What the processes of a model's server take.",
        labels=["model"],
    )
    reported = {
        name: GaugeMetricFamily(
            f"inference_model_server_{name}",
            f"What a model's server tells as {' or '.join(theirs)}.",
            labels=["model"],
        )
        for name, theirs in MEASURES.items()
    }
    for model in worker.models:
        if model.taken_bytes:
            memory.add_metric([model.id], model.taken_bytes)
        for name, value in model.telemetry.items():
            reported[name].add_metric([model.id], value)
    yield memory
    yield from reported.values()

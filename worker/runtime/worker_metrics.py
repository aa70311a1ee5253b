"""The metrics of a worker process, and its health."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from django.conf import settings
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_site.fleet.leases import LiveWorker
from inference_site.observability.metrics import BUILD, LEASE_RENEWED
from inference_site.observability.metrics_server import serve_metrics, timestamp_check
from worker.model_servers.telemetry import MEASURES


class Worker(Protocol):
    """A runtime, as it is seen from here."""

    id: str

    def described(self) -> LiveWorker:
        """Return what its lease says."""

    def lacking(self) -> list[str]:
        """Return the models it was started with that have never been ready."""

    @property
    def lag_s(self) -> float:
        """How long the oldest frame waits that is not in the event log, in seconds."""


def watch_worker(worker: Worker) -> None:
    """Serve a worker's metrics and health on ``METRICS_PORT``, if that is set."""
    BUILD.labels(settings.VERSION, "worker", worker.id).set(1)
    REGISTRY.register(_WorkerMetrics(worker))
    health = timestamp_check(LEASE_RENEWED, "the lease was not renewed")
    serve_metrics(health, lambda: _not_ready(worker))


def _not_ready(worker: Worker) -> str:
    lacking = worker.lacking()
    return f"not ready: {', '.join(lacking)}" if lacking else ""


class _WorkerMetrics(Collector):
    """Gauges that are read off a worker when they are asked for."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Return slots and runs by model, whether it drains, and how late its event log is."""
        worker = self._worker.described()
        slots = GaugeMetricFamily(
            "inference_worker_slots", "Slots of this worker.", labels=["model", "state"]
        )
        running = GaugeMetricFamily(
            "inference_worker_running", "Generations that run on this worker.", labels=["model"]
        )
        for model in worker.models:
            slots.add_metric([model.id, model.state], model.slots)
            running.add_metric([model.id], model.busy)
        yield from _of_servers(worker)
        yield slots
        yield running
        yield GaugeMetricFamily(
            "inference_worker_draining", "1 while it takes no new work.", value=worker.is_draining
        )
        yield GaugeMetricFamily(
            "inference_event_log_backlog_seconds",
            "How long the oldest frame has waited that is not in the event log.",
            value=self._worker.lag_s,
        )


def _of_servers(worker: LiveWorker) -> Iterator[Metric]:
    """Return what the servers of the models take, and what they tell of themselves."""
    taken = GaugeMetricFamily(
        "inference_model_server_memory_bytes",
        "What the processes of a model's server take.",
        labels=["model"],
    )
    told = {
        name: GaugeMetricFamily(
            f"inference_model_server_{name}",
            f"What a model's server tells as {' or '.join(theirs)}.",
            labels=["model"],
        )
        for name, theirs in MEASURES.items()
    }
    for model in worker.models:
        if model.taken_bytes:
            taken.add_metric([model.id], model.taken_bytes)
        for name, value in model.telemetry.items():
            told[name].add_metric([model.id], value)
    yield taken
    yield from told.values()

"""The worker process: starts and stops the runtime with the Celery worker.

It also serves the metrics and the health of the worker.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import django.db
from celery import Celery, bootsteps, signals
from celery.exceptions import CPendingDeprecationWarning
from django.conf import settings
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import LiveWorker
from inference_site.catalogue.model_store import adapters
from inference_site.catalogue.model_store.entries import wait_for_specs, watch_models
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.observability import metrics
from inference_site.core.observability.metrics import BUILD, LEASE_RENEWED, timestamp_check
from inference_site.core.observability.outages import OutageLog
from inference_site.core.observability.tracing import start_tracing
from inference_site.core.process_lifecycle import (
    default_stop_signals,
    exit_within,
    freeze_imported_objects,
    handle_stop_signals,
    switch_threads_often,
)
from inference_site.core.site_settings import models as site_settings
from inference_site.runs.kinds import import_kinds
from inference_site.runs.streams.request_documents import reader_of
from inference_site.runs.wake_ups import own_queue, queue_named
from worker.indexing import Indexing
from worker.model_servers.process import MEASURES, server_settings, sweep
from worker.runtime.pulls import Pulls
from worker.runtime.runtime import Runtime
from worker.runtime.wake_up_consumer import WakeUpConsumer

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_EXIT_S = 30.0
"""How long the process may take to exit after its runs have ended or were stopped."""
_SPARE_THREADS = 4
"""Threads of the pool beyond those for all slots: a thread becomes free a while after its slot."""

_runtime: Runtime | None = None


def current_runtime() -> Runtime:
    """Return this process's runtime. Raise RuntimeError outside a worker process."""
    if _runtime is None:
        raise RuntimeError("This process is not a worker; start one with `manage.py worker`.")
    return _runtime


def run_worker(
    app: Celery,
    names: Sequence[str],
    loglevel: str = "INFO",
    wait: Callable[[], None] = lambda: None,
    *,
    takes_new: bool = False,
) -> int:
    """Serve the models of these names until stopped; return the exit status.

    SIGTERM and SIGHUP drain it: no new work, and running generations get ``DRAIN_TIMEOUT_S`` to
    end. Before the first model is loaded, they end it at once. ``wait`` is called before anything
    is served. A worker that ``takes_new`` loads models that are added while it runs.
    Raise EngineLoadError, and ImproperlyConfigured for an unknown name.
    """
    global _runtime  # noqa: PLW0603  # Celery tasks have no other way to the state of their process.
    catalogue()  # A bad models file is reported before any wait.
    for kind in import_kinds():  # So that the first request does not wait for it.
        reader_of(kind.assembly)
    wait()
    specs = wait_for_specs(names)
    default_stop_signals()
    switch_threads_often()
    site_settings.keep_fresh()
    runtime = _runtime = Runtime(_with_adapters(specs))
    serve_metrics(runtime)
    start_tracing("worker")
    server_settings.files = settings.DATA_DIR / "model-servers"
    server_settings.models, server_settings.stall_s = settings.MODELS_DIR, settings.ENGINE_STALL_S
    server_settings.llama_server = settings.LLAMA_SERVER
    sweep(server_settings.files)
    runtime.start()
    runtime.notify_supervisor_when_loaded()
    watch_models(lambda changes: runtime.loader.apply(changes, takes_new=takes_new))
    Pulls(runtime.id).start()
    indexing = Indexing(runtime.id)
    indexing.start()
    exit_status = _run_celery(app, runtime, loglevel)
    indexing.stop()
    runtime.stop()
    return exit_status


def _with_adapters(specs: list[ModelSpec]) -> list[ModelSpec]:
    """Return the models with the adapters that were added to them; wait for the database."""
    outage = OutageLog(logger, "waiting for the list of adapters")
    while True:
        try:
            added = adapters.read()
        except django.db.Error as exc:
            outage.failed(exc)
            time.sleep(_RETRY_S)
        else:
            outage.succeeded()
            return [added.to(spec) for spec in specs]


def _run_celery(app: Celery, runtime: Runtime, loglevel: str) -> int:
    """Run the Celery worker that receives the wake-ups of a runtime; return its exit status."""
    signals.worker_init.connect(default_stop_signals, weak=False)
    signals.worker_ready.connect(freeze_imported_objects, weak=False)
    app.steps["consumer"].add(WakeUpConsumer)  # Both steps get the ``runtime`` below.
    app.steps["worker"].add(_Drain)
    own = own_queue(runtime.id)
    app.amqp.queues.add(queue_named(own))
    worker = app.Worker(
        runtime=runtime,
        hostname=f"models-{os.getpid()}@{socket.gethostname()}",
        pool_cls="threads",
        concurrency=runtime.threads + _SPARE_THREADS,
        queues=[own],
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=not settings.CELERY_WORKER_SEND_TASK_EVENTS,
        quiet=True,  # No banner among the lines of the log.
    )
    # Celery shows it at each lost connection; the setting that it advises would cancel runs.
    warnings.filterwarnings("ignore", r"\s*In Celery 5\.1", CPendingDeprecationWarning)
    worker.start()
    return int(worker.exitcode or 0)


class _Drain(bootsteps.StartStopStep):
    """Drains the runtime when the worker stops, at a signal or at ``celery control shutdown``."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, runtime: Runtime, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = runtime
        signals.worker_shutting_down.connect(self._drain)

    def start(self, parent: Any) -> None:
        """Handle SIGTERM, SIGINT, SIGHUP and SIGQUIT as Celery handles SIGTERM.

        Celery has just installed its own handlers. At SIGHUP, it would replace the program of this
        process while its threads run. At SIGQUIT, it would kill the tasks, and fail at that.
        """
        stop: Any = signal.getsignal(signal.SIGTERM)
        handle_stop_signals(lambda: stop(signal.SIGTERM, None), self._runtime.stop_runs)
        signal.signal(signal.SIGQUIT, signal.getsignal(signal.SIGTERM))

    def stop(self, parent: Any) -> None:
        """Drain before the pool waits for its threads; a remote shutdown sends no signal."""
        self._drain()

    def _drain(self, **_: Any) -> None:
        if not self._runtime.is_ending:
            self._runtime.drain()
            exit_within(settings.DRAIN_TIMEOUT_S + _EXIT_S, status=1)


def serve_metrics(runtime: Runtime) -> None:
    """Serve a worker's metrics and health on ``METRICS_PORT``, if that is set."""

    def why_not_alive() -> str:
        return "the lease's thread does not run" if runtime.lease.is_hung else ""

    is_renewed = timestamp_check(LEASE_RENEWED, "the lease was not renewed")

    def why_not_ready() -> str:
        models = runtime.not_ready()
        return is_renewed() or (f"not ready: {', '.join(models)}" if models else "")

    BUILD.labels(settings.VERSION, "worker", runtime.id).set(1)
    REGISTRY.register(_RuntimeCollector(runtime))
    metrics.serve_metrics(why_not_alive, why_not_ready)


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
            f"What a model's server reports as {' or '.join(theirs)}.",
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

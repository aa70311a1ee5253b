"""The Celery process of a GPU host: starts and stops the runtime with the Celery worker."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import django.db
import redis.exceptions
from celery import Celery, bootsteps, signals
from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.model_spec import ModelSpec
from inference_site.generations.kinds import import_kinds
from inference_site.generations.wake_ups import drop_wake_ups_of, own_queue, queue_named
from inference_site.model_store import adapters
from inference_site.model_store.watching import wanted_specs, watch_models
from inference_site.observability.tracing import start_tracing
from inference_site.process_lifecycle import default_stop_signals, exit_within, handle_stop_signals
from inference_site.process_tuning import freeze_imported_objects, switch_threads_often
from inference_site.streams.request_documents import reader_of
from inference_site.warm_up import warm_up
from worker.engines.own_server import server_settings
from worker.model_servers.process import sweep
from worker.runtime.pulls import Pulls
from worker.runtime.runtime import Runtime
from worker.runtime.wake_up_consumer import WakeUpConsumer
from worker.runtime.wake_up_consumer import Worker as ConsumedWorker
from worker.runtime.worker_metrics import watch_worker

if TYPE_CHECKING:
    from celery.apps.worker import Worker

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_ENDS_S = 30.0
"""How long the process may take to end once what ran has ended, or has been stopped."""
_SPARE_THREADS = 4
"""Slots are what bounds the generations. A thread is free only a while after its slot is."""

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
    is served. A worker that ``takes_new`` loads each model that appears while it runs.
    Raise EngineLoadError, and ImproperlyConfigured for an unknown name.
    """
    catalogue()  # A bad models file is said before anything is waited for.
    for kind in import_kinds():  # No first request waits for it.
        reader_of(kind.assembly)
    wait()
    return _serve(app, wanted_specs(names), loglevel, takes_new=takes_new)


def _serve(app: Celery, specs: list[ModelSpec], loglevel: str, *, takes_new: bool) -> int:
    global _runtime  # noqa: PLW0603  # Celery tasks have no other way to what their process holds.
    default_stop_signals()
    switch_threads_often()
    runtime = _runtime = Runtime(_with_adapters(specs))
    watch_worker(runtime)
    start_tracing("worker")
    server_settings.files = settings.DATA_DIR / "model-servers"
    server_settings.models, server_settings.stall_s = settings.MODELS_DIR, settings.ENGINE_STALL_S
    server_settings.llama_server = settings.LLAMA_SERVER
    sweep(server_settings.files)
    warm_up()
    runtime.start()
    runtime.tell_supervisor_when_loaded()
    watch_models(lambda changes: runtime.take_up(changes, takes_new=takes_new))
    Pulls(runtime.id).start()

    @signals.worker_shutting_down.connect(weak=False)
    def on_shutting_down(**_: Any) -> None:
        runtime.drain()
        exit_within(settings.DRAIN_TIMEOUT_S + _ENDS_S, status=1)

    signals.worker_init.connect(default_stop_signals, weak=False)
    signals.worker_ready.connect(freeze_imported_objects, weak=False)
    worker = _celery_worker(app, runtime, loglevel)
    worker.start()
    runtime.stop()
    with contextlib.suppress(redis.exceptions.RedisError):  # Maintenance does it later.
        drop_wake_ups_of(runtime.id)
    return int(worker.exitcode or 0)


class StopSignals(bootsteps.StartStopStep):
    """Takes the stop signals from Celery, which has just installed its handlers.

    At SIGHUP it would replace the program of this process while its threads go on.
    """

    def __init__(self, parent: Any, runtime: Runtime, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = runtime

    def start(self, parent: Any) -> None:
        """Have SIGTERM, SIGINT and SIGHUP do what Celery does at SIGTERM."""
        stop: Any = signal.getsignal(signal.SIGTERM)
        handle_stop_signals(lambda: stop(signal.SIGTERM, None), self._runtime.cut)


def _celery_worker(app: Celery, runtime: Runtime, loglevel: str) -> Worker:
    """Return the Celery worker that takes the wake-ups of a runtime's models."""
    consumed: ConsumedWorker = runtime  # What the step uses of it, for mypy.
    app.steps["consumer"].add(WakeUpConsumer)  # Both are given the ``runtime`` below.
    app.steps["worker"].add(StopSignals)
    app.amqp.queues.add(queue_named(own_queue(runtime.id)))
    return app.Worker(
        runtime=consumed,
        hostname=f"models-{os.getpid()}@{socket.gethostname()}",
        pool_cls="threads",
        concurrency=runtime.threads + _SPARE_THREADS,
        queues=[own_queue(runtime.id)],
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,  # No banner among the lines of the log.
    )


def _with_adapters(specs: list[ModelSpec]) -> list[ModelSpec]:
    """Return the models with the adapters that were added; wait for the database that has these."""
    while True:
        try:
            added = adapters.read()
        except django.db.Error as exc:
            logger.warning("waiting for the list of adapters: %s", exc)
            time.sleep(_RETRY_S)
        else:
            return [added.to(spec) for spec in specs]

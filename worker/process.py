"""The Celery process of a GPU host: starts and stops the runtime with the Celery worker."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from celery import Celery, signals

from worker.engines.base import ModelSpec
from worker.queue import queue_name
from worker.runtime import Runtime
from worker.tracing import start_tracing
from worker.vitals import watch_worker

_runtime: Runtime | None = None


def current_runtime() -> Runtime:
    """Return this process's runtime. Raise RuntimeError outside a worker process."""
    if _runtime is None:
        raise RuntimeError("This process is not a worker; start one with `manage.py worker`.")
    return _runtime


def run_worker(app: Celery, specs: list[ModelSpec], loglevel: str = "INFO") -> int:
    """Serve these models until stopped; return the exit status. Raise EngineLoadError.

    SIGTERM ends it gently: no new work, running generations get ``DRAIN_TIMEOUT_S`` to end.
    """
    global _runtime  # noqa: PLW0603  # Celery tasks have no other way to what their process holds.
    runtime = _runtime = Runtime(specs)
    watch_worker(runtime)
    start_tracing("worker")
    runtime.start()

    @signals.worker_shutting_down.connect(weak=False)
    def on_shutting_down(**_: Any) -> None:
        runtime.drain()

    @signals.worker_init.connect(weak=False)
    def on_init(**_: Any) -> None:
        # llama.cpp installed C handlers of its own while loading; Celery sets its own after this.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)

    worker = app.Worker(
        hostname=f"models-{os.getpid()}@{socket.gethostname()}",
        pool_cls="threads",
        concurrency=sum(spec.slots for spec in specs),
        queues=[queue_name(spec.id) for spec in specs],
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,  # No banner among the lines of the log.
    )
    worker.start()
    runtime.stop()
    return int(worker.exitcode or 0)

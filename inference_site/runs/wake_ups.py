"""Wake-ups: Celery tasks which say that a generation of a model waits.

A wake-up names a model, never a generation. The worker that receives it claims the best waiting
row, so a wake-up that is lost, duplicated or late does no harm, and none is acknowledged to the
broker. ``runs.maintenance`` sends wake-ups for rows that wait without one.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kombu import Queue
from kombu.exceptions import OperationalError

from inference_site.celery import app
from inference_site.core.storage.redis import broker_client

logger = logging.getLogger(__name__)

ENOUGH_WAKE_UPS = 128
"""With this many unread wake-ups no more are sent: a worker that reads one claims until nothing
waits."""

GENERATE_TASK = "worker.generate"

_EXPIRES_S = 60
"""How long wake-ups for one worker stay without another: nobody reads those of a dead worker."""


def queue_name(model: str) -> str:
    """Return the Celery queue of this model's wake-ups."""
    return f"model.{model}"


def own_queue(worker: str) -> str:
    """Return the Celery queue of wake-ups for the generations that prefer this worker."""
    return f"worker-wake-ups.{worker}"


@lru_cache(maxsize=1024)
def queue_named(name: str) -> Queue:
    """Return a queue for Celery, undeclared: Redis creates its list with the first message."""
    return Queue(name, routing_key=name, no_declare=True)


def route(
    name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, *_: Any, **__: Any
) -> dict[str, Any] | None:
    """Return the queue of the model that a wake-up names (Celery's setting ``task_routes``)."""
    model = args[0] if args else (kwargs or {}).get("model")
    if name != GENERATE_TASK or model is None:
        return None
    return {"queue": queue_named(queue_name(model)), "declare": ()}


def send_wake_up(model: str, worker: str = "") -> None:
    """Wake a worker of this model, or the given one. A broker that is down is no error."""
    options: dict[str, Any] = {}
    if worker:
        own = own_queue(worker)
        queue = Queue(own, routing_key=own, expires=_EXPIRES_S)
        options = {"queue": queue, "declare": [queue]}
    # Celery's own way to describe arguments takes 0.05 ms.
    options |= {"argsrepr": f"({model!r},)", "kwargsrepr": "{}", "ignore_result": True}
    try:
        app.send_task(GENERATE_TASK, (model,), **options)
    except OperationalError as exc:
        logger.warning("could not send a wake-up for %s: %s", model, exc)


def connect_to_broker() -> None:
    """Open the connection over which the first wake-up is sent. Raise OperationalError."""
    with app.producer_or_acquire() as producer:
        _ = producer.channel


def count_wake_ups(model: str) -> int:
    """Return how many wake-ups of this model no worker has received."""
    length: Any = broker_client().llen(queue_name(model))
    return int(length)


class DelayedWakeUps:
    """Sends wake-ups after a delay, on one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, model: str, after_s: float) -> None:
        """Send a wake-up for the model after ``after_s``."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + after_s, model))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="wake-ups", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._due:
                    self._changed.wait()
                left_s = self._due[0][0] - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, model = heapq.heappop(self._due)
            send_wake_up(model)


delayed_wake_ups = DelayedWakeUps()

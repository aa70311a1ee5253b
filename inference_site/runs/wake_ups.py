"""Wake-ups: Celery messages which say that a generation of a model waits.

A wake-up names a model, never a generation. The worker that receives it claims the best waiting
row, so a wake-up that is lost, duplicated or late does no harm, and none is acknowledged to the
broker. ``generations.maintenance`` sends wake-ups for rows that wait without one.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from functools import lru_cache
from typing import Any

import kombu
import redis.exceptions
from kombu import Queue
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid as new_id

from inference_site.catalogue.fleet.leases import is_alive
from inference_site.celery import app
from inference_site.core.storage.redis import Deadlines, broker_client

logger = logging.getLogger(__name__)

ENOUGH_WAKE_UPS = 128
"""With this many unread wake-ups no more are sent: a worker that reads one claims until nothing
waits."""

GENERATE_TASK = "worker.generate"

_dead_workers = Deadlines("gone-workers")
_STILL_SENT_S = 30.0
"""How long wake-ups may be sent to a dead worker: longer than its lease is cached plus the time to
write a row."""


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


def send_wake_up(model: str, worker: str = "") -> None:
    """Wake a worker of this model, or the given one. A broker that is down is no error."""
    try:
        send(GENERATE_TASK, own_queue(worker) if worker else queue_name(model), model)
    except redis.exceptions.RedisError as exc:
        logger.warning("could not send a wake-up for %s: %s", model, exc)


def send(task: str, queue: str, *arguments: str) -> None:
    """Put a message into a queue of wake-ups. Raise redis' errors when the broker is down.

    Celery renders the first message; later ones are copies with new ids, at a tenth of the cost.
    """
    rendered, id_, tag = _rendered(task, queue, *arguments)
    message = rendered.replace(id_, new_id().encode()).replace(tag, new_id().encode())
    broker_client().lpush(queue, message)


@lru_cache(maxsize=1024)
def _rendered(task: str, queue: str, *arguments: str) -> tuple[bytes, bytes, bytes]:
    """Return a message as stored in Redis, the id of its task, and its delivery tag."""
    to: Any = queue_named(queue)  # Celery's stubs accept only names.
    with kombu.Connection("memory://") as memory:
        app.send_task(
            task,
            args=arguments,
            queue=to,
            declare=(),
            ignore_result=True,
            producer=app.amqp.Producer(memory, auto_declare=False),
        )
        channel: Any = memory.default_channel
        message = channel.queues[queue].get_nowait()
    tag = message["properties"]["delivery_tag"]
    return dumps(message).encode(), message["headers"]["id"].encode(), tag.encode()


def prepare_to_send() -> None:
    """Import what Celery imports when it first sends, so that no request waits for it.

    This opens no connection.
    """
    _rendered(GENERATE_TASK, queue_name(""), "")


def count_wake_ups(model: str) -> int:
    """Return how many wake-ups of this model no worker has received."""
    length: Any = broker_client().llen(queue_name(model))
    return int(length)


def drop_wake_ups_of(worker: str) -> None:
    """Drop the wake-ups for a dead worker, and have ``drop_late_wake_ups`` do so again.

    Other processes cache its lease for a moment, and send it more.
    """
    broker_client().delete(own_queue(worker))
    _dead_workers.push(worker, _STILL_SENT_S)


def drop_late_wake_ups() -> None:
    """Drop the wake-ups that were sent to workers after their death."""
    for worker in _dead_workers.passed():
        if not is_alive(worker):  # Otherwise its lease was only late, and it reads its queue.
            broker_client().delete(own_queue(worker))
        _dead_workers.forget([worker])


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

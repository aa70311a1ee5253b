"""Wake-ups: messages through Celery that say that a generation of a model waits.

A wake-up names a model, never a generation. The worker that receives it claims the best waiting
row, so a wake-up that is lost, doubled or late does no harm, and none is acknowledged to the
broker; ``generations.maintenance`` sends them again for rows that wait without one.
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

from inference_site.celery import app
from inference_site.fleet.leases import is_alive
from inference_site.storage.redis import Deadlines, broker_client

logger = logging.getLogger(__name__)

ENOUGH_WAKE_UPS = 128
"""With so many unread no more are sent: a worker that reads one claims until nothing waits."""

GENERATE_TASK = "worker.generate"

_gone = Deadlines("gone-workers")
_BELIEVED_S = 30.0
"""How long wake-ups may be sent to a worker that is gone: longer than its lease is remembered and a
row takes to be written."""


def queue_name(model: str) -> str:
    """Return the Celery queue of this model's wake-ups."""
    return f"model.{model}"


def own_queue(worker: str) -> str:
    """Return the Celery queue of wake-ups for one worker: of generations that prefer it."""
    return f"worker-wake-ups.{worker}"


@lru_cache(maxsize=1024)
def queue_named(name: str) -> Queue:
    """Return a queue for Celery; Redis makes it when there is a message, so it is not declared."""
    return Queue(name, routing_key=name, no_declare=True)


def send_wake_up(model: str, worker: str = "") -> None:
    """Tell one of the workers of this model, or this one, that a generation waits.

    A broker that is down is no error.
    """
    try:
        send(GENERATE_TASK, own_queue(worker) if worker else queue_name(model), model)
    except redis.exceptions.RedisError as exc:
        logger.warning("could not send a wake-up for %s: %s", model, exc)


def send(task: str, queue: str, *arguments: str) -> None:
    """Put a message into a queue of wake-ups. Raise redis' errors when that is down.

    Celery writes the first message of each kind, and this the others like it, which costs a tenth.
    """
    written, id_, tag = _written(task, queue, *arguments)
    message = written.replace(id_, new_id().encode()).replace(tag, new_id().encode())
    broker_client().lpush(queue, message)


@lru_cache(maxsize=1024)
def _written(task: str, queue: str, *arguments: str) -> tuple[bytes, bytes, bytes]:
    """Return a message as it lies in Redis, the id of its task, and the tag of its delivery."""
    to: Any = queue_named(queue)  # Celery's stubs know only names.
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
    """Import what Celery imports when it first sends, so that no request waits for that.

    It connects to nothing.
    """
    _written(GENERATE_TASK, queue_name(""), "")


def count_wake_ups(model: str) -> int:
    """Return how many wake-ups of this model no worker has received yet."""
    length: Any = broker_client().llen(queue_name(model))
    return int(length)


def drop_wake_ups_of(worker: str) -> None:
    """Drop the wake-ups for a worker that is gone, and have ``drop_late_wake_ups`` do so again.

    For a moment others believe that it lives, and send it more.
    """
    broker_client().delete(own_queue(worker))
    _gone.push(worker, _BELIEVED_S)


def drop_late_wake_ups() -> None:
    """Drop the wake-ups that were sent to workers when they were gone."""
    for worker in _gone.passed():
        if not is_alive(worker):  # It was only late, and reads its queue.
            broker_client().delete(own_queue(worker))
        _gone.forget([worker])


class DelayedWakeUps:
    """Sends wake-ups after a while, on one thread for all."""

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, model: str, after_s: float) -> None:
        """Send a wake-up for the model after so many seconds."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + after_s, model))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="wake-ups", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _main(self) -> None:
        while True:
            send_wake_up(self._next())

    def _next(self) -> str:
        with self._changed:
            while True:
                if not self._due:
                    self._changed.wait()
                elif (left_s := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    return heapq.heappop(self._due)[1]


delayed_wake_ups = DelayedWakeUps()

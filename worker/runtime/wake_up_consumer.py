"""WakeUpConsumer: a step of the Celery worker that reads wake-ups while a slot is free.

A wake-up that this worker could not answer now stays in Redis, where an idle worker reads it.
``at_once`` is how Celery runs the task of one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import redis.exceptions
from celery import bootsteps
from celery.exceptions import InvalidTaskError

from inference_site.generations.wake_ups import own_queue, queue_name, queue_named, send

logger = logging.getLogger(__name__)

LISTEN_TASK = "worker.listen_again"
"""A task that does nothing: its message ends a wait on the queues of before."""
AT_ONCE = f"{__name__}:at_once"
"""The strategy of the task of a wake-up, by its name as Celery takes it."""


class Worker(Protocol):
    """A runtime, as it is seen from here."""

    id: str
    on_change: Any
    """Called, from any thread, when other models may be open than before."""

    def open_models(self) -> list[str]:
        """Return the models of which a generation would be taken now."""

    def expect(self, model: str) -> bool:
        """Hold a slot for a wake-up of this model until its task has begun.

        Return whether one generation more of it would be taken.
        """


class WakeUpConsumer(bootsteps.StartStopStep):
    """Consumes the queues of the models with a free slot, and the worker's own with them.

    All of it runs on the event loop of the Celery consumer. A message takes its slot before the
    next one is asked for, so that no more are read than can be answered.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, runtime: Worker, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime, self._consumer = runtime, parent
        self._own = own_queue(runtime.id)
        self._consumed: set[str] = set()
        parent.wake_ups = self

    def start(self, parent: Any) -> None:
        """Begin with a connection; Celery does so again after each loss of one."""
        parent.task_consumer.cancel_by_queue(self._own)  # Celery was given no other queue.
        self._consumed = set()
        self._runtime.on_change = lambda: parent.call_soon(self._reopen)
        self._update()

    def stop(self, parent: Any) -> None:
        """Have no part in the end of the consumer, which cancels all queues."""
        self._runtime.on_change = lambda: None

    def take(self, model: str) -> None:
        """Hold a slot for a wake-up of this model that has been read."""
        if not self._runtime.expect(model):
            self._update()

    def _reopen(self) -> None:
        is_waiting = bool(self._consumed)
        if self._update() and is_waiting:
            # The wait goes on for the queues with which it began, until a message ends it.
            with contextlib.suppress(redis.exceptions.RedisError):
                send(LISTEN_TASK, self._own)

    def _update(self) -> bool:
        """Consume what is open and nothing else; return whether there is more than before."""
        consumer = self._consumer.task_consumer
        if consumer is None:  # The connection is lost; ``start`` comes with the next.
            return False
        wanted = {queue_name(model) for model in self._runtime.open_models()}
        wanted |= {self._own} if wanted else set()
        opened = wanted - self._consumed
        for name in self._consumed - wanted:
            consumer.cancel_by_queue(name)
        for name in opened:
            consumer.add_queue(queue_named(name))
        if opened:
            consumer.consume()
        self._consumed = wanted
        return bool(opened)


def at_once(task: Any, app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """Return what runs the task of a wake-up on Celery's pool, once its slot is held.

    Celery's own strategy makes a request of each message, that can be revoked, retried, delayed,
    limited and timed. Of a wake-up nobody wants any of this, and there is one for each generation.
    Source: ``celery.app.task.Task.Strategy``.
    """
    errors = consumer.connection_errors

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
        try:
            (model,), *_ = message.payload
        except (TypeError, ValueError) as exc:
            raise InvalidTaskError(f"a wake-up names one model: {exc}") from exc
        consumer.wake_ups.take(model)
        consumer.pool.apply_async(_run, (task, model), callback=_ignore)
        ack(logger, errors)

    return on_message


def _run(task: Any, model: str) -> None:
    try:
        task.run(model)
    except Exception:
        logger.exception("the task of a wake-up for %s failed", model)


def _ignore(result: Any) -> None:
    """Take the result of a task that has none."""

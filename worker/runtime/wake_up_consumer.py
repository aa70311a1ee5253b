"""WakeUpConsumer: a step of the Celery worker that reads wake-ups while a slot is free.

A wake-up that this worker could not answer now stays in Redis, where an idle worker reads it.
``at_once`` is how Celery runs the task of one.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import redis.exceptions
from celery import bootsteps
from celery.exceptions import InvalidTaskError

from inference_site.generations.wake_ups import own_queue, queue_name, queue_named, send

logger = logging.getLogger(__name__)

LISTEN_TASK = "worker.listen_again"
"""A task that does nothing: its message ends a wait on the queues of before, and shows that
messages are read."""
AT_ONCE, NOTED = f"{__name__}:at_once", f"{__name__}:noted"
"""The strategies of the two tasks, by their names as Celery takes them."""

_LOOK_S = 1.0
_PROBE_AGAIN = 3
"""Looks after which another message is sent, read or not: Redis may have lost the one before."""
_SILENT = 6
"""Looks without a sign after which the consumer is restarted, and restarted again after as many."""
_HOPELESS = 60
"""Looks without a sign after which a process that runs nothing ends; its supervisor restarts it."""
_WAKES = signal.SIGUSR2
"""Interrupts whatever the main thread waits for."""


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

    def note_consumer(self, *, reads: bool) -> None:
        """Announce that wake-ups are not read, or are read again."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""

    def end_now(self) -> None:
        """End this process."""


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
        self.watch = ConsumerWatch(parent, runtime)
        parent.wake_ups = self

    def start(self, parent: Any) -> None:
        """Begin with a connection; Celery does so again after each loss of one."""
        parent.task_consumer.cancel_by_queue(self._own)  # Celery was given no other queue.
        self._consumed = set()
        self._runtime.on_change = lambda: parent.call_soon(self._reopen)
        self._update()
        self.watch.begin()

    def stop(self, parent: Any) -> None:
        """Have no part in the end of the consumer, which cancels all queues."""
        self._runtime.on_change = lambda: None
        self.watch.pause()

    def take(self, model: str) -> None:
        """Hold a slot for a wake-up of this model that has been read."""
        self.watch.note_read()
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


class ConsumerWatch:
    """Sees that the Celery consumer reads, and starts it anew when it does not.

    A thread asks the consumer's event loop for a sign every second and, while the worker's own
    queue is read, for a message that it has put there. A worker with free slots and without either
    for seconds is cut off from its wake-ups, whatever the cause: a connection that the other side
    has forgotten, a callback that does not return. Then the loop gets a connection error, at which
    Celery connects again; a loop that stands still gets it from a signal. Seconds in which this
    thread does not run do not count, nor do those without a broker.
    """

    def __init__(self, consumer: Any, runtime: Worker) -> None:
        self._consumer, self._runtime = consumer, runtime
        self._own = own_queue(runtime.id)
        self._is_watching = self._must_wake = self._can_wake = self._is_deaf = False
        self._is_turning = self._has_read = True
        self._silent = self._probed = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Watch, as the consumer has a connection. Called by the thread of its loop."""
        self._must_wake, self._is_turning, self._has_read = False, True, False
        self._probed = _PROBE_AGAIN
        self._is_watching = True
        if self._thread is None:
            self._can_wake = threading.current_thread() is threading.main_thread()
            if self._can_wake:
                signal.signal(_WAKES, self._on_signal)
            self._thread = threading.Thread(target=self._main, name="consumer watch", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Expect nothing: the consumer has lost its connection, or ends."""
        self._is_watching = self._must_wake = False

    def note_read(self) -> None:
        """Note that a message was read."""
        self._has_read = True

    def _main(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            try:
                self._look()
            except redis.exceptions.RedisError:
                self._silent = 0  # Nobody could read now.

    def _look(self) -> None:
        if not self._is_watching:
            return
        must_read = bool(self._runtime.open_models())
        if self._is_turning and (self._has_read or not must_read):
            self._note(0)
        else:
            self._note(self._silent + 1)
        self._ask(must_read)

    def _ask(self, must_read: bool) -> None:
        """Ask for the signs that the next look sees."""
        if self._is_turning:
            self._is_turning = False
            self._consumer.call_soon(self._turn)
        self._probed += 1
        if must_read and self._probed >= _PROBE_AGAIN:
            self._has_read, self._probed = False, 0
            send(LISTEN_TASK, self._own)
        elif not must_read:
            self._has_read = True

    def _turn(self) -> None:
        self._is_turning, self._must_wake = True, False

    def _note(self, silent: int) -> None:
        """Take up the number of looks without a sign."""
        self._silent = silent
        if silent == 0 and self._is_deaf:
            self._is_deaf = False
            logger.warning("wake-ups are read again")
            self._runtime.note_consumer(reads=True)
        elif silent and silent % _SILENT == 0:
            self._is_deaf = True
            logger.error("no wake-up was read for %d s; connecting to the broker anew", silent)
            self._runtime.note_consumer(reads=False)
            self._restart()
            if silent >= _HOPELESS and self._runtime.is_idle:
                logger.critical("the consumer cannot be started anew; this process ends")
                self._runtime.end_now()

    def _restart(self) -> None:
        if self._is_turning:
            self._consumer.call_soon(_lose_connection)
        elif self._can_wake:
            self._must_wake = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _WAKES)

    def _on_signal(self, *_: Any) -> None:
        if self._must_wake:
            self._must_wake = False
            _lose_connection()


def _lose_connection() -> None:
    raise ConnectionResetError("no wake-up was read")


def noted(task: Any, app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """Return what notes that a message was read, on the consumer's event loop."""
    errors = consumer.connection_errors

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
        consumer.wake_ups.watch.note_read()
        ack(logger, errors)

    return on_message


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

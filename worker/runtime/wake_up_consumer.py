"""WakeUpConsumer: a step of the Celery worker that reads wake-ups only while a slot is free.

A wake-up that this worker cannot serve now stays in Redis, where an idle worker reads it.
``at_once`` is the strategy with which Celery runs the task of a wake-up.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis.exceptions
from celery import bootsteps
from celery.exceptions import InvalidTaskError

from inference_site.runs.wake_ups import own_queue, queue_name, queue_named, send

if TYPE_CHECKING:
    from worker.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

LISTEN_TASK = "worker.listen_again"
"""A task that does nothing. Its message ends a blocking read of the previous list of queues, and
proves that messages are read."""
AT_ONCE, NOTED = f"{__name__}:at_once", f"{__name__}:noted"
"""The strategies of the two tasks, as Celery names them."""

_CHECK_S = 1.0
_PROBE_AGAIN = 3
"""Checks after which another probe is sent, read or not: Redis may have lost the previous one."""
_SILENT = 6
"""Checks without an answer after which the consumer is restarted, and again after as many."""
_HOPELESS = 60
"""Checks without an answer after which an idle process ends; its supervisor restarts it."""
_WAKES = signal.SIGUSR2
"""The signal that interrupts a blocked main thread."""


class WakeUpConsumer(bootsteps.StartStopStep):
    """Consumes the queues of the models with a free slot, and the worker's own queue with them.

    All of it runs on the event loop of the Celery consumer. A message reserves its slot before the
    next one is requested, so no more are read than there are slots.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, runtime: Runtime, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime, self._consumer = runtime, parent
        self._own = own_queue(runtime.id)
        self._consumed: set[str] = set()
        self.watch = ConsumerWatch(parent, runtime)
        parent.wake_ups = self

    def start(self, parent: Any) -> None:
        """Consume with a new connection; Celery calls this again after each lost connection."""
        parent.task_consumer.cancel_by_queue(self._own)  # The only queue that Celery was given.
        self._consumed = set()
        self._runtime.on_change = lambda: parent.call_soon(self._reopen)
        self._update()
        self.watch.start()

    def stop(self, parent: Any) -> None:
        """Do nothing more; Celery's consumer cancels its queues itself."""
        self._runtime.on_change = lambda: None
        self.watch.pause()

    def take(self, model: str) -> None:
        """Reserve a slot for a wake-up of this model that was read."""
        self.watch.note_read()
        if not self._runtime.reserve_slot(model):
            self._update()

    def _reopen(self) -> None:
        is_waiting = bool(self._consumed)
        if self._update() and is_waiting:
            # A blocking read continues with the queues that it started with, until a message comes.
            with contextlib.suppress(redis.exceptions.RedisError):
                send(LISTEN_TASK, self._own)

    def _update(self) -> bool:
        """Consume the queues of the open models only; return whether queues were added."""
        consumer = self._consumer.task_consumer
        if consumer is None:  # The connection is lost; ``start`` is called with the next one.
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
    """Checks that the Celery consumer reads messages, and restarts it if it does not.

    Every second a thread schedules a callback on the consumer's event loop and, while the worker's
    own queue is consumed, sends probe messages to that queue. If a worker with free slots answers
    neither for seconds, it gets no wake-ups. Possible causes are a connection that the other side
    has dropped, or a callback that does not return. Then a connection error is raised in the loop,
    after which Celery connects again; in a blocked loop, a signal handler raises it. Seconds in
    which this thread does not run do not count, nor do seconds without a broker.
    """

    def __init__(self, consumer: Any, runtime: Runtime) -> None:
        self._consumer, self._runtime = consumer, runtime
        self._own = own_queue(runtime.id)
        self._is_watching = self._must_wake = self._can_wake = self._is_cut_off = False
        self._loop_runs = self._has_read = True
        self._silent = self._probed = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch a consumer that has a connection. The thread of its loop calls this."""
        self._must_wake, self._loop_runs, self._has_read = False, True, False
        self._probed = _PROBE_AGAIN
        self._is_watching = True
        if self._thread is None:
            self._can_wake = threading.current_thread() is threading.main_thread()
            if self._can_wake:
                signal.signal(_WAKES, self._on_signal)
            self._thread = threading.Thread(target=self._main, name="consumer watch", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Stop checking: the consumer has lost its connection, or ends."""
        self._is_watching = self._must_wake = False

    def note_read(self) -> None:
        """Record that a message was read."""
        self._has_read = True

    def _main(self) -> None:
        while True:
            time.sleep(_CHECK_S)
            try:
                if self._is_watching:
                    self._check()
            except redis.exceptions.RedisError:
                self._silent = 0  # Without a broker, no consumer can read.

    def _check(self) -> None:
        """Evaluate the answers of the last second, and ask again."""
        must_read = bool(self._runtime.open_models())
        if self._loop_runs and (self._has_read or not must_read):
            self._handle_silence(0)
        else:
            self._handle_silence(self._silent + 1)
        if self._loop_runs:
            self._loop_runs = False
            self._consumer.call_soon(self._note_loop_runs)
        self._probed += 1
        if must_read and self._probed >= _PROBE_AGAIN:
            self._has_read, self._probed = False, 0
            send(LISTEN_TASK, self._own)
        elif not must_read:
            self._has_read = True

    def _note_loop_runs(self) -> None:
        self._loop_runs, self._must_wake = True, False

    def _handle_silence(self, silent: int) -> None:
        """Restart the consumer, or end the process, after ``silent`` checks without an answer."""
        self._silent = silent
        if silent == 0 and self._is_cut_off:
            self._is_cut_off = False
            logger.warning("wake-ups are read again")
            self._runtime.announce_consumer(reads=True)
        elif silent and silent % _SILENT == 0:
            self._is_cut_off = True
            logger.error("no wake-up was read for %d s; connecting to the broker anew", silent)
            self._runtime.announce_consumer(reads=False)
            if self._loop_runs:
                self._consumer.call_soon(_lose_connection)
            elif self._can_wake:
                self._must_wake = True
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, _WAKES)
            if silent >= _HOPELESS and self._runtime.is_idle:
                logger.critical("the consumer cannot be started anew; this process ends")
                self._runtime.end_now()

    def _on_signal(self, *_: Any) -> None:
        if self._must_wake:
            self._must_wake = False
            _lose_connection()


def _lose_connection() -> None:
    raise ConnectionResetError("no wake-up was read")


def noted(task: Any, app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """Celery strategy: record, on the consumer's event loop, that a message was read."""
    errors = consumer.connection_errors

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
        consumer.wake_ups.watch.note_read()
        ack(logger, errors)

    return on_message


def at_once(task: Any, app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """Celery strategy: run the task of a wake-up on Celery's pool, after its slot is reserved.

    Celery's own strategy creates a request for each message, which can be revoked, retried, delayed
    and rate-limited. A wake-up needs none of this, and there is one for each generation.
    Source: ``celery.app.task.Task.Strategy``.
    """
    errors = consumer.connection_errors

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
        try:
            (model,), *_ = message.payload
        except (TypeError, ValueError) as exc:
            raise InvalidTaskError(f"a wake-up names one model: {exc}") from exc
        consumer.wake_ups.take(model)
        consumer.pool.apply_async(_run, (task, model), callback=lambda result: None)
        ack(logger, errors)

    return on_message


def _run(task: Any, model: str) -> None:
    try:
        task.run(model)
    except Exception:
        logger.exception("the task of a wake-up for %s failed", model)

"""WakeUpConsumer: a step of the Celery worker that reads wake-ups only while a slot is free.

Celery's prefetch counts the tasks of a worker; slots are counted for each model, and a slot is in
use after its task has ended. So the step adds and cancels the queues of the models. A wake-up that
this worker cannot serve now stays in Redis, where an idle worker reads it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import bootsteps, signals
from kombu.exceptions import OperationalError

from inference_site.celery import app
from inference_site.runs.wake_ups import GENERATE_TASK, own_queue, queue_name, queue_named

if TYPE_CHECKING:
    from worker.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

LISTEN_TASK = "worker.listen_again"
"""A task that does nothing. Its message ends a blocking read of the previous list of queues."""

_CHECK_S = 1.0
_SILENT = 6
"""Checks without an answer after which the consumer is restarted, and again after as many."""
_HOPELESS = 60
"""Checks without an answer after which an idle process ends; its supervisor restarts it."""
_WAKES = signal.SIGUSR2
"""The signal that interrupts a blocked main thread."""


class WakeUpConsumer(bootsteps.StartStopStep):
    """Consumes the queues of the models with a free slot, and the worker's own queue with them.

    All of it runs on the event loop of the Celery consumer. A wake-up reserves its slot before the
    next one is requested, so no more are read than there are slots.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, runtime: Runtime, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime, self._consumer = runtime, parent
        self._own = own_queue(runtime.id)
        self._watch = LoopWatch(parent, runtime, self._reopen)
        signals.task_received.connect(self._reserve_slot, sender=parent)

    def start(self, parent: Any) -> None:
        """Consume with a new connection; Celery calls this again after each lost connection."""
        self._runtime.on_change = lambda: parent.call_soon(self._reopen)
        self._update()
        self._watch.start()

    def stop(self, parent: Any) -> None:
        """Do nothing more; Celery's consumer cancels its queues itself."""
        self._runtime.on_change = lambda: None
        self._watch.pause()

    def _reserve_slot(self, request: Any, **_: Any) -> None:
        """Reserve a slot for a wake-up that was received; a delayed one takes what is free then."""
        if request.name != GENERATE_TASK or request.eta or request.kwargs or len(request.args) != 1:
            return
        if not self._runtime.reserve_slot(request.args[0]):
            self._update()

    def _reopen(self) -> None:
        consumer = self._consumer.task_consumer
        is_waiting = consumer is not None and bool(consumer.queues)
        if self._update() and is_waiting:
            # A blocking read continues with the queues that it started with, until a message comes.
            try:
                app.send_task(LISTEN_TASK, queue=self._own, ignore_result=True)
            except OperationalError as exc:
                logger.warning("new queues are read after the next message: %s", exc)

    def _update(self) -> bool:
        """Consume the queues of the open models only; return whether queues were added."""
        consumer = self._consumer.task_consumer
        if consumer is None:  # The connection is lost; ``start`` is called with the next one.
            return False
        wanted = {queue_name(model) for model in self._runtime.open_models()}
        wanted |= {self._own} if wanted else set()
        consumed = {queue.name for queue in consumer.queues}
        for name in consumed - wanted:
            self._consumer.cancel_task_queue(name)
        for name in wanted - consumed:
            app.amqp.queues.add(queue_named(name))
            self._consumer.add_task_queue(name)
        return bool(wanted - consumed)


class LoopWatch:
    """Checks that the event loop of the Celery consumer runs, and restarts the consumer if not.

    Kombu connects again when Redis is silent (``health_check_interval``), but nothing ends a
    callback that does not return, and without the loop a worker with free slots gets no wake-ups.
    Every second a thread schedules a callback on the loop. If it has not run for seconds, a signal
    handler raises a connection error in the loop, after which Celery connects again. Seconds in
    which this thread does not run do not count, nor do seconds without a broker.
    """

    def __init__(self, consumer: Any, runtime: Runtime, reopen: Callable[[], None]) -> None:
        self._consumer, self._runtime, self._reopen = consumer, runtime, reopen
        self._is_watching = self._must_wake = self._is_cut_off = False
        self._loop_runs = True
        self._silent = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch a consumer that has a connection. The main thread, which runs its loop, calls."""
        self._must_wake, self._loop_runs = False, True
        self._is_watching = True
        if self._thread is None:
            signal.signal(_WAKES, self._on_signal)
            self._thread = threading.Thread(target=self._main, name="loop watch", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Stop checking: the consumer has lost its connection, or ends."""
        self._is_watching = self._must_wake = False

    def _main(self) -> None:
        """Each second, evaluate the answer of the last one, and ask again."""
        while True:
            time.sleep(_CHECK_S)
            if not self._is_watching:
                continue
            if not self._loop_runs:
                self._silent += 1
                if self._silent % _SILENT == 0:
                    self._interrupt()
                continue
            self._silent = 0
            if self._is_cut_off:
                self._is_cut_off = False
                logger.warning("wake-ups are read again")
                self._runtime.announce_consumer(reads=True)
            self._loop_runs = False
            self._consumer.call_soon(self._note_loop_runs)

    def _note_loop_runs(self) -> None:
        self._loop_runs, self._must_wake = True, False
        self._reopen()  # `celery control cancel_consumer` may have closed queues.

    def _interrupt(self) -> None:
        """Restart the consumer; end an idle process if that has not helped."""
        self._is_cut_off = self._must_wake = True
        logger.error("no wake-up was read for %d s; connecting to the broker again", self._silent)
        self._runtime.announce_consumer(reads=False)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _WAKES)
        if self._silent >= _HOPELESS and self._runtime.is_idle:
            logger.critical("the consumer cannot be restarted; this process ends")
            self._runtime.end_now()

    def _on_signal(self, *_: Any) -> None:
        if self._must_wake:
            self._must_wake = False
            raise ConnectionResetError("the event loop of the consumer has stalled")

"""Which wake-ups a worker reads: those that it could answer, with a real Kombu and a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu.asynchronous import Hub
from redis.exceptions import RedisError

from inference_site.celery import app
from inference_site.core.storage.redis import broker_client
from inference_site.runs.queue import new_id
from inference_site.runs.wake_ups import (
    count_wake_ups,
    own_queue,
    queue_name,
    queue_named,
    send_wake_up,
)
from tests.waiting import wait_until
from worker.runtime import wake_up_consumer
from worker.runtime.wake_up_consumer import LISTEN_TASK, WakeUpConsumer, at_once, noted


class Models:
    """The models of a worker, each with this many free slots."""

    def __init__(self, **free: int) -> None:
        self.id = new_id("host:")
        self.on_change: Callable[[], None] = lambda: None
        self.free = free
        self.is_idle = False
        self.noted: list[bool] = []

    def open_models(self) -> list[str]:
        return [model for model, free in self.free.items() if free > 0]

    def reserve_slot(self, model: str) -> bool:
        self.free[model] -= 1
        return self.free[model] > 0

    def announce_consumer(self, *, reads: bool) -> None:
        self.noted.append(reads)

    def end_now(self) -> None:
        raise AssertionError("something runs")

    def set(self, model: str, free: int) -> None:
        self.free[model] = free
        self.on_change()


class Consumer(threading.Thread):
    """What the step sees of Celery: a connection, a consumer, and an event loop that runs it."""

    def __init__(self, models: Models) -> None:
        super().__init__(daemon=True)
        self.app, self.hub, self.models = app, Hub(), models
        self.received: list[str] = []
        self.call_soon = self.hub.call_soon
        connection: Any = app.connection_for_read()  # The stubs know no transport's own.
        connection.connect()
        connection.transport.register_with_event_loop(connection.connection, self.hub)
        own = queue_named(own_queue(models.id))
        self.task_consumer = app.amqp.TaskConsumer(connection, queues=[own])
        self.task_consumer.on_message = self._on_message
        self.connection_errors, self.pool = (), self
        runtime: Any = models
        self._connection, self._step = connection, WakeUpConsumer(self, runtime)
        self._begin, self._note = at_once(None, app, self), noted(None, app, self)

    def _on_message(self, message: Any) -> None:
        begin = self._note if message.headers["task"] == LISTEN_TASK else self._begin
        begin(message, None, message.ack_log_error, message.reject_log_error, ())

    def apply_async(self, run: object, arguments: tuple[object, str], **_: object) -> None:
        """Be the pool of threads, on which the task of a wake-up would run."""
        self.received.append(arguments[1])

    def run(self) -> None:
        self._step.start(self)
        try:
            self.hub.run_forever()
        except ConnectionResetError:
            self.restart()  # As Celery does.
            self.hub.run_forever()

    def restart(self) -> None:
        self.task_consumer.cancel()
        self.task_consumer.add_queue(queue_named(own_queue(self.models.id)))
        self._step.start(self)

    def is_reading(self, *models: str) -> bool:
        """Whether it waits for wake-ups of these models and of no others."""
        read = {queue_name(model) for model in models}
        read |= {own_queue(self.models.id)} if models else set()
        return set(self._connection.default_channel.active_queues) == read

    def close(self) -> None:
        self._step.stop(self)
        self.hub.stop()
        self.join(60)
        self._connection.close()
        self.hub.close()


@pytest.fixture
def worker() -> Iterator[Callable[..., Consumer]]:
    """Starts workers, each with the free slots of its models."""
    started: list[Consumer] = []

    def start(**free: int) -> Consumer:
        consumer = Consumer(Models(**free))
        consumer.start()
        started.append(consumer)
        wait_until(lambda: consumer.is_reading(*consumer.models.open_models()))
        return consumer

    yield start
    for consumer in started:
        consumer.close()
        broker_client().delete(own_queue(consumer.models.id))


@pytest.fixture
def model() -> Iterator[str]:
    name = new_id("model-").replace("-", "_")
    yield name
    broker_client().delete(queue_name(name))


@pytest.fixture
def other() -> Iterator[str]:
    name = new_id("other-").replace("-", "_")
    yield name
    broker_client().delete(queue_name(name))


Start = Callable[..., Consumer]


def test_no_more_are_read_than_there_are_free_slots(worker: Start, model: str) -> None:
    consumer = worker(**{model: 2})
    for _ in range(5):
        send_wake_up(model)
    wait_until(lambda: len(consumer.received) == 2 and consumer.is_reading())
    assert count_wake_ups(model) == 3
    consumer.models.set(model, 1)
    wait_until(lambda: len(consumer.received) == 3 and consumer.is_reading())
    assert count_wake_ups(model) == 2


def test_an_idle_worker_reads_what_a_full_one_leaves(worker: Start, model: str) -> None:
    full, idle = worker(**{model: 1}), worker(**{model: 0})
    send_wake_up(model)
    wait_until(full.is_reading)
    idle.models.set(model, 100)
    for sent in range(1, 31):
        send_wake_up(model)
        wait_until(lambda sent=sent: len(idle.received) == sent)  # type: ignore[misc]  # Its value.
    assert full.received == [model]


def test_a_worker_reads_its_own_wake_ups_while_any_model_is_open(
    worker: Start, model: str, other: str
) -> None:
    consumer = worker(**{model: 1, other: 0})
    send_wake_up(other, consumer.models.id)
    send_wake_up(model, consumer.models.id)
    wait_until(lambda: consumer.received == [other, model] and consumer.is_reading())
    send_wake_up(model, consumer.models.id)
    consumer.models.set(model, 1)
    wait_until(lambda: len(consumer.received) == 3)


def test_a_model_that_opens_is_read_at_once_though_the_worker_waits_for_others(
    worker: Start, model: str, other: str
) -> None:
    consumer = worker(**{model: 1, other: 0})
    for turn in range(1, 11):
        send_wake_up(other)
        consumer.models.set(other, 1)
        started = threading.Event()
        wait_until(lambda turn=turn: len(consumer.received) == turn)  # type: ignore[misc]
        assert not started.is_set()
    assert consumer.received == [other] * 10
    assert count_wake_ups(own_queue(consumer.models.id)) == 0


def test_a_wake_up_that_comes_for_a_queue_just_left_goes_back_to_it(
    worker: Start, model: str, other: str
) -> None:
    """The command that waits in Redis names the queue still: Kombu puts back what it brings."""
    leaving = worker(**{model: 1})
    leaving.models.set(model, 0)
    wait_until(leaving.is_reading)
    send_wake_up(model)
    staying = worker(**{model: 1})
    wait_until(lambda: staying.received == [model])
    assert leaving.received == []


def test_after_a_lost_connection_the_open_models_are_read_again(worker: Start, model: str) -> None:
    consumer = worker(**{model: 1})
    done = threading.Event()

    def restart() -> None:
        consumer.restart()
        done.set()

    consumer.call_soon(restart)
    assert done.wait(60)
    send_wake_up(model)
    wait_until(lambda: consumer.received == [model])


def test_a_consumer_to_which_no_message_comes_is_started_anew(
    worker: Start, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_up_consumer, "_CHECK_S", 0.1)
    consumer = worker(**{model: 1})
    wait_until(lambda: consumer._step.watch._silent == 0)
    assert consumer.models.noted == []
    consumer.call_soon(consumer.task_consumer.cancel)
    # While it starts, it may be found silent once more.
    wait_until(lambda: False in consumer.models.noted and consumer.models.noted[-1])
    send_wake_up(model)
    wait_until(lambda: consumer.received == [model])


def test_a_full_worker_and_one_without_a_broker_are_not_started_anew(
    worker: Start, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_up_consumer, "_CHECK_S", 0.2)
    asked: list[str] = []

    def refused(task: str, queue: str) -> None:
        asked.append(queue)
        raise RedisError

    full = worker(**{model: 0})
    monkeypatch.setattr(wake_up_consumer, "send", refused)
    open_ = worker(**{model: 1})
    wait_until(lambda: asked.count(own_queue(open_.models.id)) > 3)
    assert (full.models.noted, open_.models.noted) == ([], [])


def test_nothing_of_a_wake_up_is_kept_in_redis(worker: Start, model: str) -> None:
    consumer = worker(**{model: 1})
    send_wake_up(model)
    wait_until(lambda: consumer.received == [model])
    assert broker_client().keys("unacked*") == []
    assert broker_client().keys(f"*{model}*") == []

"""Which wake-ups a worker reads: those that it could answer; a real Celery and a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown
from kombu.asynchronous import set_event_loop

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
from worker import tasks
from worker.runtime.wake_up_consumer import LoopWatch, WakeUpConsumer

pytestmark = pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")


class Models:
    """The models of a worker, each with this many free slots."""

    def __init__(self, **free: int) -> None:
        self.id = new_id("host:")
        self.on_change: Callable[[], None] = lambda: None
        self.free = free
        self.received: list[str] = []

    def open_models(self) -> list[str]:
        return [model for model, free in self.free.items() if free > 0]

    def reserve_slot(self, model: str) -> bool:
        self.received.append(model)
        self.free[model] -= 1
        return self.free[model] > 0

    def set(self, model: str, free: int) -> None:
        self.free[model] = free
        self.on_change()


class Worker(threading.Thread):
    """A worker of Celery with the step of this project."""

    def __init__(self, models: Models) -> None:
        super().__init__(daemon=True)
        self.models = models
        self._own = own_queue(models.id)
        app.amqp.queues.add(queue_named(self._own))
        set_event_loop(None)  # Each worker gets its own, as in a process of its own.
        self._celery: Any = app.WorkController(
            runtime=models,
            hostname=models.id,
            pool_cls="threads",
            concurrency=1,
            queues=[self._own],
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )

    def run(self) -> None:
        self._celery.start()

    def fail(self, raised: BaseException) -> None:
        """Raise this on the event loop of the consumer."""

        def fail() -> None:
            raise raised

        self._celery.consumer.call_soon(fail)

    @property
    def received(self) -> list[str]:
        return self.models.received

    @property
    def connections(self) -> int:
        """How often it has lost its connection, and connected again."""
        return int(self._celery.consumer.restart_count)

    def is_reading(self, *models: str) -> bool:
        """Whether it waits for wake-ups of these models and of no others."""
        read = {queue_name(model) for model in models}
        read |= {self._own} if models else set()
        consumer = self._celery.consumer.task_consumer
        return consumer is not None and set(consumer.channel.active_queues) == read

    def close(self) -> None:
        self.fail(WorkerShutdown(0))
        self.join(60)
        assert not self.is_alive()
        broker_client().delete(self._own)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    """Starts workers, each with the free slots of its models. Their tasks do nothing."""
    monkeypatch.setattr(LoopWatch, "start", lambda watch: None)  # It is for the main thread.
    idle = SimpleNamespace(serve=lambda model: None)
    monkeypatch.setattr(tasks, "current_runtime", lambda: idle)
    app.steps["consumer"].add(WakeUpConsumer)
    started: list[Worker] = []

    def start(**free: int) -> Worker:
        worker = Worker(Models(**free))
        worker.start()
        started.append(worker)
        wait_until(lambda: worker.is_reading(*worker.models.open_models()))
        return worker

    yield start
    for worker in started:
        worker.close()
    app.steps["consumer"].discard(WakeUpConsumer)


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


Start = Callable[..., Worker]


def test_no_more_are_read_than_there_are_free_slots(worker: Start, model: str) -> None:
    reader = worker(**{model: 2})
    for _ in range(5):
        send_wake_up(model)
    wait_until(lambda: len(reader.received) == 2 and reader.is_reading())
    assert count_wake_ups(model) == 3
    reader.models.set(model, 1)
    wait_until(lambda: len(reader.received) == 3 and reader.is_reading())
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
    reader = worker(**{model: 1, other: 0})
    send_wake_up(other, reader.models.id)
    send_wake_up(model, reader.models.id)
    wait_until(lambda: reader.received == [other, model] and reader.is_reading())
    send_wake_up(model, reader.models.id)
    reader.models.set(model, 1)
    wait_until(lambda: len(reader.received) == 3)


def test_a_model_that_opens_is_read_at_once_though_the_worker_waits_for_others(
    worker: Start, model: str, other: str
) -> None:
    reader = worker(**{model: 1, other: 0})
    for turn in range(1, 11):
        send_wake_up(other)
        reader.models.set(other, 1)
        wait_until(lambda turn=turn: len(reader.received) == turn)  # type: ignore[misc]
    assert reader.received == [other] * 10
    assert broker_client().llen(own_queue(reader.models.id)) == 0


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


def test_after_a_lost_connection_the_open_models_are_read_again(
    worker: Start, model: str, other: str
) -> None:
    reader = worker(**{model: 1, other: 0})
    reader.fail(ConnectionResetError())
    wait_until(lambda: reader.connections == 1 and reader.is_reading(model))
    send_wake_up(model)
    wait_until(lambda: reader.received == [model])


def test_a_delayed_wake_up_reserves_no_slot(worker: Start, model: str) -> None:
    reader = worker(**{model: 1})
    tasks.generate.apply_async((model,), countdown=600)
    wait_until(lambda: count_wake_ups(model) == 0)
    send_wake_up(model)
    wait_until(lambda: reader.received == [model])


def test_nothing_of_a_wake_up_is_kept_in_redis(worker: Start, model: str) -> None:
    reader = worker(**{model: 1})
    send_wake_up(model)
    wait_until(lambda: reader.received == [model])
    assert broker_client().keys("unacked*") == []
    assert broker_client().keys(f"*{model}*") == []

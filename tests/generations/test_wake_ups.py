"""Which bells a worker listens for: those that it could answer, and its own while there are any."""

from __future__ import annotations

import pytest

from inference_site.generations import wake_ups
from inference_site.generations.wake_ups import Ears, OpenQueues, own_queue, queue_name

OWN, A, B = own_queue("host:1"), queue_name("a"), queue_name("b")


class Worker:
    """A worker whose models open and close, and that notes what is rung for it."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.rung: list[str] = []
        self.ears = Ears()
        self.ears.attach(self.open.__contains__, self.rung.append)

    def listen(self) -> list[str]:
        return self.ears.listen([OWN, A, B])


class Loop:
    """An event loop that counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0

    def call_soon(self, callback: object) -> None:
        self.woken += 1


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    waiting = Loop()
    monkeypatch.setattr(wake_ups, "get_event_loop", lambda: waiting)
    return waiting


def test_a_worker_listens_for_models_with_a_free_slot_and_for_its_own_bells_first() -> None:
    worker = Worker()
    worker.open |= {"b"}
    assert worker.listen() == [OWN, B]
    worker.open |= {"a"}
    assert worker.listen() == [OWN, A, B]


def test_a_worker_without_a_free_slot_leaves_even_its_own_bells_where_they_are() -> None:
    assert Worker().listen() == []


def test_queues_of_other_tasks_are_always_listened_to() -> None:
    assert Worker().ears.listen(["maintenance", A]) == ["maintenance"]
    assert Ears().listen([A, B]) == [A, B]  # A process that is no worker of models.


def test_a_model_that_opens_while_others_are_listened_for_is_rung_for_once(loop: Loop) -> None:
    worker = Worker()
    worker.open |= {"a"}
    worker.listen()
    worker.open |= {"b"}
    worker.ears.opened("b")
    worker.ears.opened("b")
    assert (worker.rung, loop.woken) == (["b"], 0)


def test_a_model_that_is_listened_for_needs_no_wake_up(loop: Loop) -> None:
    worker = Worker()
    worker.open |= {"a"}
    worker.listen()
    worker.ears.opened("a")
    assert (worker.rung, loop.woken) == ([], 0)


def test_a_worker_that_listens_for_nothing_is_woken_when_a_slot_becomes_free(loop: Loop) -> None:
    worker = Worker()
    worker.listen()
    worker.open |= {"a"}
    worker.ears.opened("a")
    assert (worker.rung, loop.woken) == ([], 1)
    assert worker.listen() == [OWN, A]


def test_the_consumer_asks_in_turns_and_only_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    worker.open |= {"a", "b"}
    monkeypatch.setattr(wake_ups, "ears", worker.ears)
    queues = OpenQueues()
    queues.update([OWN, A, B])
    assert queues.consume(3) == [OWN, A, B]
    queues.rotate(A)
    worker.open -= {"b"}
    assert queues.consume(3) == [OWN, A]

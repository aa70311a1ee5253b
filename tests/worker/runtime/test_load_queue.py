"""The order of loads, and when a model that waits to be loaded should be ready."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import Device
from inference_site.core.storage.redis import site_client
from inference_site.runs.queue import new_id
from tests.waiting import wait_until
from worker.runtime import residency
from worker.runtime.residency import LoadQueue
from worker.runtime.served_model import ServedModel


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = new_id("host-")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    yield name
    site_client().delete(f"load-seconds:{name}")


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(residency, "time", made)
    return made


def model(id_: str, min_resident_s: float = 10) -> ServedModel:
    return ServedModel(ModelSpec(id_, "scripted", min_resident_s=min_resident_s))


def learn(queue: LoadQueue, clock: Clock, **seconds: float) -> None:
    for id_, took_s in seconds.items():
        loaded = model(id_)
        queue.start(loaded)
        clock.now += took_s
        queue.end(loaded, is_loaded=True)


def test_nobody_knows_before_the_first_load(clock: Clock) -> None:
    queue, first = LoadQueue(), model("a")
    queue.add(first)
    assert queue.expected_s(first, 0, None) is None
    queue.start(first)
    queue.end(first, is_loaded=False)
    assert queue.expected_s(first, 0, None) is None  # A load that fails says nothing.


def test_a_load_that_goes_on_has_the_rest_of_the_last_one(clock: Clock) -> None:
    queue, again = LoadQueue(), model("a")
    learn(queue, clock, a=8)
    queue.add(again)
    assert queue.expected_s(again, 0, None) == 8
    queue.start(again)
    queue.remove(again)
    clock.now += 5
    assert queue.expected_s(again, 0, None) == 3
    clock.now += 5
    assert queue.expected_s(again, 0, None) == 0


def test_those_before_it_are_loaded_first_and_stay_where_room_is_short(clock: Clock) -> None:
    queue = LoadQueue()
    learn(queue, clock, a=8, b=4)
    before, behind = model("a", min_resident_s=20), model("b")
    for waiting in (before, behind):
        queue.add(waiting)
    assert queue.expected_s(behind, 0, None) == 12
    assert queue.expected_s(behind, 0, 3.0) == 12 + 3 + 20
    assert queue.expected_s(before, 0, 3.0) == 8 + 3
    queue.add(stranger := model("new"))
    queue.add(last := model("b"))
    assert queue.expected_s(last, 0, None) is None
    queue.remove(stranger)
    assert queue.expected_s(last, 0, None) == 16


def test_a_server_that_is_started_again_takes_as_long_as_its_load(clock: Clock) -> None:
    queue, running = LoadQueue(), model("a")
    learn(queue, clock, a=8)
    assert queue.expected_s(running, 2.0, None) == 6


def test_what_was_learnt_outlives_the_process(clock: Clock, host: str) -> None:
    learn(LoadQueue(), clock, a=8)
    queue, again = LoadQueue(), model("a")
    wait_until(lambda: site_client().hgetall(f"load-seconds:{host}"))
    queue.read_history()
    queue.add(again)
    assert queue.expected_s(again, 0, None) == 8


def test_on_a_gpu_one_is_loaded_after_the_other_and_nothing_else_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated: this machine need not have one."""
    monkeypatch.setattr(residency, "gpus", lambda: (Device("gpu", 1, 1),))
    one, two = (ServedModel(ModelSpec(id_, "llama_cpp")) for id_ in ("gpu-1", "gpu-2"))
    queue, other = LoadQueue(), ServedModel(ModelSpec("cpu", "llama_cpp", gpu_layers=0))
    for each in (one, two, other):
        queue.add(each)
    for turn in (one, other):
        assert queue.next() is turn
        queue.start(turn)
        queue.remove(turn)
    queue.end(one, is_loaded=False)
    assert queue.next() is two

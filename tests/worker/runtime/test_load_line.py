"""When a model that waits to be loaded should be ready."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from inference_site.domain.model_spec import ModelSpec
from inference_site.generations.queue import new_id
from inference_site.storage.redis import site_client
from tests.waiting import wait_until
from worker.runtime import load_line
from worker.runtime.load_line import LoadLine


@dataclass(eq=False)
class Model:
    spec: ModelSpec


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name = new_id("host-")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    yield
    site_client().delete(f"load-seconds:{name}")


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(load_line, "time", made)
    return made


def model(id_: str, min_resident_s: float = 10) -> Model:
    return Model(ModelSpec(id_, "scripted", min_resident_s=min_resident_s))


def learn(line: LoadLine[Model], clock: Clock, **seconds: float) -> None:
    for id_, took_s in seconds.items():
        loaded = model(id_)
        line.begin(loaded)
        clock.now += took_s
        line.end(loaded, is_loaded=True)


def test_nobody_knows_before_the_first_load(clock: Clock) -> None:
    line, first = LoadLine[Model](), model("a")
    line.put(first)
    assert line.expected_s(first, 0, None) is None
    line.begin(first)
    line.end(first, is_loaded=False)
    assert line.expected_s(first, 0, None) is None  # A load that fails says nothing.


def test_a_load_that_goes_on_has_the_rest_of_the_last_one(clock: Clock) -> None:
    line, again = LoadLine[Model](), model("a")
    learn(line, clock, a=8)
    line.put(again)
    assert line.expected_s(again, 0, None) == 8
    line.begin(again)
    line.leave(again)
    clock.now += 5
    assert line.expected_s(again, 0, None) == 3
    clock.now += 5
    assert line.expected_s(again, 0, None) == 0


def test_those_before_it_are_loaded_first_and_stay_where_room_is_short(clock: Clock) -> None:
    line = LoadLine[Model]()
    learn(line, clock, a=8, b=4)
    before, behind = model("a", min_resident_s=20), model("b")
    for waiting in (before, behind):
        line.put(waiting)
    assert line.expected_s(behind, 0, None) == 12
    assert line.expected_s(behind, 0, 3.0) == 12 + 3 + 20
    assert line.expected_s(before, 0, 3.0) == 8 + 3
    line.put(stranger := model("new"))
    line.put(last := model("b"))
    assert line.expected_s(last, 0, None) is None
    line.leave(stranger)
    assert line.expected_s(last, 0, None) == 16


def test_a_server_that_is_started_again_takes_as_long_as_its_load(clock: Clock) -> None:
    line, running = LoadLine[Model](), model("a")
    learn(line, clock, a=8)
    assert line.expected_s(running, 2.0, None) == 6


def test_what_was_learnt_outlives_the_process(clock: Clock) -> None:
    learn(LoadLine[Model](), clock, a=8)
    line, again = LoadLine[Model](), model("a")
    wait_until(lambda: site_client().hgetall(load_line._key()))
    line.read()
    line.put(again)
    assert line.expected_s(again, 0, None) == 8


def test_on_a_gpu_one_is_loaded_after_the_other_and_nothing_else_waits() -> None:
    line, one, two, other = LoadLine[Model](), model("gpu-1"), model("gpu-2"), model("cpu")

    def is_alone(model: Model) -> bool:
        return model.spec.id.startswith("gpu")

    for each in (one, two, other):
        line.put(each)
    for turn in (one, other):
        assert line.first(is_alone) is turn
        line.begin(turn)
        line.leave(turn)
    line.end(one, is_loaded=False)
    assert line.first(is_alone) is two

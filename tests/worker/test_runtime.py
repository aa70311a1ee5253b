"""What a worker process holds: it answers bells, fills its slots, and drains."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis.exceptions
from django.db import OperationalError
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from tests.generations import chat_document, create_generation
from tests.waiting import wait_until
from worker import tasks
from worker.documents import save_document
from worker.engines.base import EngineLoadError, ModelSpec
from worker.event_log import Batch, log_key
from worker.leases import ServedModel, live_workers
from worker.models import Generation, Status
from worker.redis_clients import client_for
from worker.runtime import Runtime

Key = tuple[ApiKey, str]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A worker that serves the model ``m``, two at once."""
    worker = Runtime([ModelSpec("m", "scripted", slots=2)])
    worker.start()
    yield worker
    worker.stop()


def waiting(api_key: Key, script: list[dict[str, Any]], model: str = "m") -> Generation:
    row = create_generation(api_key[0], model=model)
    save_document(row.public_id, chat_document(row.public_id, json.dumps(script)), "web.one")
    return row


def served(runtime: Runtime) -> tuple[ServedModel, ...] | None:
    """Return what the site believes of the worker; None when it does not know it."""
    runtime._lease.renew()
    return next((w.models for w in live_workers() if w.id == runtime.id), None)


def is_ended(row: Generation) -> bool:
    entries: Any = client_for(row.public_id).xrevrange(log_key(row.public_id), count=1)
    return bool(entries) and Batch.unpack(entries[0][1][b"b"]).ending is not None


def test_one_bell_is_enough_for_all_that_waits(runtime: Runtime, api_key: Key) -> None:
    rows = [waiting(api_key, [{"text": "hi"}]) for _ in range(3)]
    other = waiting(api_key, [{"text": "hi"}], model="another")
    runtime.serve("m")
    states = dict(Generation.objects.values_list("pk", "status"))
    assert states == {**{row.pk: Status.COMPLETED for row in rows}, other.pk: Status.QUEUED}
    for row in rows:
        wait_until(lambda row=row: is_ended(row))  # type: ignore[misc]  # Binds this round's row.


def test_a_failed_generation_does_not_keep_the_next_from_running(
    runtime: Runtime, api_key: Key
) -> None:
    for script in ([{"fail": "boom"}], [{"text": "hi"}]):
        waiting(api_key, script)
    runtime.serve("m")
    assert sorted(Generation.objects.values_list("status", flat=True)) == ["completed", "failed"]


def test_a_bell_without_anybody_waiting_does_no_harm(runtime: Runtime, api_key: Key) -> None:
    runtime.serve("m")
    runtime.serve("m")
    assert served(runtime) == (ServedModel("m", slots=2, busy=0),)


@pytest.mark.django_db(transaction=True)
def test_no_more_run_than_there_are_slots(runtime: Runtime, api_key: Key) -> None:
    rows = [waiting(api_key, [{"text": "a"}, {"sleep_ms": 60_000}]) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        bells = [pool.submit(runtime.serve, "m") for _ in range(2)]
        wait_until(lambda: Generation.objects.filter(status=Status.RUNNING).count() == 2)
        runtime.serve("m")  # A third bell comes back at once.
        assert served(runtime) == (ServedModel("m", slots=2, busy=2),)
        assert Generation.objects.filter(status=Status.QUEUED).count() == 1
        runtime.drain()
        runtime._publisher.stop_all()
        for bell in bells:
            bell.result(5)
    left = Generation.objects.filter(pk__in=[row.pk for row in rows])
    assert sorted(left.values_list("status", flat=True)) == ["failed", "failed", "queued"]


@pytest.mark.django_db(transaction=True)
def test_a_drain_gives_what_runs_its_time_and_no_more(
    runtime: Runtime, api_key: Key, settings: Settings
) -> None:
    settings.DRAIN_TIMEOUT_S = 0.1
    short = waiting(api_key, [{"text": "a"}, {"sleep_ms": 30}])
    long = waiting(api_key, [{"text": "a"}, {"sleep_ms": 60_000}])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(runtime.serve, "m")
        wait_until(lambda: Generation.objects.filter(status=Status.RUNNING).count() == 2)
        runtime.drain()
    for row in (short, long):
        row.refresh_from_db()
    assert (short.status, long.status) == (Status.COMPLETED, Status.FAILED)
    assert long.error_code == "worker_unavailable"


def test_a_draining_worker_claims_nothing_and_says_that_it_serves_nothing(
    runtime: Runtime, api_key: Key
) -> None:
    row = waiting(api_key, [{"text": "hi"}])
    runtime.drain()
    runtime.serve("m")
    row.refresh_from_db()
    assert row.status == Status.QUEUED
    assert served(runtime)
    assert not any(live.serves("m") for live in live_workers() if live.id == runtime.id)


def test_a_stopped_worker_is_not_live() -> None:
    worker = Runtime([ModelSpec("m", "scripted")])
    worker.start()
    assert worker.id in [live.id for live in live_workers()]
    worker.stop()
    assert worker.id not in [live.id for live in live_workers()]


def test_a_model_that_cannot_load_keeps_the_worker_from_starting() -> None:
    worker = Runtime([ModelSpec("m", "scripted"), ModelSpec("broken", "llama_cpp")])
    with pytest.raises(EngineLoadError, match="broken"):
        worker.start()
    assert worker.id not in [live.id for live in live_workers()]
    worker._publisher._loop.close()  # It never ran.


def test_a_bell_for_another_model_is_logged(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.serve("unknown")
    assert "a bell for unknown" in caplog.text


def test_a_task_outside_a_worker_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match=r"manage\.py worker"):
        tasks.generate("m")


class DeafRuntime:
    """A worker whose database is down."""

    def serve(self, model: str) -> None:
        raise OperationalError("down")


def test_a_bell_is_lost_and_not_an_error_while_the_database_is_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "current_runtime", DeafRuntime)
    tasks.generate("m")
    assert "cannot claim for m" in caplog.text


@pytest.mark.parametrize(
    "fault", [OperationalError("down"), redis.exceptions.ConnectionError("down")]
)
def test_upkeep_waits_for_its_next_turn_when_a_server_is_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    def down() -> None:
        raise fault

    monkeypatch.setattr(tasks, "tend", down)
    tasks.upkeep()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]

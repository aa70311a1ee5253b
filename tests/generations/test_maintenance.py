"""What beat does so that no generation is forgotten. The clock is moved, not waited for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
import redis.exceptions
from asgiref.sync import async_to_sync, sync_to_async
from channels.layers import get_channel_layer
from django.db import OperationalError, transaction
from django.db.models.functions import Now
from django.utils import timezone
from prometheus_client import REGISTRY
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import Lease, LiveWorker, ModelReport, live_view, prune
from inference_site.core.domain.model_spec import ModelSpec, Price
from inference_site.core.storage import postgresql
from inference_site.core.storage.redis import (
    broker_client,
    client_for,
    new_async_clients,
    site_client,
)
from inference_site.runs import maintenance
from inference_site.runs.cancellation import cancel
from inference_site.runs.maintenance import (
    drop_leftover_requests,
    end_orphans,
    end_runs_of_dead_workers,
    expire_removed_models,
    expire_waiting,
    last_maintained,
    maintain,
    repeat_cancels,
    resend_wake_ups,
    try_and_log,
)
from inference_site.runs.models import Generation, GenerationQuerySet, ServiceClass, Status
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Batch
from inference_site.runs.streams.event_log import (
    Appended,
    AsyncEventLog,
    LogState,
    Write,
    drop_cancel_flag,
    is_cancel_requested,
    log_key,
    request_cancel,
)
from inference_site.runs.streams.request_documents import Assembly, load_document, save_document
from inference_site.runs.tool_calls.models import SavedTurns, ToolCall
from inference_site.runs.wake_ups import (
    count_wake_ups,
    own_queue,
    queue_name,
    send_wake_up,
)
from tests.generations.rows import chat_document, create_generation

Key = tuple[ApiKey, str]


@pytest.fixture
def worker() -> Iterator[str]:
    name = new_id("host:")
    yield name
    site_client().delete(f"worker:{name}", f"worker:{name}:unsent")
    site_client().zrem("suspects", name)
    prune()


@pytest.fixture
def model() -> Iterator[str]:
    name = new_id("model-")
    yield name
    broker_client().delete(queue_name(name))


def running(api_key: Key, worker: str) -> Generation:
    row = create_generation(api_key[0], status=Status.RUNNING, worker=worker)
    save_document(row.public_id, chat_document(row.public_id, "hi"), "web.one")
    return row


def waiting(api_key: Key, age_s: float, **fields: Any) -> Generation:
    created_at = timezone.now() - timedelta(seconds=age_s)
    row = create_generation(api_key[0], created_at=created_at, **fields)
    save_document(row.public_id, chat_document(row.public_id, "hi"), "web.one")
    return row


def suspect(worker: str, ago_s: float) -> None:
    """Have the lease be found missing so long ago, by the clock of Redis."""
    seconds, _ = site_client().time()
    site_client().zadd("suspects", {worker: seconds - ago_s + 2.5})


def state(row: Generation) -> tuple[str, str]:
    row.refresh_from_db()
    return row.status, row.error_code


def stream_end(row: Generation) -> Batch | None:
    """Return the last batch of the stream if it has ended."""
    entries: Any = client_for(row.public_id).xrevrange(log_key(row.public_id), count=1)
    last = Batch.unpack(entries[0][1][b"b"]) if entries else None
    return last if last is not None and last.ending is not None else None


def test_one_missing_lease_is_not_a_death(api_key: Key, worker: str) -> None:
    row = running(api_key, worker)
    end_runs_of_dead_workers()
    end_runs_of_dead_workers()  # At once: too soon to be sure.
    assert state(row) == (Status.RUNNING, "")
    assert stream_end(row) is None


@pytest.mark.parametrize(
    ("ago_s", "expected"),
    [(1.0, (Status.RUNNING, "")), (4.0, (Status.FAILED, "worker_lost"))],
)
def test_a_lease_missing_twice_and_far_enough_apart_is_a_death(
    api_key: Key, worker: str, ago_s: float, expected: tuple[str, str]
) -> None:
    row = running(api_key, worker)
    suspect(worker, ago_s)
    end_runs_of_dead_workers()
    assert state(row) == expected


@pytest.mark.parametrize(
    ("attempt", "status", "is_isolated"),
    [(1, Status.QUEUED, False), (2, Status.QUEUED, True), (3, Status.FAILED, False)],
)
def test_the_third_attempt_after_deaths_of_workers_is_isolated_and_the_last(
    api_key: Key, worker: str, model: str, attempt: int, status: Status, is_isolated: bool
) -> None:
    row = running(api_key, worker)
    Generation.objects.filter(id=row.id).update(background=True, attempt=attempt, model=model)
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    assert state(row)[0] == status
    assert (row.alone_since is not None) == is_isolated


def test_an_isolated_attempt_waits_by_the_clock_of_the_database(
    api_key: Key, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, now = running(api_key, worker), timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now + timedelta(hours=1))
    assert Generation.objects.requeue(row.public_id, worker, row.attempt, isolated=True)
    row.refresh_from_db()
    assert row.alone_since is not None
    assert row.alone_since < now + timedelta(minutes=5)


@pytest.mark.parametrize("kept_in", ["Redis", "the row"])
def test_what_was_to_be_stopped_when_its_worker_died_is_not_tried_again(
    api_key: Key, worker: str, model: str, kept_in: str
) -> None:
    row = running(api_key, worker)
    Generation.objects.filter(id=row.id).update(background=True, attempt=1, model=model)
    if kept_in == "Redis":
        request_cancel(row.public_id)
    else:
        cancel([row.public_id])
        drop_cancel_flag(row.public_id)
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    assert state(row)[0] == Status.CANCELLED
    assert count_wake_ups(model) == 0


@pytest.mark.parametrize("status", [Status.RUNNING, Status.QUEUED])
def test_what_goes_on_though_it_is_to_stop_is_asked_again(
    api_key: Key, worker: str, status: Status
) -> None:
    """Redis has lost the flag; one that waits was given back by a worker that had not seen it."""
    row = running(api_key, worker)
    Generation.objects.filter(id=row.id).update(background=True)
    cancel([row.public_id])
    drop_cancel_flag(row.public_id)
    repeat_cancels()
    assert not is_cancel_requested(row.public_id)  # It is not late.
    long_ago = timezone.now() - timedelta(minutes=1)
    Generation.objects.filter(id=row.id).update(cancel_requested_at=long_ago, status=status)
    repeat_cancels()
    assert is_cancel_requested(row.public_id) == (status == Status.RUNNING)
    assert state(row)[0] == (status if status == Status.RUNNING else Status.CANCELLED)


def test_a_stop_that_the_database_refuses_is_tried_again(
    api_key: Key, worker: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = running(api_key, worker)
    Generation.objects.filter(id=row.id).update(background=True, attempt=1, model=model)
    request_cancel(row.public_id)
    suspect(worker, ago_s=30)

    def refuse(*_: object) -> bool:
        raise OperationalError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(GenerationQuerySet, "cancel_running", refuse)
        with pytest.raises(ExceptionGroup):
            end_runs_of_dead_workers()
    assert state(row)[0] == Status.RUNNING
    end_runs_of_dead_workers()
    assert state(row)[0] == Status.CANCELLED


def test_what_a_dead_worker_has_generated_and_not_sent_is_counted(
    api_key: Key, worker: str
) -> None:
    row, other = running(api_key, worker), running(api_key, worker)
    Lease(worker, lambda: LiveWorker(worker), lambda: {row.public_id: 7}).renew()
    site_client().delete(f"worker:{worker}")
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    assert state(row) == state(other) == (Status.FAILED, "worker_lost")
    assert (row.output_tokens, other.output_tokens) == (7, 0)


def test_the_turns_that_a_dead_worker_has_saved_are_counted(
    api_key: Key, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer with tools has read and generated what its saved turns have, and more unsaved."""
    priced = ModelSpec("m", "scripted", price=Price(input=3, cached=1, output=10))
    monkeypatch.setitem(catalogue().models, "m", priced)
    row, further = running(api_key, worker), running(api_key, worker)
    usage = {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 20, "reasoning_tokens": 5}
    for each in (row, further):
        SavedTurns.objects.create(generation_id=each.public_id, state={}, usage=usage)
    Lease(worker, lambda: LiveWorker(worker), lambda: {further.public_id: 27}).renew()
    site_client().delete(f"worker:{worker}")
    suspect(worker, ago_s=30)
    metered = {sort: metered_tokens(sort) for sort in ("input", "cached", "output", "reasoning")}
    end_runs_of_dead_workers()
    counted = {sort: metered_tokens(sort) - before for sort, before in metered.items()}
    assert counted == {"input": 200, "cached": 80, "output": 47, "reasoning": 10}
    assert state(row) == state(further) == (Status.FAILED, "worker_lost")
    assert (row.input_tokens, row.cached_tokens, row.output_tokens) == (100, 40, 20)
    assert row.reasoning_tokens == 5
    assert (further.input_tokens, further.output_tokens) == (100, 27)
    assert row.cost * 1_000_000 == 60 * 3 + 40 * 1 + 20 * 10
    assert further.cost - row.cost == Decimal("0.00007")


def metered_tokens(sort: str) -> float:
    """The tokens of the model that this process has counted for Prometheus."""
    labels = {"model": "m", "sort": sort}
    return REGISTRY.get_sample_value("inference_tokens_total", labels) or 0.0


def test_what_is_cancelled_before_its_next_attempt_has_used_its_saved_turns(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of a batch, whose worker has died: nobody reads its stream."""
    monkeypatch.setitem(catalogue().models, "m", ModelSpec("m", "scripted", price=Price(output=10)))
    row = waiting(api_key, 1, attempt=1, background=True)
    known = {"generation_id": row.public_id}
    SavedTurns.objects.create(**known, state={"said": "x"}, usage={"output_tokens": 20})
    call = {"number": 0, "type": "mcp", "cost": Decimal(1), "result": {"output": "seen"}}
    ToolCall.objects.create(**known, **call)
    assert cancel([row.public_id]) == {row.public_id}
    assert state(row) == (Status.CANCELLED, "")
    assert (row.output_tokens, row.cost) == (20, Decimal("1.0002"))
    assert not SavedTurns.objects.exists()
    assert ToolCall.objects.get().result is None


def test_tokens_of_a_model_that_was_removed_cost_what_they_did(
    api_key: Key, worker: str, model: str
) -> None:
    """Its worker has died, and an operator has removed the model meanwhile."""
    catalogue().update([ModelSpec(model, "scripted", price=Price(output=10))])
    row = running(api_key, worker)
    Generation.objects.filter(pk=row.pk).update(model=model)
    catalogue().update([])
    Lease(worker, lambda: LiveWorker(worker), lambda: {row.public_id: 7}).renew()
    site_client().delete(f"worker:{worker}")
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    assert state(row) == (Status.FAILED, "worker_lost")
    assert (row.output_tokens, row.cost) == (7, Decimal("0.00007"))


def test_a_lease_that_comes_back_ends_the_suspicion(api_key: Key, worker: str) -> None:
    row = running(api_key, worker)
    suspect(worker, ago_s=30)
    Lease(worker, lambda: LiveWorker(worker)).renew()
    end_runs_of_dead_workers()
    site_client().delete(f"worker:{worker}")
    end_runs_of_dead_workers()  # Missing again: the first look of a new suspicion.
    assert state(row) == (Status.RUNNING, "")


def test_no_suspicion_outlives_what_the_worker_was_running(api_key: Key, worker: str) -> None:
    row = running(api_key, worker)
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    assert state(row)[0] == Status.FAILED
    assert site_client().zscore("suspects", worker) is not None
    end_runs_of_dead_workers()
    assert site_client().zscore("suspects", worker) is None


def test_the_dead_worker_takes_only_its_own_generations_along(api_key: Key, worker: str) -> None:
    mine, other = running(api_key, worker), running(api_key, new_id("host:"))
    queued = waiting(api_key, age_s=1, worker=worker)
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    assert [state(row)[0] for row in (mine, other, queued)] == ["failed", "running", "queued"]


@pytest.mark.django_db(transaction=True)
def test_a_row_that_a_frozen_process_has_locked_holds_no_other_up(
    api_key: Key, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_LOCK_TIMEOUT_MS", 50)
    again, locked, other = (running(api_key, worker) for _ in range(3))
    Generation.objects.filter(pk=again.pk).update(background=True)
    suspect(worker, ago_s=30)

    def give_up() -> bool:
        with postgresql.release_connection_after():
            return try_and_log("maintenance", end_runs_of_dead_workers)

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        held = Generation.objects.filter(pk__in=[again.pk, locked.pk])
        assert len(held.select_for_update()) == 2
        assert not pool.submit(give_up).result(timeout=30)
        assert state(other)[0] == "failed"
    assert [state(row)[0] for row in (again, locked)] == ["running", "running"]
    assert try_and_log("maintenance", end_runs_of_dead_workers)
    assert [state(row)[0] for row in (again, locked)] == ["queued", "failed"]


def test_the_stream_of_an_abandoned_generation_ends_with_an_error(
    api_key: Key, worker: str
) -> None:
    row = running(api_key, worker)
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    end = stream_end(row)
    assert end is not None
    assert end.ending is not None
    assert (end.ending.status, end.ending.error_code) == (503, "worker_lost")
    assert end.frames[-1] == b"data: [DONE]\n\n"
    assert load_document(row.public_id, Assembly).document is None


def test_the_worker_of_an_abandoned_generation_writes_nothing_any_more(
    api_key: Key, worker: str
) -> None:
    """Nor when its log has expired meanwhile."""
    row = running(api_key, worker)
    Generation.objects.filter(pk=row.pk).update(attempt=1)
    suspect(worker, ago_s=30)
    end_runs_of_dead_workers()
    client_for(row.public_id).delete(log_key(row.public_id))
    batch = Batch(7, [b"late"])
    write = Write(row.public_id, batch.entry_id, batch.pack(), attempt=1)

    async def append() -> list[Appended]:
        (client,) = new_async_clients()
        try:
            return await AsyncEventLog(client).append([write])
        finally:
            await client.aclose()

    [answer] = async_to_sync(append)()
    assert answer.state is LogState.CLOSED
    assert not client_for(row.public_id).exists(log_key(row.public_id))


def test_the_followers_of_an_abandoned_stream_get_a_hint(api_key: Key, worker: str) -> None:
    row = running(api_key, worker)

    async def scenario() -> dict[str, Any]:
        layer: Any = get_channel_layer()
        channel = await layer.new_channel("web.")
        document = chat_document(row.public_id, "hi")
        await sync_to_async(save_document)(row.public_id, document, channel)
        await sync_to_async(suspect)(worker, ago_s=30)
        await sync_to_async(end_runs_of_dead_workers)()
        message: dict[str, Any] = await asyncio.wait_for(layer.receive(channel), 10)
        return message

    assert async_to_sync(scenario)()["streams"] == [[row.public_id, b""]]


def test_who_has_waited_too_long_is_told_so(api_key: Key, settings: Settings) -> None:
    settings.QUEUE_TIMEOUT_S = 60
    old, young = waiting(api_key, age_s=61), waiting(api_key, age_s=59)
    expire_waiting()
    assert state(old) == (Status.FAILED, "queue_timeout")
    assert state(young) == (Status.QUEUED, "")
    end = stream_end(old)
    assert end is not None
    assert end.ending is not None
    assert (end.ending.status, end.ending.error_code) == (504, "queue_timeout")
    assert stream_end(young) is None


def test_of_very_many_that_are_late_the_oldest_expire_first(
    api_key: Key, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead workers, say, must not wait until all of them have ended."""
    settings.QUEUE_TIMEOUT_S = 60
    monkeypatch.setattr(maintenance, "_MAX_EXPIRED", 2)
    rows = [waiting(api_key, age_s=100 + n) for n in range(3)]
    expire_waiting()
    assert [state(row)[0] for row in rows] == [Status.QUEUED, Status.FAILED, Status.FAILED]
    expire_waiting()
    assert state(rows[0])[0] == Status.FAILED


def test_an_old_generation_that_runs_does_not_expire(api_key: Key, settings: Settings) -> None:
    settings.QUEUE_TIMEOUT_S = 60
    row = waiting(api_key, age_s=1000, status=Status.RUNNING, worker="w")
    expire_waiting()
    assert state(row) == (Status.RUNNING, "")


@pytest.mark.parametrize(
    ("ages_s", "sent", "expected"),
    [
        ([10, 9, 8], 0, 3),  # None was sent: one each.
        ([10, 9, 8], 2, 3),  # Only what is missing is sent.
        ([10, 9], 3, 3),  # More wake-ups than rows do no harm and are left alone.
        ([1, 0], 0, 0),  # The wake-up may still be on its way.
        ([10, 0], 0, 2),  # One that is overdue says that the others may be lost as well.
    ],
)
def test_a_wake_up_is_sent_for_each_that_waits_without_one(
    api_key: Key, model: str, ages_s: list[float], sent: int, expected: int
) -> None:
    for age_s in ages_s:
        waiting(api_key, age_s, model=model)
    for _ in range(sent):
        send_wake_up(model)
    resend_wake_ups()
    assert count_wake_ups(model) == expected


def test_one_round_does_all_of_it(
    api_key: Key, worker: str, model: str, settings: Settings
) -> None:
    settings.QUEUE_TIMEOUT_S = 60
    abandoned = running(api_key, worker)
    expired, overdue = waiting(api_key, age_s=100, model=model), waiting(api_key, 10, model=model)
    suspect(worker, ago_s=30)
    maintain()
    assert [state(row)[1] for row in (abandoned, expired, overdue)] == [
        "worker_lost",
        "queue_timeout",
        "",
    ]
    assert count_wake_ups(model) == 1


def test_one_generation_that_cannot_be_ended_keeps_no_other_from_it(
    api_key: Key, worker: str, model: str, settings: Settings
) -> None:
    """One of a kind that no app registers, as after a release was taken back."""
    settings.QUEUE_TIMEOUT_S = 60
    unknown, abandoned = running(api_key, worker), running(api_key, worker)
    Generation.objects.filter(pk=unknown.pk).update(kind="unknown")
    stuck = waiting(api_key, age_s=200, kind="unknown")
    expired, overdue = waiting(api_key, age_s=100), waiting(api_key, 10, model=model)
    suspect(worker, ago_s=30)
    site_client().delete("maintenance-done")
    with pytest.raises(ExceptionGroup) as raised:
        maintain()
    assert [state(row)[0] for row in (unknown, abandoned, stuck, expired, overdue)] == [
        *("running", "failed", "queued", "failed", "queued")
    ]
    assert count_wake_ups(model) == 1
    assert [part.__notes__ for part in raised.value.exceptions] == [
        ["end_runs_of_dead_workers"],
        ["expire_waiting"],
    ]
    assert last_maintained() is not None  # Most of it is done.


@pytest.mark.django_db
def test_maintenance_that_was_done_says_when() -> None:
    site_client().delete("maintenance-done")
    maintain()
    assert last_maintained() is not None


@pytest.mark.parametrize(
    ("fault", "level"),
    [
        (redis.exceptions.ConnectionError("down"), logging.WARNING),
        (ExceptionGroup("a", [ExceptionGroup("b", [OperationalError("down")])]), logging.WARNING),
        (KeyError("a fault"), logging.ERROR),
    ],
)
def test_what_goes_wrong_is_logged_and_more_than_a_server_that_is_down_is_an_error(
    fault: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise fault

    assert not try_and_log("maintenance", fail)
    assert [record.levelno for record in caplog.records] == [level]


def test_wake_ups_for_a_worker_that_nobody_reads_expire(worker: str, model: str) -> None:
    send_wake_up(model, worker)
    assert 0 < int(str(broker_client().ttl(own_queue(worker)))) <= 60
    assert not broker_client().keys(f"_kombu*{worker}*")
    broker_client().delete(own_queue(worker))


def test_a_live_worker_gives_up_what_it_claimed_and_does_not_run(api_key: Key, worker: str) -> None:
    old = timezone.now() - timedelta(seconds=60)
    held, lost = (
        create_generation(api_key[0], status=Status.RUNNING, worker=worker, claimed_at=old)
        for _ in range(2)
    )
    fresh = create_generation(
        api_key[0], status=Status.RUNNING, worker=worker, claimed_at=timezone.now()
    )
    end_orphans(worker, lambda: {(held.public_id, held.attempt)})
    states = dict(Generation.objects.values_list("public_id", "status"))
    assert states == {
        held.public_id: "running",
        lost.public_id: "failed",
        fresh.public_id: "running",
    }


def test_requests_of_what_has_ended_or_never_was_are_dropped(api_key: Key) -> None:
    """A process died, or Redis was away, when they should have been."""
    going_on, ended = create_generation(api_key[0]), create_generation(api_key[0])
    long_ago = timezone.now() - timedelta(hours=1)
    Generation.objects.filter(pk=ended.pk).update(status=Status.FAILED, finished_at=long_ago)
    never = new_id("chatcmpl-")
    ids = [going_on.public_id, ended.public_id, never]
    for id_ in ids:
        save_document(id_, chat_document(id_, "secret"), "web.one")
    drop_leftover_requests()
    assert all(load_document(id_, Assembly).document for id_ in ids)  # They are too young.
    site_client().zadd("held-open", dict.fromkeys(ids, 0), xx=True)
    drop_leftover_requests()
    is_kept = [load_document(id_, Assembly).document is not None for id_ in ids]
    assert is_kept == [True, False, False]
    left = [key for id_ in ids[1:] for key in site_client().keys(f"{{{id_}}}:*")]
    assert left == []
    drop_leftover_requests()
    assert load_document(going_on.public_id, Assembly).document is not None


def test_a_claim_is_as_old_as_the_database_says(api_key: Key, worker: str) -> None:
    """The clock of a worker's host may be ahead by more than a claim is given."""
    fresh = running(api_key, worker)
    Generation.objects.filter(pk=fresh.pk).update(claimed_at=Now())
    ahead = timezone.now() + timedelta(seconds=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timezone, "now", lambda: ahead)
        end_orphans(worker, set)
    assert state(fresh) == (Status.RUNNING, "")


def test_a_run_that_begins_while_orphans_are_looked_for_is_none(api_key: Key, worker: str) -> None:
    """What runs is asked after the rows."""
    old = timezone.now() - timedelta(seconds=60)
    row = create_generation(api_key[0], status=Status.RUNNING, worker=worker, claimed_at=old)
    lost = create_generation(api_key[0], status=Status.RUNNING, worker=worker, claimed_at=old)
    Generation.objects.filter(pk=lost.pk).update(attempt=2)
    end_orphans(worker, lambda: {(row.public_id, 0), (lost.public_id, 1)})
    assert state(row) == (Status.RUNNING, "")
    assert state(lost) == (Status.FAILED, "worker_lost")


def test_what_waits_for_a_model_that_was_removed_fails_when_no_worker_has_it_any_more(
    api_key: Key, worker: str, model: str
) -> None:
    catalogue().update([ModelSpec(model, "scripted")])
    rows = [waiting(api_key, 5, model=model), waiting(api_key, 5, model=model, background=True)]
    # The model may be there again when it was accepted.
    just_accepted = waiting(api_key, 1, model=model)
    expire_removed_models()
    report = ModelReport(model, 1, 0)
    lease = Lease(worker, lambda: LiveWorker(worker, (report,)))
    lease.renew()
    live_view.forget()
    catalogue().update([])
    expire_removed_models()
    assert [state(row)[0] for row in rows] == [Status.QUEUED] * 2
    lease.stop()
    live_view.forget()
    expire_removed_models()
    assert [state(row) for row in rows] == [(Status.FAILED, "model_not_found")] * 2
    assert state(just_accepted) == (Status.QUEUED, "")


def test_what_waits_for_a_model_that_the_site_does_not_have_any_more_fails(
    api_key: Key, worker: str, model: str, settings: Settings
) -> None:
    settings.QUEUE_TIMEOUT_S = 60
    late = {"background": True, "service_class": ServiceClass.BACKGROUND}
    known = next(iter(catalogue().models))
    old, young = (waiting(api_key, age, model=model, **late) for age in (61, 59))
    other = waiting(api_key, 1000, model=known, **late)
    served = waiting(api_key, 1000, model=f"{model}-served", **late)
    report = ModelReport(served.model, 1, 0)
    Lease(worker, lambda: LiveWorker(worker, (report,))).renew()
    live_view.forget()
    expire_removed_models()
    assert state(old) == (Status.FAILED, "model_not_found")
    assert [state(row)[0] for row in (young, other, served)] == [Status.QUEUED] * 3

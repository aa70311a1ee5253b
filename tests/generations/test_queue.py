"""Enqueueing: what is written where, and what happens when a part is down or full."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis
import redis.exceptions
from celery import Celery
from django.conf import settings as django_settings
from django.db import IntegrityError, OperationalError
from pytest_django.fixtures import Settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from completions.assemblers.chat import ChatAssembly
from inference_site.accounts.models import ApiKey
from inference_site.catalogue.fleet.leases import live_view
from inference_site.core.domain.errors import ProjectQueueFull
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.storage.redis import broker_client, client_for
from inference_site.runs import queue, wake_ups
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue import enqueue, new_id
from inference_site.runs.streams import request_documents
from inference_site.runs.streams.event_log import document_key, followers_key
from inference_site.runs.streams.request_documents import Assembly, Document, load_document
from inference_site.runs.wake_ups import count_wake_ups, queue_name, send_wake_up
from tests.generations.rows import chat_document, create_generation

Key = tuple[ApiKey, str]


@pytest.fixture
def model() -> Iterator[str]:
    """A model of the test's own, so that its wake-ups are counted alone."""
    name = new_id("model-")
    yield name
    broker_client().delete(queue_name(name))


def new_row(api_key: ApiKey, model: str) -> tuple[Generation, Document[ChatAssembly]]:
    row = Generation(
        kind="chat.completion",
        public_id=new_id("chatcmpl-"),
        model=model,
        project_id=api_key.project_id,
        api_key_id=api_key.pk,
        request_id="req_1",
        streamed=True,
        ignored_params=["logit_bias"],
    )
    return row, chat_document(row.public_id, "hi")


def celery_at(broker_url: str) -> Celery:
    """The Celery application with another broker."""
    celery = Celery("inference_site", broker=broker_url, set_as_current=False)
    celery.config_from_object("django.conf:settings", namespace="CELERY")
    return celery


def test_enqueueing_writes_the_document_the_row_and_a_wake_up(api_key: Key, model: str) -> None:
    new, document = new_row(api_key[0], model)
    enqueue(new, document, "web.one")
    row = Generation.objects.get(public_id=new.public_id)
    assert (row.status, row.model, row.request_id) == (Status.QUEUED, model, "req_1")
    assert (row.project_id, row.api_key_id) == (api_key[0].project_id, api_key[0].pk)
    assert (row.streamed, row.ignored_params) == (True, ["logit_bias"])
    assert row.service_class == ServiceClass.FOREGROUND
    assert load_document(new.public_id, ChatAssembly).document == document
    followers = client_for(new.public_id).smembers(followers_key(new.public_id))
    assert followers == {b"web.one"}
    assert count_wake_ups(model) == 1


def test_the_content_of_a_request_never_reaches_postgresql(api_key: Key, model: str) -> None:
    new, _ = new_row(api_key[0], model)
    enqueue(new, chat_document(new.public_id, "the secret word"), "web.one")
    row = Generation.objects.filter(public_id=new.public_id).values().get()
    assert "secret" not in repr(row)


@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["before", "after"])
def test_what_was_refused_while_a_store_hung_does_not_run(
    api_key: Key, model: str, answers: list[bool]
) -> None:
    new, document = new_row(api_key[0], model)
    is_committed = len(answers) > 1
    with pytest.raises(UnavailableError):
        enqueue(new, document, "web.one", is_wanted=lambda: answers.pop(0))
    rows = Generation.objects.filter(public_id=new.public_id)
    assert list(rows.values_list("status", flat=True)) == ["cancelled"] * is_committed
    assert count_wake_ups(model) == 0
    assert not client_for(new.public_id).exists(document_key(new.public_id))


def test_what_was_refused_and_is_claimed_already_is_stopped(api_key: Key, model: str) -> None:
    new, document = new_row(api_key[0], model)

    def is_wanted() -> bool:
        """No more, once the row is there; and a worker was faster."""
        return Generation.objects.claim(model, "worker") is None

    with pytest.raises(UnavailableError):
        enqueue(new, document, "web.one", is_wanted=is_wanted)
    assert Generation.objects.get(public_id=new.public_id).status == Status.RUNNING
    assert load_document(new.public_id, ChatAssembly).is_cancelled


@pytest.mark.parametrize("is_delivered", [False, True])
def test_what_was_committed_without_an_answer_does_not_run(
    api_key: Key, model: str, monkeypatch: pytest.MonkeyPatch, is_delivered: bool
) -> None:
    """PostgreSQL dies after it has committed: the client gets an error.

    The line of a batch runs: it has no client, and ended as cancelled.
    """
    insert = Generation.insert

    def lose_the_answer(row: Generation) -> None:
        insert(row)
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(Generation, "insert", lose_the_answer)
    new, document = new_row(api_key[0], model)
    with pytest.raises(OperationalError):
        enqueue(new, replace(document, is_delivered=is_delivered), "web.one")
    assert Generation.objects.get(public_id=new.public_id).status == Status.QUEUED
    # A worker may have claimed it already: that one learns of the cancel, others have nothing.
    loaded = load_document(new.public_id, ChatAssembly)
    assert (loaded.document, loaded.is_cancelled) == (None, not is_delivered)
    assert count_wake_ups(model) == 0


def test_documents_and_followers_do_not_stay_for_ever(api_key: Key, model: str) -> None:
    new, document = new_row(api_key[0], model)
    enqueue(new, document, "web.one")
    client, id_ = client_for(new.public_id), new.public_id
    for key in (document_key(id_), followers_key(id_)):
        assert 0 < int(client.ttl(key)) <= django_settings.RUN_TTL_S


def test_a_broker_that_is_down_is_no_error_once_the_row_is_committed(
    api_key: Key, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wake_ups, "app", celery_at("redis://127.0.0.1:1"))
    new, document = new_row(api_key[0], model)
    started = time.monotonic()
    enqueue(new, document, "web.one")
    assert time.monotonic() - started < 10  # The client waits for this.
    assert Generation.objects.get(public_id=new.public_id).status == Status.QUEUED
    assert count_wake_ups(model) == 0
    assert f"could not send a wake-up for {model}" in caplog.text


def test_nothing_is_accepted_while_the_redis_of_documents_is_down(
    api_key: Key, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))
    monkeypatch.setattr(request_documents, "client_for", lambda _: unreachable)
    new, document = new_row(api_key[0], model)
    with pytest.raises(redis.exceptions.ConnectionError):
        enqueue(new, document, "web.one")
    assert not Generation.objects.exists()
    assert count_wake_ups(model) == 0


def test_nothing_is_accepted_when_redis_fails_before_it_is_known_who_serves_the_model(
    api_key: Key, model: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: str) -> None:
        raise redis.exceptions.ConnectionError("down")

    settings.LOAD_WAIT_S = 30
    monkeypatch.setattr(live_view, "serving", fail)
    new, document = new_row(api_key[0], model)
    with pytest.raises(redis.exceptions.ConnectionError):
        enqueue(new, document, "web.one")
    assert not Generation.objects.exists()
    assert load_document(new.public_id, Assembly).document is None
    assert count_wake_ups(model) == 0


def test_no_wake_up_is_sent_for_a_row_that_was_refused(api_key: Key, model: str) -> None:
    new, document = new_row(api_key[0], model)
    create_generation(api_key[0], public_id=new.public_id)
    with pytest.raises(IntegrityError):
        enqueue(new, document, "web.one")
    assert count_wake_ups(model) == 0


def test_the_queue_is_full_at_its_bound_and_not_before(
    api_key: Key, model: str, settings: Settings
) -> None:
    settings.QUEUE_LIMIT = 6
    for _ in range(3):
        enqueue(*new_row(api_key[0], model), "web.one")
    for _ in range(2):  # The second is refused by what the first has found.
        refused, document = new_row(api_key[0], model)
        with pytest.raises(ProjectQueueFull):
            enqueue(refused, document, "web.one")
        assert not client_for(refused.public_id).exists(document_key(refused.public_id))
    assert Generation.objects.filter(model=model).count() == 3


def test_the_bound_counts_only_what_waits_for_the_same_model(
    api_key: Key, model: str, settings: Settings
) -> None:
    settings.QUEUE_LIMIT = 3
    create_generation(api_key[0], model=model)
    for _ in range(2):
        create_generation(api_key[0], model=model, status=Status.RUNNING)
        create_generation(api_key[0], model="another")
        send_wake_up(model)
    enqueue(*new_row(api_key[0], model), "web.one")
    with pytest.raises(ProjectQueueFull):
        enqueue(*new_row(api_key[0], model), "web.one")


@pytest.mark.parametrize("database", ["", "?db=1"], ids=["the same", "its own"])
def test_a_wake_up_that_nobody_has_read_tells_who_comes_that_others_wait(
    api_key: Key, model: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """Also where the broker is a server of its own."""
    settings.BROKER_URL = f"{settings.REDIS_URL}{database}"
    url = settings.CELERY_BROKER_URL + database.replace("db", "virtual_host")
    monkeypatch.setattr(wake_ups, "app", celery_at(url))
    monkeypatch.setattr(queue, "has_free_slot", lambda _: True)  # As of three seconds ago.
    assert enqueue(*new_row(api_key[0], model), "web.one").position == 0
    with redis.Redis.from_url(settings.BROKER_URL) as broker:
        assert broker.llen(queue_name(model)) == count_wake_ups(model) == 1
        assert enqueue(*new_row(api_key[0], model), "web.one").position == 2
        broker.delete(queue_name(model))


def test_a_wake_up_names_the_model_and_no_generation(model: str) -> None:
    send_wake_up(model)
    (message,) = broker_client().lrange(queue_name(model), 0, -1)
    assert b'"task": "worker.generate"' in message
    assert model.encode() in message


def test_ids_are_fresh_and_fit_their_column() -> None:
    ids = {new_id("chatcmpl-") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(id_.startswith("chatcmpl-") and len(id_) == 41 for id_ in ids)


def test_no_more_wake_ups_are_sent_than_anybody_needs(
    api_key: Key, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ENOUGH_WAKE_UPS", 3)
    for _ in range(5):
        enqueue(*new_row(api_key[0], model), "web.one")
    assert count_wake_ups(model) == 3

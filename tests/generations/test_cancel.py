"""Cancelling a generation: the same for all who may do it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client

from inference_site.accounts.models import ApiKey
from inference_site.core.storage.redis import client_for
from inference_site.runs.cancellation import cancel, set_reader_deadline, stop
from inference_site.runs.maintenance import cancel_without_readers
from inference_site.runs.models import Generation, GenerationQuerySet, Status
from inference_site.runs.streams.event_log import cancel_key, log_key, read_log
from inference_site.runs.streams.request_documents import (
    Assembly,
    Opening,
    load_document,
    save_document,
)
from responses_api.models import StoredResponse
from responses_api.views import responses
from tests.gateway.test_hub import on_site, when_unqueued
from tests.generations.rows import chat_document, create_generation
from tests.responses_api.chains import Chain, end_generation

pytestmark = pytest.mark.django_db(transaction=True)

Key = tuple[ApiKey, str]
Caller = Callable[[str, str, pytest.MonkeyPatch], None]


def by_web_process(generation_id: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unqueued = when_unqueued(monkeypatch)

    async def scenario(site: Any) -> None:
        await site.hub.cancel(generation_id)
        await unqueued(generation_id)  # The rows come after the flags, on a thread.

    on_site(monkeypatch, scenario)


def by_client(generation_id: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "call_again", lambda *_: None)  # Only the ASGI application can.
    bearer = {"authorization": f"Bearer {secret}"}
    answer = Client().post(f"/v1/responses/{generation_id}/cancel", headers=bearer)
    assert answer.status_code == 200


def by_operator(generation_id: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop(Generation.objects.get(public_id=generation_id))


def by_operator_at_the_queue(
    generation_id: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pk = Generation.objects.get(public_id=generation_id).pk
    assert _admin().post(f"/admin/queue/{pk}/", {"action": "stop"}).status_code == 302


def by_operator_at_the_response(
    generation_id: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pk = StoredResponse.objects.get(public_id=generation_id).pk
    answer = _admin().post(f"/admin/responses_api/storedresponse/{pk}/stop/")
    assert answer.status_code == 302


def by_maintenance(generation_id: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_reader_deadline(generation_id, -10)
    cancel_without_readers()


def _admin() -> Client:
    browser = Client()
    browser.force_login(get_user_model().objects.create_superuser("admin", ""))
    return browser


CALLERS: list[Caller] = [
    by_web_process,
    by_client,
    by_operator,
    by_operator_at_the_queue,
    by_operator_at_the_response,
    by_maintenance,
]
all_callers = pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)


@pytest.fixture
def stored(api_key: Key) -> StoredResponse:
    """A response in the background that waits for a worker."""
    response = Chain(api_key[0]).accept("hi", background=True)
    save_document(response.public_id, chat_document(response.public_id, "hi"), "web.one")
    return response


@pytest.fixture
def flags_at_move(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the cancel flag was set, at each guarded update of rows."""
    seen: list[bool] = []
    move = GenerationQuerySet.cancel_queued

    def noted(rows: GenerationQuerySet, ids: Collection[str]) -> list[str]:
        seen.extend(is_flagged(id_) for id_ in ids)
        return move(rows, ids)

    monkeypatch.setattr(GenerationQuerySet, "cancel_queued", noted)
    return seen


def is_flagged(generation_id: str) -> bool:
    return bool(client_for(generation_id).exists(cancel_key(generation_id)))


def keys_of(generation_id: str) -> set[str]:
    found: Any = client_for(generation_id).keys(f"*{generation_id}*")
    return {key.decode() for key in found}


def status_of(generation_id: str) -> str:
    return Generation.objects.get(public_id=generation_id).status


@all_callers
def test_one_that_waits_ends_at_once_and_its_flag_is_set_first(
    api_key: Key,
    stored: StoredResponse,
    flags_at_move: list[bool],
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller(stored.public_id, api_key[1], monkeypatch)
    assert flags_at_move == [True]
    assert status_of(stored.public_id) == Status.CANCELLED
    stored.refresh_from_db()
    assert stored.status == "cancelled"
    assert keys_of(stored.public_id) <= {log_key(stored.public_id)}
    log = read_log(stored.public_id)
    assert not log or (log[-1].ending is not None and not log[-1].ending.error_code)


def test_a_cancel_ends_while_the_event_loop_stands_still(stored: StoredResponse) -> None:
    """As at the end of a web process, whose loop does nothing any more."""
    has_begun, has_ended = threading.Event(), threading.Event()

    def act() -> None:
        has_begun.set()
        cancel([stored.public_id])
        connection.close()
        has_ended.set()

    async def scenario() -> bool:
        acting = asyncio.ensure_future(sync_to_async(act, thread_sensitive=False)())
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        is_in_time = has_ended.wait(60)  # Nothing else runs on this loop meanwhile.
        await acting
        return is_in_time

    assert asyncio.run(scenario())
    assert status_of(stored.public_id) == Status.CANCELLED


@all_callers
def test_the_worker_of_one_that_runs_is_asked(
    api_key: Key, stored: StoredResponse, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    Generation.objects.claim("m", "w")
    caller(stored.public_id, api_key[1], monkeypatch)
    assert status_of(stored.public_id) == Status.RUNNING
    found = load_document(stored.public_id, Assembly)
    assert found.is_cancelled
    assert found.document is not None


@all_callers
def test_one_that_has_ended_stays_as_it_is_and_no_flag_is_left(
    api_key: Key, stored: StoredResponse, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_generation(stored, Status.COMPLETED)
    StoredResponse.objects.update(status="completed")
    caller(stored.public_id, api_key[1], monkeypatch)
    assert status_of(stored.public_id) == Status.COMPLETED
    assert not is_flagged(stored.public_id)


@pytest.mark.parametrize("caller", [by_web_process, by_maintenance])
def test_nothing_is_left_of_a_completion_that_nobody_reads(
    api_key: Key, flags_at_move: list[bool], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = create_generation(api_key[0])
    save_document(
        row.public_id, chat_document(row.public_id, "secret"), "web.one", Opening([b"frame"])
    )
    caller(row.public_id, api_key[1], monkeypatch)
    assert flags_at_move == [True]
    assert status_of(row.public_id) == Status.CANCELLED
    assert keys_of(row.public_id) == set()


def test_who_waits_for_a_completion_is_told_that_an_operator_stopped_it(api_key: Key) -> None:
    row = create_generation(api_key[0])
    save_document(row.public_id, chat_document(row.public_id, "hi"), "web.one")
    assert stop(row)
    ending = read_log(row.public_id)[-1].ending
    assert ending is not None
    assert b"stopped by an operator" in ending.body
    assert keys_of(row.public_id) == {log_key(row.public_id)}


def test_one_that_is_claimed_between_flag_and_row_is_stopped_by_its_worker(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = create_generation(api_key[0])
    save_document(row.public_id, chat_document(row.public_id, "hi"), None)
    move = GenerationQuerySet.cancel_queued

    def claimed_first(rows: GenerationQuerySet, ids: Collection[str]) -> list[str]:
        assert Generation.objects.claim("m", "w") is not None
        assert load_document(row.public_id, Assembly).is_cancelled
        return move(rows, ids)

    monkeypatch.setattr(GenerationQuerySet, "cancel_queued", claimed_first)
    assert stop(row)
    assert status_of(row.public_id) == Status.RUNNING
    assert load_document(row.public_id, Assembly).is_cancelled

"""Until when a generation waits for its client, with a real Redis and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from inference_site.accounts.models import ApiKey
from inference_site.core.storage.redis import new_async_clients, site_client
from inference_site.runs.cancellation import (
    reader_deadlines,
    refresh_reader_deadlines,
    set_reader_deadline,
)
from inference_site.runs.maintenance import cancel_without_readers
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Assembly, load_document, save_document
from tests.generations.rows import chat_document, create_generation

Key = tuple[ApiKey, str]


@pytest.fixture
def generation_id() -> Iterator[str]:
    name = new_id("resp_")
    yield name
    reader_deadlines.forget([name])


def tell(read: Mapping[str, int], left: Mapping[str, int], begun: Collection[str] = ()) -> None:
    async def main() -> None:
        client = new_async_clients()[0]
        try:
            await refresh_reader_deadlines(client, read, left, begun)
        finally:
            await client.aclose()

    asyncio.run(main())


def seconds_left(generation_id: str) -> float:
    client: Any = site_client()
    now_s, now_us = client.time()
    left: float = client.zscore("disconnect-grace", generation_id) - now_s - now_us / 1e6
    return left


def test_one_that_is_read_is_pushed_on(generation_id: str) -> None:
    set_reader_deadline(generation_id, -10)  # Its time has passed by now.
    assert generation_id in reader_deadlines.passed()
    tell({generation_id: 3}, {})
    assert generation_id not in reader_deadlines.passed()
    assert 4 < seconds_left(generation_id) <= 8


def test_one_that_is_read_for_its_request_has_its_grace_though_redis_was_emptied(
    generation_id: str,
) -> None:
    """It ran to its end after its client had left."""
    tell({generation_id: 3}, {}, {generation_id})
    assert 4 < seconds_left(generation_id) <= 8
    tell({}, {generation_id: 3})
    assert 1 < seconds_left(generation_id) <= 3


def test_one_that_is_left_has_its_grace(generation_id: str) -> None:
    set_reader_deadline(generation_id, 3)
    tell({}, {generation_id: 3})
    assert 1 < seconds_left(generation_id) <= 3


def test_reader_of_one_without_a_grace_gives_it_none(generation_id: str) -> None:
    """Its client is there, and has said nothing; it must not be stopped when the reader leaves."""
    tell({generation_id: 3}, {})
    tell({}, {generation_id: -1})
    assert generation_id not in reader_deadlines.passed()


@pytest.mark.django_db
def test_maintenance_stops_what_nobody_reads(api_key: Key) -> None:
    waiting = create_generation(api_key[0])
    running = create_generation(api_key[0], status=Status.RUNNING, worker="w")
    read = create_generation(api_key[0], status=Status.RUNNING, worker="w")
    for row in (waiting, running, read):
        save_document(row.public_id, chat_document(row.public_id, "secret"), None)
        set_reader_deadline(row.public_id, 60 if row == read else -10)
    ended = new_id("resp_")
    set_reader_deadline(ended, -10)
    cancel_without_readers()
    assert not {waiting.public_id, running.public_id, ended} & set(reader_deadlines.passed())
    assert load_document(waiting.public_id, Assembly).document is None
    assert load_document(running.public_id, Assembly).is_cancelled
    assert not load_document(read.public_id, Assembly).is_cancelled
    assert not load_document(ended, Assembly).is_cancelled
    states = dict(Generation.objects.values_list("public_id", "status"))
    assert states[waiting.public_id] == "cancelled"
    reader_deadlines.forget([read.public_id])

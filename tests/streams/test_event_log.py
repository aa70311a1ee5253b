"""The event log on a real Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from django.conf import settings as site_settings
from hypothesis import given
from hypothesis import strategies as st
from pytest_django.fixtures import Settings

from completions.assemblers.chat import ChatAssembly
from inference_site.core.domain.errors import ProjectQuotaReached, RequestTooLarge
from inference_site.core.storage.redis import client_for, new_async_clients
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import (
    Batch,
    Ending,
    Sent,
    decode_hint,
    is_whole,
    sent_so_far,
    trim,
)
from inference_site.runs.streams.event_log import (
    Appended,
    AsyncEventLog,
    LogPosition,
    LogState,
    Write,
    cancel_key,
    close_log,
    document_key,
    follow,
    followers_key,
    log_key,
    log_position,
    may_have_more,
    read_log,
    take_log,
)
from inference_site.runs.streams.redis_memory import mark_alive, release_expired
from inference_site.runs.streams.request_documents import (
    Assembly,
    Loaded,
    Opening,
    drop_document,
    load_document,
    save_document,
)
from tests.generations.rows import chat_document

T = TypeVar("T")
END = Ending((b"end",), 200, b"{}", finish_reason="stop")
LOST = Ending((b"error", b"done"), 503, b'{"error":{}}', error_code="worker_lost")


@pytest.fixture
def generation_id() -> str:
    return new_id("chatcmpl-")


def on_log(use: Callable[[AsyncEventLog], Awaitable[T]]) -> T:
    """Use the log in a loop of its own."""

    async def main() -> T:
        (client,) = new_async_clients()
        try:
            return await use(AsyncEventLog(client))
        finally:
            await client.aclose()

    return asyncio.run(main())


def append(generation_id: str, *batches: Batch, attempt: int = 1) -> list[Appended]:
    """Write the batches, one after the other."""

    async def write(log: AsyncEventLog) -> list[Appended]:
        return [
            (await log.append([Write(generation_id, b.entry_id, b.pack(), attempt)]))[0]
            for b in batches
        ]

    return on_log(write)


def read(generation_id: str, number: int = 0) -> list[Batch]:
    """Return what a reader gets that wants the frames from this number on."""
    (batches,) = on_log(lambda log: log.read_many([(generation_id, number)]))
    return trim(batches, number)


def frames(batches: list[Batch]) -> list[bytes]:
    return [frame for batch in batches for frame in batch.frames]


def test_a_reader_finds_any_frame_by_its_number(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0", b"1", b"2"]), Batch(3, [b"3"]), Batch(4, [b"4", b"5"]))
    for number in range(7):
        assert frames(read(generation_id, number)) == [b"%d" % n for n in range(number, 6)]


def test_a_log_is_looked_at_without_reading_it(generation_id: str) -> None:
    assert log_position(generation_id, 0) == LogPosition(is_empty=True, has_ended=False)
    append(generation_id, Batch(0, [b"0"] * 3), Batch(3, [b"3"]))
    assert log_position(generation_id, 2) == LogPosition(False, False, 0, 3)
    assert log_position(generation_id, 4) == LogPosition(False, False)
    append(generation_id, Batch(4, [b"4"] * 300, END))
    assert log_position(generation_id, 3) == LogPosition(False, True, 3, 4)
    assert (
        log_position(generation_id, 4)
        == log_position(generation_id, 9_999)
        == LogPosition(False, True, 4, 304)
    )


def test_of_a_long_log_a_part_is_read(generation_id: str) -> None:
    append(generation_id, *(Batch(n, [b"x" * 100_000]) for n in range(4)))
    append(generation_id, *(Batch(n, [b"x"]) for n in range(4, 70)), Batch(70, [b"x"], END))
    batches, sizes = read(generation_id), list[int]()
    while may_have_more(batches):
        sizes.append(len(batches))
        batches = read(generation_id, batches[-1].next)
    sizes.append(len(batches))
    assert sizes == [3, 64, 4]
    assert batches[-1].ending == replace(END, frames=())


def test_the_ending_comes_back_with_everything_but_its_frames_apart(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0"]), Batch(1, [b"1", b"end"], END))
    last = read(generation_id, 2)[-1]
    assert (last.first, list(last.frames)) == (2, [b"end"])
    assert last.ending == Ending((), 200, b"{}", finish_reason="stop")


def test_a_reader_that_has_every_frame_still_gets_the_ending(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0", b"end"], END))
    (last,) = read(generation_id, 2)
    assert (list(last.frames), last.ending is not None) == ([], True)


def test_an_append_repeated_after_a_lost_reply_is_not_written_twice(generation_id: str) -> None:
    first, second = Batch(0, [b"0"]), Batch(1, [b"1"])
    answers = append(generation_id, first, first, second, second)
    assert [answer.state for answer in answers] == [LogState.OPEN] * 4
    assert frames(read(generation_id)) == [b"0", b"1"]


def test_an_end_repeated_after_a_lost_reply_does_not_look_like_a_loss(generation_id: str) -> None:
    end = Batch(0, [b"0", b"end"], END)
    assert [answer.state for answer in append(generation_id, end, end)] == [LogState.OPEN] * 2
    assert frames(read(generation_id)) == [b"0", b"end"]


def test_a_closed_log_refuses_a_writer_that_was_taken_for_dead(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0"]))
    close_log(generation_id, LOST)
    (answer,) = append(generation_id, Batch(1, [b"zombie"]))
    assert answer.state is LogState.CLOSED
    assert frames(read(generation_id)) == [b"0", b"error", b"done"]


def test_an_attempt_that_was_replaced_writes_and_ends_nothing_any_more(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0"]))
    assert take_log(generation_id, 2) == Sent((b"0",), 1)
    late = append(generation_id, Batch(1, [b"late"]), Batch(1, [b"late", b"end"], END))
    assert [answer.state for answer in late] == [LogState.CLOSED] * 2
    (answer,) = append(generation_id, Batch(1, [b"1"]), attempt=2)
    assert answer.state is LogState.OPEN
    assert frames(read(generation_id)) == [b"0", b"1"]


def test_an_attempt_that_was_replaced_is_told_when_it_asks(generation_id: str) -> None:
    take_log(generation_id, 3)
    load_document(generation_id, ChatAssembly, 2)  # It came late, and changes nothing.
    asked = [Write(generation_id, b"", b"", attempt) for attempt in (1, 2, 3)]
    answers = on_log(lambda log: log.append(asked))
    assert [answer.state for answer in answers] == [
        *(LogState.CLOSED, LogState.CLOSED, LogState.OPEN)
    ]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_a_log_that_lost_an_entry_counts_as_lost_but_keeps_its_numbers(
    sizes: list[int], data: st.DataObject
) -> None:
    batches: list[Batch] = []
    for size in sizes:
        first = batches[-1].next if batches else 0
        batches.append(Batch(first, [b"%d" % n for n in range(first, first + size)]))
    left = [batch for batch in batches if data.draw(st.booleans())]
    assert is_whole(left) == (left == batches[: len(left)])
    sent = sent_so_far(left)
    assert sent.next == (left[-1].next if left else 0)
    assert list(sent.frames) == ([b"%d" % n for n in range(sent.next)] if is_whole(left) else [])


def test_a_log_with_a_hole_is_closed_after_its_last_frame(generation_id: str) -> None:
    append(generation_id, *(Batch(n, [b"%d" % n]) for n in range(5)))
    client_for(generation_id).xdel(log_key(generation_id), "2-0", "3-0")
    sent = sent_so_far(read_log(generation_id))
    assert (sent.frames, sent.next) == ((), 5)
    assert close_log(generation_id, LOST, sent.next) is not None
    assert frames(read(generation_id, 5)) == [b"error", b"done"]


def test_a_closed_log_keeps_its_end_against_the_writers_own(generation_id: str) -> None:
    close_log(generation_id, LOST)
    append(generation_id, Batch(0, [b"0", b"end"], END))
    (last,) = read(generation_id)
    assert last.ending is not None
    assert last.ending.error_code == "worker_lost"


def test_closing_continues_the_numbers_of_the_frames(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0", b"1"]))
    close_log(generation_id, LOST)
    assert read(generation_id, 2) == [
        Batch(2, [b"error", b"done"], Ending((), 503, LOST.body, error_code="worker_lost"))
    ]


def test_closing_an_ended_log_changes_nothing(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"0", b"end"], END))
    before = read(generation_id)
    close_log(generation_id, LOST)
    assert read(generation_id) == before


def test_closing_returns_who_must_be_told(generation_id: str) -> None:
    save_document(generation_id, chat_document(generation_id, "hi"), follower="web.one")
    assert close_log(generation_id, LOST) == ["web.one"]


def test_a_cancel_request_is_seen_by_an_append_and_by_asking(generation_id: str) -> None:
    async def scenario(log: AsyncEventLog) -> list[LogState]:
        states = [(await log.append([Write(generation_id, b"", b"")]))[0].state]
        await log.request_cancel([generation_id])
        states.append((await log.append([Write(generation_id, b"", b"")]))[0].state)
        batch = Batch(0, [b"0"])
        states.append(
            (await log.append([Write(generation_id, batch.entry_id, batch.pack())]))[0].state
        )
        return states

    assert on_log(scenario) == [LogState.OPEN, LogState.CANCELLED, LogState.CANCELLED]
    assert frames(read(generation_id)) == [b"0"]  # What is cancelled is written all the same.


def test_asking_writes_nothing(generation_id: str) -> None:
    on_log(lambda log: log.append([Write(generation_id, b"", b"")]))
    assert not client_for(generation_id).exists(log_key(generation_id))


def test_an_append_returns_every_follower(generation_id: str) -> None:
    save_document(generation_id, chat_document(generation_id, "hi"), follower="web.one")
    follow(generation_id, "web.two")
    (answer,) = append(generation_id, Batch(0, [b"0"]))
    assert sorted(answer.followers) == ["web.one", "web.two"]


def test_one_append_answers_for_each_stream_in_order() -> None:
    one, two, three = (new_id("chatcmpl-") for _ in range(3))
    batch = Batch(0, [b"0"])

    async def scenario(log: AsyncEventLog) -> list[Appended]:
        follow(one, "web.one")
        await log.request_cancel([two])
        return await log.append(
            [
                Write(one, batch.entry_id, batch.pack()),
                Write(two, b"", b""),
                Write(three, batch.entry_id, batch.pack()),
            ]
        )

    assert on_log(scenario) == [
        Appended(LogState.OPEN, ["web.one"]),
        Appended(LogState.CANCELLED, []),
        Appended(LogState.OPEN, []),
    ]
    assert [frames(read(id_)) for id_ in (one, two, three)] == [[b"0"], [], [b"0"]]


def test_the_end_removes_the_content_of_the_request(generation_id: str) -> None:
    save_document(generation_id, chat_document(generation_id, "secret"), follower="web.one")
    on_log(lambda log: log.request_cancel([generation_id]))
    append(generation_id, Batch(0, [b"end"], END))
    keys = (cancel_key(generation_id), followers_key(generation_id), document_key(generation_id))
    assert client_for(generation_id).exists(*keys) == 0
    assert load_document(generation_id, Assembly).document is None


def test_a_running_log_outlives_a_finished_one(generation_id: str) -> None:
    client, key = client_for(generation_id), log_key(generation_id)
    append(generation_id, Batch(0, [b"0"]))
    assert site_settings.EVENT_LOG_TTL_S < int(client.ttl(key)) <= site_settings.RUN_TTL_S
    append(generation_id, Batch(1, [b"end"], END))
    assert 0 < int(client.ttl(key)) <= site_settings.EVENT_LOG_LINGER_S


def test_who_follows_what_has_ended_leaves_nothing(generation_id: str) -> None:
    append(generation_id, Batch(0, [b"end"], END))
    follow(generation_id, "web.late")
    on_log(lambda log: log.follow(generation_id, "web.late"))
    assert not client_for(generation_id).exists(followers_key(generation_id))


def test_who_follows_what_nobody_knows_leaves_nothing_for_long(generation_id: str) -> None:
    follow(generation_id, "web.one")
    assert 0 < int(client_for(generation_id).ttl(followers_key(generation_id))) <= 60


def test_long_texts_are_stored_once_and_come_back(generation_id: str) -> None:
    texts = (b"long" * 5000, b"longer" * 2000)
    one, two = texts
    document = chat_document(generation_id, one.decode())
    first = [b"a" + one + b"b" + two, b"c" + two + one + one]
    save_document(generation_id, document, "web.one", Opening(first, texts))
    body = b"[" + two + b"]"
    end = Batch(3, [b"d" + two, b"end"], Ending((), 200, body))
    found = load_document(generation_id, ChatAssembly)
    assert (found.document, list(found.sent.frames), found.texts) == (document, first, texts)

    async def write(log: AsyncEventLog) -> None:
        plain = Batch(2, [b"plain"])
        await log.append([Write(generation_id, plain.entry_id, plain.pack(texts))])
        await log.append([Write(generation_id, end.entry_id, end.pack(texts))])

    on_log(write)
    assert frames(read_log(generation_id)) == [*first, b"plain", *end.frames]
    for number in range(6):  # A reader that comes late has not read the entry with the texts.
        batches = read(generation_id, number)
        assert frames(batches) == [*first, b"plain", *end.frames][number:]
        assert batches[-1].ending == Ending((), 200, body)
    assert decode_hint(end.pack(texts)) is None
    size = client_for(generation_id).memory_usage(log_key(generation_id), samples=0)
    assert size is not None
    assert size < 1.3 * (len(one) + len(two))


def test_frames_whose_texts_are_lost_are_never_the_next(generation_id: str) -> None:
    texts = (b"long" * 5000,)
    batch = Batch(2, [b"a" + texts[0]])
    on_log(lambda log: log.append([Write(generation_id, batch.entry_id, batch.pack(texts))]))
    ((found,),) = on_log(lambda log: log.read_many([(generation_id, 2)]))
    assert found.first > 2
    assert read_log(generation_id) == []


def test_a_project_gets_back_what_it_held(settings: Settings, generation_id: str) -> None:
    client = client_for(generation_id)
    project_id = secrets.randbelow(10**9)
    document = chat_document(generation_id, "x" * 10_000)
    settings.PROJECT_REDIS_BYTES = 40_000
    others = [new_id("chatcmpl-") for _ in range(3)]
    for id_ in others:
        save_document(id_, document, None, project_id=project_id)
    with pytest.raises(ProjectQuotaReached):
        save_document(generation_id, document, None, project_id=project_id)
    assert load_document(generation_id, Assembly).document is None
    save_document(generation_id, document, None, project_id=project_id + 1)  # Another's share.
    drop_document(others[0])
    close_log(others[1], LOST)
    append(others[2], Batch(0, [b"end"], END))
    held = int(client.hget("held-by-project", str(project_id)) or 0)
    assert 0 < held < 12_000  # Two logs: Redis reserves 4 KiB for each.
    for id_ in others:
        client.zadd("held-ended", {id_: 0}, xx=True)  # They have expired.
    release_expired(client)
    assert client.hget("held-by-project", str(project_id)) is None
    assert client.hmget("held", *others) == [None] * 3
    settings.PROJECT_REDIS_BYTES = 5_000
    with pytest.raises(RequestTooLarge):
        save_document(others[0], document, None, project_id=project_id)


def test_a_full_redis_is_told_what_has_expired_and_what_is_alive(generation_id: str) -> None:
    client, other = client_for(generation_id), new_id("chatcmpl-")
    project_id = secrets.randbelow(10**9)
    for id_ in (generation_id, other):
        save_document(id_, chat_document(id_, "x"), None, project_id=project_id)
    close_log(generation_id, LOST)
    client.zadd("held-ended", {generation_id: 0}, xx=True)  # It has expired.
    client.zadd("held-open", {other: 0}, xx=True)
    client.config_set("maxmemory", 1)
    try:
        release_expired(client)
        mark_alive(client, [other])
    finally:
        client.config_set("maxmemory", 0)
    assert client.hget("held", generation_id) is None
    assert client.zscore("held-open", other) != 0
    drop_document(other)


def test_a_document_comes_back_as_it_was_saved(generation_id: str) -> None:
    document = chat_document(generation_id, "Zażółć gęślą jaźń 🦊")
    save_document(generation_id, document, follower="web.one")
    assert load_document(generation_id, ChatAssembly) == Loaded(document, False, Sent())
    on_log(lambda log: log.request_cancel([generation_id]))
    assert load_document(generation_id, ChatAssembly) == Loaded(document, True, Sent())


@given(st.lists(st.lists(st.binary(max_size=3), min_size=1, max_size=4), max_size=6), st.data())
def test_trimming_is_cutting_the_first_frames(
    entries: list[list[bytes]], data: st.DataObject
) -> None:
    batches, number = [], 0
    for entry in entries:
        batches.append(Batch(number, entry))
        number += len(entry)
    cut = data.draw(st.integers(0, number + 1))
    kept = trim(batches, cut)
    assert frames(kept) == frames(batches)[cut:]
    assert [batch.first for batch in kept] == [
        max(batch.first, cut) for batch in batches if batch.next > cut
    ]


@given(st.integers(0, 2**40), st.lists(st.binary(max_size=20), max_size=5))
def test_a_batch_survives_packing(first: int, content: list[bytes]) -> None:
    failed = Ending((), 503, b"{}", error_code="lost", is_early=True, retry_after_s=5)
    for ending in (None, failed, Ending((), 200, b"", "stop")):
        assert Batch.unpack(Batch(first, content, ending).pack()) == Batch(first, content, ending)

"""The hub with a real Redis and a real channel layer: hints, and the log behind them."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.exceptions
from asgiref.sync import sync_to_async
from django.db import transaction
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.core.domain.deltas import TextDelta
from inference_site.core.domain.errors import WorkerLost
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.redis import client_for, new_async_clients, shard_of
from inference_site.gateway import hub as hub_module
from inference_site.gateway.follower import Follower
from inference_site.gateway.hub import Hub
from inference_site.runs import cancellation
from inference_site.runs.kinds import failure
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Batch, Ending, Sent
from inference_site.runs.streams.event_log import AsyncEventLog, Write, close_log, send_hint
from inference_site.runs.streams.request_documents import (
    Assembly,
    Loaded,
    load_document,
    save_document,
)
from responses_api.deletion import delete
from responses_api.events import DONE, decode
from responses_api.models import StoredResponse
from tests.generations.rows import chat_document, create_generation
from tests.ports import free_port
from tests.responses_api.chains import STOP, Chain
from tests.responses_api.validation import check

Key = tuple[ApiKey, str]
END = Ending((), 200, b"{}", finish_reason="stop")


def long_ago() -> dt.datetime:
    """When a generation has ended whose worker has had all the time to end its stream."""
    return timezone.now() - dt.timedelta(hours=1)


class Site:
    """A running hub, and the worker's side of the streams it follows."""

    def __init__(self, hub: Hub, log: AsyncEventLog) -> None:
        self.hub, self._log = hub, log

    async def write(self, generation_id: str, *batches: Batch) -> None:
        """Put batches into the log."""
        await self._log.append([Write(generation_id, b.entry_id, b.pack()) for b in batches])

    async def hint(self, *streams: tuple[str, bytes]) -> None:
        """Send a message to the hub's channel."""
        await send_hint(self.hub.channel, streams)

    async def resume_and_delete(self, response: StoredResponse, *, has_ended: bool) -> Follower:
        """Add a reader of a stored response; then delete the response."""
        follower = await sync_to_async(self.hub.resume)(
            response.public_id, "response", has_ended=has_ended, is_stored=True
        )
        assert follower is not None
        await sync_to_async(release_connection_after()(delete))(response)
        return follower

    async def next(self, follower: Follower) -> list[Batch]:
        """Return what comes to the follower next."""
        async with asyncio.timeout(60):
            while not (batches := follower.take()):
                await follower.wait(0.05)
        return batches


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    clients = new_async_clients()
    monkeypatch.setattr(hub_module, "new_async_clients", lambda: clients)
    hub = Hub()
    hub.ensure_running()
    site = Site(hub, AsyncEventLog(clients[0]))
    try:
        probe = hub.follow("probe")  # The subscription is there once a message comes through.
        while not probe.take():
            await site.hint(("probe", Batch(0, [b"0"]).pack()))
            await probe.wait(0.02)
        hub.leave(probe)
        yield site
    finally:
        # redis-py takes a cancel that comes with an answer for a time-out; then it takes another.
        # Tasks of the hub's tasks too: one that reads would open a connection again.
        while pending := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.2)
        for client in clients:
            await client.aclose()


def when_unqueued(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Awaitable[None]]:
    """Return what waits until the hub has looked for a cancelled generation in the queue."""
    looked_for, act = set[str](), cancellation.cancel_waiting

    def cancel_queued(ids: set[str]) -> None:
        act(ids)
        looked_for.update(ids)

    async def unqueued(generation_id: str) -> None:
        async with asyncio.timeout(60):
            while generation_id not in looked_for:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(cancellation, "cancel_waiting", cancel_queued)
    return unqueued


def on_site(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(monkeypatch) as site:
            await scenario(site)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub read the log only when it is told to."""
    monkeypatch.setattr(hub_module, "_SILENCE_S", 60.0)


@pytest.fixture
def soon(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub lose patience within a moment."""
    monkeypatch.setattr(hub_module, "_SILENCE_S", 0.04)
    monkeypatch.setattr(hub_module, "_VANISHED_S", 0.15)


@pytest.fixture
def generation_id() -> str:
    return new_id("chatcmpl-")


def frames(batches: list[Batch]) -> list[bytes]:
    return [frame for batch in batches for frame in batch.frames]


def test_a_hint_brings_its_frames_to_every_follower_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, generation_id: str
) -> None:
    async def scenario(site: Site) -> None:
        one, two, other = (site.hub.follow(id_) for id_ in (generation_id, generation_id, "x"))
        await site.hint((generation_id, Batch(0, [b"0", b"1"]).pack()))
        assert frames(await site.next(one)) == [b"0", b"1"]
        assert frames(two.take()) == [b"0", b"1"]
        assert other.take() == []

    on_site(monkeypatch, scenario)


def test_one_message_carries_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        ids = [new_id("chatcmpl-") for _ in range(3)]
        followers = [site.hub.follow(id_) for id_ in ids]
        await site.hint(*((id_, Batch(0, [id_.encode()]).pack()) for id_ in [*ids, "nobody's"]))
        assert [frames(await site.next(f)) for f in followers] == [[id_.encode()] for id_ in ids]

    on_site(monkeypatch, scenario)


def test_a_gap_is_filled_from_the_log(monkeypatch: pytest.MonkeyPatch, generation_id: str) -> None:
    async def scenario(site: Site) -> None:
        follower = site.hub.follow(generation_id)
        third = Batch(2, [b"2"])
        await site.write(generation_id, Batch(0, [b"0"]), Batch(1, [b"1"]), third)
        await site.hint((generation_id, third.pack()))
        assert frames(await site.next(follower)) == [b"0", b"1", b"2"]
        await site.hint((generation_id, Batch(3, [b"3"]).pack()))
        assert frames(await site.next(follower)) == [b"3"]

    on_site(monkeypatch, scenario)


def test_a_hint_without_payload_sends_the_follower_to_the_log(
    monkeypatch: pytest.MonkeyPatch, generation_id: str
) -> None:
    async def scenario(site: Site) -> None:
        follower = site.hub.follow(generation_id)
        await site.write(generation_id, Batch(0, [b"0"], END))
        await site.hint((generation_id, b""))
        (last,) = await site.next(follower)
        assert last.ending == END

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("after", "expected"), [(-1, [b"0", b"1"]), (0, [b"1"])])
def test_who_hears_nothing_reads_the_log(
    monkeypatch: pytest.MonkeyPatch, generation_id: str, after: int, expected: list[bytes]
) -> None:
    async def scenario(site: Site) -> None:
        await site.write(generation_id, Batch(0, [b"0"]), Batch(1, [b"1"]))
        follower = site.hub.follow(generation_id, after)
        assert frames(await site.next(follower)) == expected

    on_site(monkeypatch, scenario)


def test_a_message_that_makes_no_sense_does_not_deafen_the_hub(
    monkeypatch: pytest.MonkeyPatch, generation_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(site: Site) -> None:
        follower = site.hub.follow(generation_id)
        await site.hint((generation_id, b"\xc1 no msgpack"))
        await site.hint((generation_id, Batch(0, [b"0"]).pack()))
        assert frames(await site.next(follower)) == [b"0"]
        assert "a message was dropped" in caplog.text

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("after", "code"), [(-1, "worker_lost"), (0, "stream_lost")])
def test_an_ending_that_begins_a_log_is_for_who_has_nothing_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, api_key: Key, after: int, code: str
) -> None:
    row = create_generation(api_key[0], status=Status.FAILED, finished_at=timezone.now())
    close_log(row.public_id, failure(WorkerLost()))

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id, after=after)
        await site.hint((row.public_id, b""))
        (last,) = await site.next(follower)
        assert last.ending is not None
        assert last.ending.error_code == code
        assert last.frames[-1] == b"data: [DONE]\n\n"

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
def test_a_stream_that_is_over_and_whose_log_is_gone_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, api_key: Key, status: Status
) -> None:
    row = create_generation(api_key[0], status=status, finished_at=long_ago())

    async def scenario(site: Site) -> None:
        (last,) = await site.next(site.hub.follow(row.public_id))
        assert last.ending is not None
        assert (last.ending.status, last.ending.error_code) == (503, "stream_lost")
        assert last.frames[0].startswith(b'data: {"error":')
        assert last.frames[1] == b"data: [DONE]\n\n"

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
def test_a_stream_of_a_response_that_is_lost_ends_with_the_event_of_an_error(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    over = {"status": Status.COMPLETED, "finished_at": long_ago()}
    row = create_generation(api_key[0], kind="response", **over)

    async def scenario(site: Site) -> None:
        (last,) = await site.next(site.hub.follow(row.public_id, after=6))
        event = decode(last.frames[0])
        check("error", event)
        assert (event["type"], event["sequence_number"]) == ("error", 7)
        assert event["code"] == event["error"]["code"] == "stream_lost"
        assert list(last.frames[1:]) == [DONE]
        assert last.ending is not None
        assert last.ending.status == 503

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
def test_who_reads_slower_than_a_log_is_kept_reads_on_in_what_is_stored(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    chain = Chain(api_key[0])
    ended, sent = chain.settle(chain.accept("x"), TextDelta("a"), TextDelta("b"), STOP)
    over = {"status": Status.COMPLETED, "finished_at": long_ago()}
    Generation.objects.filter(public_id=ended.public_id).update(**over)

    async def scenario(site: Site) -> None:
        for known in (0, 3, len(sent) - 1):
            (rest,) = await site.next(site.hub.follow(ended.public_id, after=known - 1))
            assert rest.first == known
            assert [decode(f) for f in rest.frames] == [decode(f) for f in sent[known:]]
            assert rest.ending is not None
            assert rest.ending.error_code == ""

    on_site(monkeypatch, scenario)
    StoredResponse.objects.update(deltas=None)

    async def of_unknown_numbers(site: Site) -> None:
        (lost,) = await site.next(site.hub.follow(ended.public_id, after=2))
        assert lost.ending is not None
        assert lost.ending.error_code == "stream_lost"

    on_site(monkeypatch, of_unknown_numbers)


@pytest.mark.django_db(transaction=True)
def test_who_comes_to_a_hole_in_the_log_of_what_is_over_reads_on_in_what_is_stored(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    chain = Chain(api_key[0])
    ended, sent = chain.settle(chain.accept("x"), TextDelta("a"), TextDelta("b"), STOP)
    Generation.objects.filter(public_id=ended.public_id).update(status=Status.COMPLETED)

    async def scenario(site: Site) -> None:
        followers = [site.hub.follow(ended.public_id) for _ in range(2)]
        await site.write(ended.public_id, Batch(0, sent[:3]), Batch(5, sent[5:], END))
        await site.hint((ended.public_id, b""))
        await site.next(followers[0])
        await site.hint((ended.public_id, b""))
        rests = [await site.next(follower) for follower in followers]
        assert [decode(f) for f in frames(rests[0])] == [decode(f) for f in sent[3:]]
        assert rests[0][-1].ending is not None
        assert frames(rests[1]) == [*sent[:3], *frames(rests[0])]

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("has_ended", [False, True])
def test_who_begins_to_read_what_is_deleted_at_that_moment_is_told_so_at_once(
    monkeypatch: pytest.MonkeyPatch, api_key: Key, *, has_ended: bool
) -> None:
    """It waited for 10 s, and then its stream was lost."""
    chain = Chain(api_key[0])
    ended, sent = chain.settle(chain.accept("x"), TextDelta("a"), STOP)

    async def scenario(site: Site) -> None:
        await site.write(ended.public_id, Batch(0, sent, END) if has_ended else Batch(0, sent[:3]))
        follower = await site.resume_and_delete(ended, has_ended=has_ended)
        await site.hub.read_on(follower)
        (last,) = await site.next(follower)
        assert last.ending is not None
        assert (last.ending.status, last.ending.is_early) == (404, True)
        check("error", decode(last.frames[0]))

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
def test_who_begins_to_read_what_is_deleted_before_its_worker_ends_the_log_is_told_so(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    """The row ends first. It was told that the stream is lost, and to try again."""
    chain = Chain(api_key[0])
    ended, sent = chain.settle(chain.accept("x"), TextDelta("a"), STOP)

    async def scenario(site: Site) -> None:
        follower = await site.resume_and_delete(ended, has_ended=False)
        await site.write(ended.public_id, Batch(2, sent[2:], END))
        await site.hub.read_on(follower)
        (last,) = await site.next(follower)
        assert last.ending is not None
        assert last.ending.status == 404
        check("error", decode(last.frames[0]))

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
def test_who_begins_to_read_between_the_end_of_a_log_and_the_deletion_is_told_so(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    """The log is deleted first, as Redis may be away."""
    chain = Chain(api_key[0])
    ended, _ = chain.settle(chain.accept("x"), TextDelta("a"), STOP)
    over = {"status": Status.COMPLETED, "finished_at": long_ago()}
    Generation.objects.filter(public_id=ended.public_id).update(**over)

    async def scenario(site: Site) -> None:
        follower = await site.resume_and_delete(ended, has_ended=False)
        (last,) = await site.next(follower)
        assert last.ending is not None
        assert last.ending.status == 404

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_who_comes_to_a_hole_while_a_stored_response_runs_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch, api_key: Key, *, ends_meanwhile: bool
) -> None:
    """Also if it ends after the hub has looked whether it has ended."""
    chain = Chain(api_key[0])
    ended, sent = chain.settle(chain.accept("x"), TextDelta("a"), TextDelta("b"), STOP)
    runs = Generation.objects.filter(public_id=ended.public_id)
    runs.update(status=Status.RUNNING, finished_at=None)
    stored = StoredResponse.objects.filter(public_id=ended.public_id)
    stored.update(status="in_progress", completed_at=None)

    def end() -> None:
        with release_connection_after(), transaction.atomic():  # As a worker does.
            stored.update(status="completed", completed_at=long_ago())
            runs.update(status=Status.COMPLETED, finished_at=long_ago())

    replay = hub_module._replay

    async def replay_and_end(*given: Any) -> None:
        await replay(*given)
        await sync_to_async(end)()

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(ended.public_id)
        await site.write(ended.public_id, Batch(0, sent[:3]), Batch(5, sent[5:]))
        await site.hint((ended.public_id, b""))
        assert frames(await site.next(follower)) == sent[:3]
        if ends_meanwhile:
            monkeypatch.setattr(hub_module, "_replay", replay_and_end)
        await site.hint((ended.public_id, b""))
        if not ends_meanwhile:
            while not follower.waits_for_end:
                await asyncio.sleep(0.01)
            assert not follower.has_ended
            await sync_to_async(end)()
        rest = await site.next(follower)
        numbers = [decode(frame).get("sequence_number") for frame in frames(rest)]
        assert numbers == [decode(frame).get("sequence_number") for frame in sent[3:]]
        assert rest[-1].ending is not None
        assert rest[-1].ending.error_code == ""

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
def test_who_misses_frames_of_an_earlier_attempt_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    chain = Chain(api_key[0])
    row = chain.accept("x")
    Generation.objects.filter(public_id=row.public_id).update(status=Status.RUNNING)

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id, after=6)
        await site.write(row.public_id, Batch(Sent().beyond().next, [b"anew"]))
        await site.hint((row.public_id, b""))
        (last,) = await site.next(follower)
        assert last.ending is not None
        assert last.ending.error_code == "stream_lost"

    on_site(monkeypatch, scenario)


def test_readers_of_one_stream_share_what_they_hold(
    monkeypatch: pytest.MonkeyPatch, generation_id: str
) -> None:
    reads = list[object]()
    read_many = AsyncEventLog.read_many

    async def counted(log: AsyncEventLog, wanted: Any) -> list[list[Batch]]:
        reads.append(wanted)
        return await read_many(log, wanted)

    monkeypatch.setattr(AsyncEventLog, "read_many", counted)

    async def scenario(site: Site) -> None:
        await site.write(generation_id, *(Batch(n, [b"%d" % n * 200_000]) for n in range(4)))
        await site.write(generation_id, Batch(4, [b"end"], END))
        readers = [site.hub.follow(generation_id) for _ in range(5)]
        await asyncio.gather(*map(site.hub.read_on, readers))
        held = [reader.take() for reader in readers]
        assert len(reads) == 1
        assert [batch.first for batch in held[0]] == [0, 1]
        assert {tuple(map(id, batches)) for batches in held} == {tuple(map(id, held[0]))}
        assert all(reader.is_behind for reader in readers)
        del held
        for reader in readers:  # One after the other has nothing to share.
            while not reader.has_ended:
                await site.hub.read_on(reader)
                reader.take()
        assert len(reads) == 1 + 2 * len(readers)

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("kind", "beginning"), [("chat.completion", b"data: {"), ("response", b"event: error\n")]
)
def test_a_log_that_has_lost_frames_ends_its_readers(
    monkeypatch: pytest.MonkeyPatch, api_key: Key, kind: str, beginning: bytes
) -> None:
    row = create_generation(api_key[0], kind=kind, status=Status.RUNNING)

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id)
        await site.write(row.public_id, Batch(5, [b"5"]))
        await site.hint((row.public_id, b""))
        (last,) = await site.next(follower)
        assert last.frames[0].startswith(beginning)
        assert last.ending is not None
        assert last.ending.error_code == "stream_lost"

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
def test_a_log_that_ends_before_what_a_reader_has_was_lost(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    row = create_generation(
        api_key[0], kind="response", status=Status.FAILED, finished_at=long_ago()
    )

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id, after=6)
        await site.write(row.public_id, Batch(0, [b"anew"], END))
        await site.hint((row.public_id, b""))
        (last,) = await site.next(follower)
        assert decode(last.frames[0])["sequence_number"] == 7
        assert last.ending is not None
        assert last.ending.error_code == "stream_lost"

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("status", [Status.RUNNING, Status.COMPLETED])
def test_a_stream_that_is_not_over_or_is_about_to_be_ended_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, api_key: Key, status: Status
) -> None:
    """The row of a generation ends before its stream does."""
    finished_at = timezone.now() if status == Status.COMPLETED else None
    row = create_generation(api_key[0], status=status, finished_at=finished_at)

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id)
        await asyncio.sleep(0.4)
        assert follower.take() == []

    on_site(monkeypatch, scenario)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
def test_an_ending_is_waited_for_while_redis_takes_no_writes(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    """A replica, or a Redis whose disk is full: the worker writes the ending when that is over."""
    row = create_generation(api_key[0], status=Status.COMPLETED, finished_at=long_ago())
    client: Any = client_for(row.public_id)
    has_looked, rows_of = asyncio.Event(), hub_module._rows_of

    async def rows(*followers: Any, **states: Any) -> dict[str, Generation]:
        has_looked.set()
        return await rows_of(*followers, **states)

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id)
        monkeypatch.setattr(hub_module, "_rows_of", rows)
        async with asyncio.timeout(60):
            await has_looked.wait()
            while follower in site.hub._in_database:
                await asyncio.sleep(0.01)
        assert follower.take() == []
        client.config_set("min-replicas-to-write", 0)
        await site.write(row.public_id, Batch(0, [b"0", b"done"], END))
        batches = await site.next(follower)
        assert frames(batches) == [b"0", b"done"]
        assert batches[-1].ending == END

    client.config_set("min-replicas-to-write", 1)
    try:
        on_site(monkeypatch, scenario)
    finally:
        client.config_set("min-replicas-to-write", 0)


@pytest.mark.usefixtures("soon")
@pytest.mark.django_db(transaction=True)
def test_an_end_that_was_heard_late_is_not_followed_by_an_error(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    row = create_generation(api_key[0], status=Status.COMPLETED, finished_at=long_ago())

    async def scenario(site: Site) -> None:
        follower = site.hub.follow(row.public_id)
        rows_of = hub_module._rows_of

        async def written_meanwhile(*followers: Any, **states: Any) -> dict[str, Generation]:
            client: Any = client_for(row.public_id)
            end = Batch(0, [b"0", b"done"], END)
            client.xadd(f"{{{row.public_id}}}:log", {b"b": end.pack()}, id=end.entry_id)
            return await rows_of(*followers, **states)

        monkeypatch.setattr(hub_module, "_rows_of", written_meanwhile)
        batches = await site.next(follower)
        assert frames(batches) == [b"0", b"done"]
        assert batches[-1].ending == END

    on_site(monkeypatch, scenario)


@pytest.mark.django_db(transaction=True)
def test_cancelling_asks_the_worker_and_takes_what_waits_out_of_the_queue(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    waiting = create_generation(api_key[0])
    running_row = create_generation(api_key[0], status=Status.RUNNING, worker="w")
    for row in (waiting, running_row):
        save_document(row.public_id, chat_document(row.public_id, "secret"), "web.one")

    async def scenario(site: Site) -> None:
        for row in (waiting, running_row):
            await site.hub.cancel(row.public_id)
            await unqueued(row.public_id)  # The queue is seen to after the workers.

    unqueued = when_unqueued(monkeypatch)
    on_site(monkeypatch, scenario)
    # Its content is not kept for a day.
    assert load_document(waiting.public_id, Assembly).document is None
    found = load_document(running_row.public_id, Assembly)
    assert found.document is not None
    assert found.is_cancelled
    states = dict(Generation.objects.values_list("public_id", "status"))
    assert states == {waiting.public_id: "cancelled", running_row.public_id: "running"}


@pytest.mark.django_db(transaction=True)
def test_all_who_leave_at_once_are_cancelled_even_when_redis_is_away_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [new_id("chatcmpl-") for _ in range(400)]
    request_cancel = AsyncEventLog.request_cancel
    attempts: list[int] = []

    async def away_at_first(log: AsyncEventLog, generation_ids: Any) -> None:
        attempts.append(len(generation_ids))
        if len(attempts) == 1:
            raise redis.exceptions.ConnectionError("away")
        await request_cancel(log, generation_ids)

    monkeypatch.setattr(AsyncEventLog, "request_cancel", away_at_first)

    async def scenario(site: Site) -> None:
        await asyncio.wait({site.hub.cancel(generation_id) for generation_id in ids}, timeout=60)

    on_site(monkeypatch, scenario)
    assert attempts == [400, 400]
    for generation_id in ids:
        assert load_document(generation_id, Assembly) == Loaded(None, True, Sent())


@pytest.mark.django_db(transaction=True)
def test_a_server_that_is_away_delays_only_the_cancels_of_its_streams(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    settings.EVENT_LOG_URLS = [*settings.EVENT_LOG_URLS[:1], away]
    ids: dict[int, str] = {}
    while len(ids) < 2:
        generation_id = new_id("chatcmpl-")
        ids[shard_of(generation_id)] = generation_id

    async def scenario(site: Site) -> None:
        unstored = site.hub.cancel(ids[1])
        await asyncio.sleep(0.1)
        await asyncio.wait_for(site.hub.cancel(ids[0]), 10)
        assert not unstored.done()

    on_site(monkeypatch, scenario)
    assert load_document(ids[0], Assembly) == Loaded(None, True, Sent())


@pytest.mark.parametrize("is_early", [True, False], ids=["before it waits", "while it waits"])
def test_an_ending_is_waited_for_by_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, generation_id: str, is_early: bool
) -> None:
    async def scenario(site: Site) -> None:
        await site.write(generation_id, Batch(0, [b"0"]))
        if is_early:
            await site.write(generation_id, Batch(1, [b"1"], END))
        waiting = asyncio.create_task(site.hub.wait_for_ending(generation_id, 30))
        if not is_early:
            await asyncio.sleep(0.2)
            await site.hint((generation_id, Batch(1, [b"1"]).pack()))
            await asyncio.sleep(0.1)
            assert not waiting.done()  # Frames are none of its business.
            client: Any = client_for(generation_id)
            assert client.smembers(f"{{{generation_id}}}:followers") == {site.hub.channel.encode()}
            await site.hint((generation_id, Batch(2, [b"2"], END).pack()))
        await asyncio.wait_for(waiting, 30)
        assert site.hub.readers(generation_id) == []

    on_site(monkeypatch, scenario)


def test_an_ending_that_does_not_come_is_waited_for_no_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch, generation_id: str
) -> None:
    async def scenario(site: Site) -> None:
        await asyncio.wait_for(site.hub.wait_for_ending(generation_id, 0.1), 60)
        assert site.hub.readers(generation_id) == []

    on_site(monkeypatch, scenario)

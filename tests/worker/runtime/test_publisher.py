"""A real publisher thread between an engine's threads, a real Redis and a real channel layer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import redis
from channels.layers import get_channel_layer
from pytest_django.fixtures import Settings

from inference_site.core.storage.redis import client_for
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Batch, Ending
from inference_site.runs.streams.event_log import (
    cancel_key,
    close_log,
    follow,
    log_key,
)
from tests.waiting import wait_until
from worker.runtime import publisher as publisher_module
from worker.runtime.publisher import Publisher, StopReason, Stream

T = TypeVar("T")
END = Ending((b"done",), 200, b"{}", finish_reason="stop")
NEVER_S = 60.0


class TidyPublisher(Publisher):
    """Closes what a failing test leaves open, for which it would wait when it stops."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: list[Stream] = []

    def open(self, generation_id: str, attempt: int = 1) -> Stream:
        self._opened.append(super().open(generation_id, attempt))
        return self._opened[-1]

    def stop(self, timeout_s: float = 5.0) -> None:
        for stream in self._opened:
            stream.close(END)
        super().stop(timeout_s)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    get_channel_layer()  # Channels makes it at the first use, twice if two threads are the first.
    running = TidyPublisher()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def rare_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only wake-ups flush."""
    monkeypatch.setattr(publisher_module, "TICK_S", NEVER_S)
    monkeypatch.setattr(publisher_module, "_LONGEST_TICK_S", NEVER_S)


class Web:
    """What a web process hears on its channel."""

    def __init__(self, channel: str) -> None:
        self.channel = channel

    async def follow(self, stream: Stream) -> None:
        follow(stream.id, self.channel)

    async def hear(self, timeout_s: float = 5.0) -> dict[str, Batch]:
        """Return the next message, by generation. Raise TimeoutError when none comes."""
        receive = get_channel_layer().receive(self.channel)
        message: dict[str, Any] = await asyncio.wait_for(receive, timeout_s)
        return {id_: Batch.unpack(payload) for id_, payload in message["streams"]}


@asynccontextmanager
async def listening() -> AsyncIterator[Web]:
    yield Web(await get_channel_layer().new_channel("web."))


def as_web(scenario: Callable[[Web], Awaitable[T]]) -> T:
    async def main() -> T:
        async with listening() as web:
            return await scenario(web)

    return asyncio.run(main())


def logged(client: redis.Redis, generation_id: str) -> list[Batch]:
    entries: Any = client.xrange(log_key(generation_id))
    return [Batch.unpack(fields[b"b"]) for _, fields in entries]


@pytest.mark.usefixtures("rare_ticks")
def test_the_first_frame_and_the_end_go_out_at_once_and_those_between_wait(
    publisher: Publisher,
) -> None:
    async def scenario(web: Web) -> None:
        stream = publisher.open(new_id("chatcmpl-"))
        await web.follow(stream)
        stream.append([b"0"])
        assert (await web.hear())[stream.id] == Batch(0, [b"0"])
        stream.append([b"1"])
        stream.append([b"2"])
        await asyncio.sleep(0.1)
        assert len(logged(client_for(stream.id), stream.id)) == 1
        stream.close(END)
        last = (await web.hear())[stream.id]
        assert (last.first, last.frames) == (1, [b"1", b"2", b"done"])
        assert last.ending == Ending((), 200, b"{}", finish_reason="stop")

    as_web(scenario)


@pytest.mark.usefixtures("rare_ticks")
def test_two_streams_share_one_message_a_tick_that_an_end_does_not_wait_for(
    publisher: Publisher,
) -> None:
    async def scenario(web: Web) -> None:
        one, two = (publisher.open(new_id("chatcmpl-")) for _ in range(2))
        for stream in (one, two):
            await web.follow(stream)
            stream.append([b"0"])
            assert (await web.hear())[stream.id].frames == [b"0"]
        one.append([b"one"])
        two.append([b"two"])
        third = publisher.open(new_id("chatcmpl-"))
        third.close(END)
        wait_until(lambda: logged(client_for(third.id), third.id))
        for stream in (one, two):
            assert len(logged(client_for(stream.id), stream.id)) == 1
        for shard in publisher._shards:
            shard._tick_at = 0.0
            shard.wake()
        message = await web.hear()
        assert {id_: batch.frames for id_, batch in message.items()} == {
            one.id: [b"one"],
            two.id: [b"two"],
        }

    as_web(scenario)


def test_a_frame_after_a_pause_does_not_wait_until_the_cancel_flag_is_read(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_POLL_S", NEVER_S)

    async def scenario(web: Web) -> None:
        stream = publisher.open(new_id("chatcmpl-"))
        await web.follow(stream)
        for frame in (b"0", b"1", b"2"):
            stream.append([frame])
            assert (await web.hear())[stream.id].frames == [frame]
            wait_until(lambda: not any(shard._ticks for shard in publisher._shards))
        stream.close(END)

    as_web(scenario)


def test_frames_arrive_in_order_with_the_ending_last(publisher: Publisher) -> None:
    async def scenario(web: Web) -> None:
        stream = publisher.open(new_id("chatcmpl-"))
        await web.follow(stream)
        for number in range(200):
            stream.append([b"%d" % number])
            if number % 10 == 0:
                await asyncio.sleep(0.005)
        stream.close(END)
        heard = [(await web.hear())[stream.id]]
        while heard[-1].ending is None:
            heard.append((await web.hear())[stream.id])
        expected = [*(b"%d" % n for n in range(200)), b"done"]
        assert [frame for batch in heard for frame in batch.frames] == expected
        assert 1 < len(heard) < 100  # In ticks: neither all at once nor one by one.
        assert logged(client_for(stream.id), stream.id) == heard

    as_web(scenario)


def test_a_cancel_request_reaches_a_stream_that_produces_nothing(publisher: Publisher) -> None:
    stream, bystander = (publisher.open(new_id("chatcmpl-")) for _ in range(2))
    client_for(stream.id).set(cancel_key(stream.id), 1, ex=60)
    wait_until(lambda: stream.cancelled, timeout_s=60)
    assert stream.stop_reason is StopReason.REQUESTED
    assert not bystander.cancelled


def test_streams_that_open_at_once_while_others_end_are_all_looked_after(
    publisher: Publisher,
) -> None:
    """Between two looks of the publisher it may have none, one or many."""

    def one_is_stopped(_number: int) -> bool:
        stream = publisher.open(new_id("chatcmpl-"))
        client_for(stream.id).set(cancel_key(stream.id), 1, ex=60)
        wait_until(lambda: stream.cancelled, timeout_s=60)
        stream.close(END)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one_is_stopped, range(100)))


def test_a_stream_that_somebody_else_ended_is_lost(publisher: Publisher) -> None:
    stream = publisher.open(new_id("chatcmpl-"))
    close_log(stream.id, Ending((b"error",), 503, b"{}", error_code="worker_lost"))
    stream.append([b"zombie"])
    wait_until(lambda: stream.cancelled)
    assert stream.stop_reason is StopReason.LOST
    (only,) = logged(client_for(stream.id), stream.id)
    assert only.frames == [b"error"]


def test_a_later_attempt_in_the_same_process_takes_the_stream_over(publisher: Publisher) -> None:
    first = publisher.open(new_id("chatcmpl-"))
    first.append([b"0"])
    log = client_for(first.id)
    wait_until(lambda: logged(log, first.id))
    second = publisher.open(first.id, 2)
    assert first.stop_reason is StopReason.LOST
    first.append([b"late"])
    first.close(END)
    second.start_at(1)
    second.append([b"1"])
    second.close(END)
    wait_until(lambda: logged(log, first.id)[-1].ending)
    assert [frame for batch in logged(log, first.id) for frame in batch.frames] == [
        *(b"0", b"1", b"done")
    ]


def test_a_shutdown_stops_every_stream(publisher: Publisher) -> None:
    streams = [publisher.open(new_id("chatcmpl-")) for _ in range(3)]
    publisher.stop_all()
    assert [stream.stop_reason for stream in streams] == [StopReason.SHUTDOWN] * 3
    assert all(stream.cancelled for stream in streams)


def test_stopping_sends_out_what_is_left() -> None:
    publisher = Publisher()
    publisher.start()
    stream = publisher.open(new_id("chatcmpl-"))
    stream.append([b"0"])
    stream.close(END)
    publisher.stop()
    frames = [f for batch in logged(client_for(stream.id), stream.id) for f in batch.frames]
    assert frames == [b"0", b"done"]


def test_a_redis_that_hangs_for_a_second_loses_and_doubles_nothing(
    own_redis: tuple[subprocess.Popen[bytes], redis.Redis], publisher: Publisher
) -> None:
    server, client = own_redis
    stream = publisher.open(new_id("chatcmpl-"))
    stream.append([b"0"])
    wait_until(lambda: logged(client, stream.id))
    server.send_signal(signal.SIGSTOP)
    hangs_until = time.monotonic() + 1.0
    expected = [b"0"]
    while time.monotonic() < hangs_until:
        expected.append(b"%d" % len(expected))
        stream.append(expected[-1:])
        time.sleep(0.01)
    server.send_signal(signal.SIGCONT)
    stream.close(END)
    wait_until(lambda: logged(client, stream.id)[-1].ending)
    written = [frame for batch in logged(client, stream.id) for frame in batch.frames]
    assert written == [*expected, b"done"]
    assert not stream.cancelled


def test_a_redis_that_is_emptied_gets_all_of_a_stream_again(
    own_redis: tuple[subprocess.Popen[bytes], redis.Redis], publisher: Publisher
) -> None:
    _, client = own_redis
    stream, other = publisher.open(new_id("chatcmpl-")), publisher.open(new_id("chatcmpl-"))
    for one in (stream, other):
        one.append([b"0", b"1"])
        wait_until(lambda: logged(client, stream.id))
    stream.append([b"2"])
    wait_until(lambda: len(logged(client, stream.id)) == 2)
    client.flushall()
    wait_until(lambda: logged(client, other.id))  # Though nothing comes of it.
    stream.append([b"3"])
    stream.close(END)
    wait_until(lambda: (logged(client, stream.id) or [Batch(0, [])])[-1].ending)
    batches = logged(client, stream.id)
    assert [frame for b in batches for frame in b.frames] == [b"0", b"1", b"2", b"3", b"done"]
    assert batches[0].first == 0
    assert not stream.cancelled


def test_a_redis_that_stays_away_past_the_limit_loses_its_streams(
    own_redis: tuple[subprocess.Popen[bytes], redis.Redis],
    publisher: Publisher,
    settings: Settings,
) -> None:
    server, _ = own_redis
    settings.EVENT_LOG_PATIENCE_S = 0
    stream = publisher.open(new_id("chatcmpl-"))
    server.kill()
    server.wait()
    stream.append([b"0"])
    wait_until(lambda: stream.cancelled)
    assert stream.stop_reason is StopReason.LOST


def test_a_stream_that_opens_while_redis_is_away_is_lost_no_sooner_than_others(
    own_redis: tuple[subprocess.Popen[bytes], redis.Redis],
    publisher: Publisher,
    settings: Settings,
) -> None:
    server, _ = own_redis
    settings.EVENT_LOG_PATIENCE_S = 1
    first = publisher.open(new_id("chatcmpl-"))
    server.kill()
    server.wait()
    wait_until(lambda: first.cancelled)
    second, opened_at = publisher.open(new_id("chatcmpl-")), time.monotonic()
    wait_until(lambda: second.cancelled)
    assert time.monotonic() - opened_at > 1

"""The relay between a client and the frames of a generation, without a server or a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.gateway import delivery, handler
from inference_site.gateway.cors import with_cors
from inference_site.gateway.handoff import Feed
from inference_site.runs.streams.batches import Batch, Ending
from tests.gateway.asgi import FakeClient, error_of
from tests.gateway.exchange import Exchange

END = Ending((), 200, b'{"whole":1}', finish_reason="stop")
ERROR = b'{"error":{"message":"gone","type":"server_error","param":null,"code":"worker_lost"}}'
FAILURE = Ending((), 503, ERROR, error_code="worker_lost", is_early=True, retry_after_s=7)
PING = b": ping\n\n"


Run = Callable[..., Exchange]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Drive a scenario to its end; a stream's frames are offered by the scenario."""

    def drive(
        scenario: Callable[[Exchange, asyncio.Task[None]], Awaitable[None]],
        *,
        stream: bool | None = True,
        client: FakeClient | None = None,
        ping: bytes = b"",
        comment: Callable[[], bytes] | None = None,
    ) -> Exchange:
        async def main() -> Exchange:
            exchange = Exchange(monkeypatch, stream)
            exchange.handler.ping, exchange.handler.comment = ping, comment
            if client is not None:
                exchange.client = client
            task = exchange.start()
            await scenario(exchange, task)
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60)
            assert exchange.hub.readers("g") == []  # Whatever happened, nobody follows.
            return exchange

        return asyncio.run(main())

    return drive


async def just_wait(_: Exchange, task: asyncio.Task[None]) -> None:
    await task


@pytest.fixture
def pinging(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Ping first after 50 ms, then every 20 ms."""
    monkeypatch.setattr(delivery, "_FIRST_PING_S", 0.05)
    settings.KEEP_ALIVE_INTERVAL = 20


@pytest.mark.parametrize("stream", [True, False])
def test_an_end_that_comes_before_the_view_is_back_is_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def scenario(exchange: Exchange, task: asyncio.Task[None]) -> None:
        follower = exchange.hub.follow("g")
        follower.offer(Batch(0, [b"data: [DONE]\n\n"], END))
        monkeypatch.setattr(exchange.hub, "follow", lambda _: follower)
        await asyncio.wait_for(task, 60)

    exchange = run(scenario, stream=stream)
    assert exchange.client.writes[0] == (b"data: [DONE]\n\n" if stream else END.body)
    assert exchange.client.is_complete


def test_every_event_is_one_write(run: Run) -> None:
    events = [b"data: %d\n\n" % n for n in range(5)]

    async def scenario(exchange: Exchange, _: asyncio.Task[None]) -> None:
        (await exchange.followed()).offer(Batch(0, events, END))

    assert run(scenario).client.writes == events


def test_a_short_keep_alive_interval_holds_for_the_first_ping_as_well(
    run: Run, settings: Settings
) -> None:
    settings.KEEP_ALIVE_INTERVAL = 10

    async def scenario(exchange: Exchange, _: asyncio.Task[None]) -> None:
        follower = await exchange.followed()
        await asyncio.sleep(0.1)
        assert exchange.client.writes
        follower.offer(Batch(0, [b"data: 0\n\n"], END))

    run(scenario)


@pytest.mark.usefixtures("pinging")
def test_a_failure_after_a_ping_is_an_event(run: Run) -> None:
    event = b"data: " + ERROR + b"\n\n"

    async def scenario(exchange: Exchange, _: asyncio.Task[None]) -> None:
        follower = await exchange.followed()
        await asyncio.sleep(0.1)
        follower.offer(Batch(0, [event, b"data: [DONE]\n\n"], FAILURE))

    client = run(scenario).client
    assert client.status == 200
    assert client.writes[-2:] == [event, b"data: [DONE]\n\n"]


@pytest.mark.usefixtures("pinging")
def test_a_ping_that_is_an_event_follows_the_comment_and_comes_between_frames(run: Run) -> None:
    ping, comment = b"event: ping\ndata: {}\n\n", b": loading position=1\n\n"

    async def written(exchange: Exchange, count: int) -> None:
        async with asyncio.timeout(60):
            while len(exchange.client.writes) < count:
                await asyncio.sleep(0.002)

    async def scenario(exchange: Exchange, _: asyncio.Task[None]) -> None:
        follower = await exchange.followed()
        await written(exchange, 2)
        follower.offer(Batch(0, [b"data: 0\n\n"]))
        await written(exchange, len(exchange.client.writes) + 4)
        follower.offer(Batch(1, [b"data: 1\n\n"], END))

    writes = run(scenario, ping=ping, comment=lambda: comment).client.writes
    first = writes.index(b"data: 0\n\n")
    assert writes[:2] == [comment, ping]
    assert set(writes[first + 1 : -1]) == {ping}
    assert writes[-1] == b"data: 1\n\n"
    writes = run(scenario, ping=ping).client.writes
    assert set(writes[: writes.index(b"data: 0\n\n")]) == {ping}


@pytest.mark.parametrize(
    "batches",
    [
        [Batch(0, [b"data: 0\n\n", b"data: error\n\n"], Ending((), 503, ERROR, error_code="x"))],
        [Batch(0, [b"data: 0\n\n"]), Batch(1, [b"data: error\n\n"], FAILURE)],
    ],
    ids=["in one batch", "in two"],
)
def test_a_failure_after_frames_is_an_event_even_when_nothing_is_sent_yet(
    run: Run, batches: list[Batch]
) -> None:
    async def scenario(exchange: Exchange, _: asyncio.Task[None]) -> None:
        follower = await exchange.followed()
        for batch in batches:
            follower.offer(batch)

    client = run(scenario).client
    assert (client.status, client.writes) == (200, [b"data: 0\n\n", b"data: error\n\n"])


def test_a_failure_without_words_is_an_event_and_the_stream_has_its_end(run: Run) -> None:
    async def scenario(exchange: Exchange, _: asyncio.Task[None]) -> None:
        follower = await exchange.followed()
        follower.offer(Batch(0, [b"data: 0\n\n"]))
        follower.offer(Batch(1, [], Ending((), 500, b"", error_code="server_error")))

    _, event, done = run(scenario).client.writes
    assert b'"type":"server_error"' in event.replace(b" ", b"")
    assert done == b"data: [DONE]\n\n"


@pytest.mark.parametrize("ending", [Ending([b'{"n":2}\n'], 409, b'{"n":2}', "", "e"), None])
@pytest.mark.parametrize("stream", [True, False])
def test_a_feed_is_sent_as_lines_or_as_the_body_of_its_ending(
    monkeypatch: pytest.MonkeyPatch, stream: bool, ending: Ending | None
) -> None:
    async def frames() -> AsyncIterator[bytes | Ending]:
        yield b'{"n":1}\n'
        if ending is not None:
            yield ending

    async def main() -> FakeClient:
        exchange = Exchange(monkeypatch, stream)
        exchange.handler.feed = Feed(frames(), stream=stream, lines=True)
        await asyncio.wait_for(exchange.start(), 60)
        return exchange.client

    client = asyncio.run(main())
    kind = "application/x-ndjson" if stream else "application/json"
    assert (client.headers["content-type"], client.is_complete) == (kind, True)
    assert client.status == (200 if stream or ending is None else ending.status)
    last = list(ending.frames) if ending else []
    body = [ending.body] if ending else []
    assert client.writes == ([b'{"n":1}\n', *last] if stream else body)


@pytest.mark.parametrize("stream", [True, False])
def test_the_feed_of_a_client_that_leaves_is_closed(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    closed: list[bool] = []

    async def frames() -> AsyncIterator[bytes | Ending]:
        try:
            yield b'{"n":1}\n'
            await asyncio.sleep(3600)
        finally:
            closed.append(True)

    async def main() -> None:
        exchange = Exchange(monkeypatch, stream)
        exchange.handler.feed = Feed(frames(), stream=stream, lines=True)
        task = exchange.start()
        await asyncio.sleep(0.05)
        exchange.client.left.set()
        await asyncio.wait_for(task, 60)

    asyncio.run(main())
    assert closed == [True]


class LeavingClient(FakeClient):
    """Leaves while the server writes to it."""

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        self.left.set()
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.mark.usefixtures("pinging")
def test_a_client_that_leaves_during_a_write_is_noticed_at_once(run: Run) -> None:
    async def scenario(exchange: Exchange, task: asyncio.Task[None]) -> None:
        (await exchange.followed()).offer(Batch(0, [b"data: 0\n\n"]))
        await asyncio.wait_for(task, 10)  # Before the next ping.

    exchange = run(scenario, client=LeavingClient())
    assert exchange.hub.cancelled == ["g"]
    assert exchange.client.writes == [b"data: 0\n\n"]  # And no ping.


def test_a_server_that_gives_up_the_request_has_the_generation_cancelled(run: Run) -> None:
    async def scenario(exchange: Exchange, task: asyncio.Task[None]) -> None:
        await exchange.followed()
        await asyncio.sleep(0.02)
        task.cancel()

    assert run(scenario).hub.cancelled == ["g"]


def test_a_client_that_leaves_before_its_body_is_complete_gets_nothing(run: Run) -> None:
    client = FakeClient(b"{")
    client.leave_before_sending_all()
    exchange = run(just_wait, stream=None, client=client)
    assert (exchange.client.messages, exchange.handler.bodies) == ([], [])


def test_no_body_is_taken_of_who_would_be_refused_a_thread(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "_MOST_WAITING", 0)
    client = FakeClient(b"{}")
    client.receive = None  # type: ignore[method-assign,assignment]  # Who asks for it fails.
    exchange = run(just_wait, client=client)
    assert (exchange.client.status, exchange.handler.bodies) == (503, [])
    assert error_of(exchange.client.writes[0])["code"] == "server_is_overloaded"


@pytest.mark.parametrize("stream", [True, None], ids=["followed", "in the background"])
def test_what_a_view_enqueues_after_its_request_was_cut_off_is_cancelled(
    run: Run, stream: bool | None
) -> None:
    async def scenario(exchange: Exchange, task: asyncio.Task[None]) -> None:
        exchange.handler.may_answer.clear()
        while not exchange.handler.bodies:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task})
        exchange.handler.may_answer.set()
        while not exchange.hub.cancelled:
            await asyncio.sleep(0.005)

    run(scenario, stream=stream)


def test_without_allowed_origins_nothing_is_said_of_them(settings: Settings) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    settings.CORS_ALLOWED_ORIGINS = []
    assert with_cors(application) is application
    settings.CORS_ALLOWED_ORIGINS = ["*"]
    assert with_cors(application) is not application

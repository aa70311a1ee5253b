"""A script's messages are those that the channel layer itself would have sent."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from channels.layers import get_channel_layer
from pytest_django.fixtures import Settings

from inference_site.core.storage.redis import new_async_clients
from inference_site.runs.queue import new_id
from inference_site.runs.streams.event_log import (
    AsyncEventLog,
    LogState,
    Write,
    channel_message,
    follow,
    script_can_send,
)


def heard(sent: list[tuple[str, bytes]], *, by_script: bool) -> tuple[Any, list[list[str]]]:
    """What follows these streams receives, and whom the writer has to tell."""

    async def main() -> tuple[Any, list[list[str]]]:
        layer: Any = get_channel_layer()
        channel = await layer.new_channel("web.")
        for id_, _payload in sent:
            await asyncio.to_thread(follow, id_, channel)
        (client,) = new_async_clients()
        async with client:
            log = AsyncEventLog(client, tells_followers=by_script)
            answers = await log.append([Write(id_, b"1-0", payload) for id_, payload in sent])
            assert {answer.state for answer in answers} == {LogState.OPEN}
            if not by_script:
                await layer.send(channel, channel_message(sent))
        message = await asyncio.wait_for(layer.receive(channel), 10)
        return message, [[c.replace(channel, "me") for c in a.followers] for a in answers]

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 31, 32, 255, 256, 65_535, 65_536, 300_000])
@pytest.mark.parametrize("count", [1, 2, 16, 70])
def test_a_message_is_what_the_channel_layer_makes_of_it(size: int, count: int) -> None:
    size = min(size, 8_000_000 // count)
    sent = [(new_id("chatcmpl-"), os.urandom(size)) for _ in range(count)]
    by_layer, told = heard(sent, by_script=False)
    assert told == [["me"]] * count
    assert by_layer["streams"] == [list(pair) for pair in sent]
    again = [(new_id("resp_"), payload) for _, payload in sent]
    by_script, told = heard(again, by_script=True)
    assert told == [[]] * count  # Nobody is told twice.
    assert by_script == {**by_layer, "streams": [list(pair) for pair in again]}


def test_what_is_not_appended_is_not_sent() -> None:
    """A look at the flag, an append that comes too late, and one stream that nobody follows."""

    async def main() -> None:
        layer: Any = get_channel_layer()
        channel = await layer.new_channel("web.")
        ended, looked_at, alone, open_ = (new_id("chatcmpl-") for _ in range(4))
        for id_ in (ended, looked_at, open_):
            await asyncio.to_thread(follow, id_, channel)
        (client,) = new_async_clients()
        async with client:
            await client.xadd(f"{{{ended}}}:log", {"b": b"end"}, id="18446744073709551615-0")
            answers = await AsyncEventLog(client, tells_followers=True).append(
                [
                    Write(ended, b"1-0", b"late"),
                    Write(looked_at, b"", b""),
                    Write(alone, b"1-0", b"for nobody"),
                    Write(open_, b"1-0", b"first"),
                    Write(open_, b"1-0", b"first"),  # Again, as after a lost reply.
                ]
            )
        states = [LogState.CLOSED, *[LogState.OPEN] * 4]
        assert [answer.state for answer in answers] == states
        message = await asyncio.wait_for(layer.receive(channel), 10)
        assert message["streams"] == [[open_, b"first"]] * 2
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(layer.receive(channel), 0.3)

    asyncio.run(main())


def test_a_script_sends_only_through_the_one_server_of_all_messages(settings: Settings) -> None:
    settings.CHANNEL_LAYER_URLS = ["redis://one"]
    assert script_can_send("redis://one")
    assert not script_can_send("redis://two")
    settings.CHANNEL_LAYER_URLS = ["redis://one", "redis://two"]
    assert not script_can_send("redis://one")

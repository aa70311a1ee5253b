"""Lanes of a WebSocket: several responses at once on one connection."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
)

from tests.e2e.scripts import ENDLESS, slow
from tests.e2e.test_responses_websocket import ENDS, Socket, open_socket
from tests.responses_api.validation import StreamCheck
from tests.served_stack import ServedStack, wait_until

LIMITS = ResponsesWebSocketLimits(
    max_lanes=40,
    max_events_per_lane=5000,
    max_events=50_000,
    max_bytes_per_lane=2**24,
    max_bytes=2**28,
)


@pytest.fixture
def socket(stack: ServedStack) -> Iterator[Socket]:
    """A connection with the key."""
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        yield Socket(connection)


def by_lane(socket: Socket, ended: int) -> dict[str | None, list[dict[str, Any]]]:
    """Return the events of each lane, read until this number of responses or requests has ended."""
    found: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
    while ended:
        event = socket.event()
        found[event.get("stream_id")].append(event)
        ended -= event["type"] in ENDS or (event["type"] == "error" and "status" in event)
    return found


def check_each(found: dict[str | None, list[dict[str, Any]]]) -> None:
    """Hold the events of each lane to the schemas, and to the order of one response."""
    for events in found.values():
        whole = StreamCheck()
        for event in events:
            whole.take({k: v for k, v in event.items() if k != "stream_id"})
        whole.end()


def test_lanes_run_at_once_and_their_events_interleave(socket: Socket) -> None:
    for lane in ({"stream_id": "a"}, {"stream_id": "b"}, {}):
        socket.send(input=slow(40), **lane)
    order: list[str | None] = []
    while order.count("end") < 3:
        event = socket.event()
        order.append("end" if event["type"] in ENDS else event.get("stream_id"))
    before_the_first_end = order[: order.index("end")]
    assert {before_the_first_end.count(lane) > 10 for lane in ("a", "b", None)} == {True}


def test_official_session_collects_each_lane(stack: ServedStack) -> None:
    async def run() -> list[str]:
        client = openai.AsyncOpenAI(api_key=stack.key, base_url=f"{stack.client().base_url}")
        async with client.responses.connect() as connection:
            session = AsyncResponsesWebSocketSession(connection, limits=LIMITS)
            async with session:
                lanes = [session.lane(name) for name in ("x-1", "y_2", "z.3")]
                asked: Any = {"type": "response.create", "model": "scripted"}
                for lane, text in zip(lanes, ("ex", "why", "zed"), strict=True):
                    asked["input"] = text
                    await lane.send(asked)
                answers = [await lane.get_final_response() for lane in lanes]
                asked["model"] = "none"
                await session.default.send(asked)
                with pytest.raises(ResponsesWebSocketError):
                    await session.default.get_final_response()
        return [answer.output_text for answer in answers]

    assert asyncio.run(run()) == ["ex", "why", "zed"]


def test_lanes_beyond_the_bound_are_refused_by_name(socket: Socket) -> None:
    for number in range(100):
        socket.send(input=f"say {number}", stream_id=f"lane-{number}")
    found = by_lane(socket, 100)
    answered = {lane: events for lane, events in found.items() if events[-1]["type"] in ENDS}
    assert set(answered) == {f"lane-{number}" for number in range(32)}
    check_each(answered)
    for lane in found.keys() - answered.keys():
        [refused] = found[lane]
        assert refused["error"]["code"] == "websocket_stream_limit_reached"
        assert refused["error"]["param"] == "stream_id"
    assert socket.respond(input="the default lane has no name")["status"] == "completed"


def test_no_more_than_sixteen_responses_of_a_socket_run(socket: Socket, stack: ServedStack) -> None:
    for number in range(20):
        socket.send(input=ENDLESS, stream_id=str(number), safety_identifier="sixteen", store=False)
    begun: set[str] = set()
    while len(begun) < 16:
        begun.add(socket.event()["stream_id"])
    [[open_]] = stack.sql(
        "SELECT count(*) FROM generations_generation"
        " WHERE end_user = 'sixteen' AND finished_at IS NULL"
    )
    assert open_ == 16
    socket.send("response.cancel")  # The sixteen that run, and of the others the next.
    found = by_lane(socket, 20)
    assert {events[-1]["response"]["status"] for events in found.values()} == {"cancelled"}


def test_cancel_of_a_lane_leaves_the_others(socket: Socket) -> None:
    socket.send(input=ENDLESS, stream_id="endless")
    socket.send(input=slow(20), stream_id="other")
    socket.send("response.cancel", stream_id="endless")
    socket.send("response.cancel", stream_id="unused")
    found = by_lane(socket, 2)
    check_each(found)
    statuses = {lane: events[-1]["response"]["status"] for lane, events in found.items()}
    assert statuses == {"endless": "cancelled", "other": "completed"}


def test_closing_ends_all_lanes(stack: ServedStack) -> None:
    marker = "closed-with-lanes"
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        socket = Socket(connection)
        for lane in "abc":
            socket.send(input=ENDLESS, stream_id=lane, safety_identifier=marker)
        while {socket.event()["stream_id"]} != {"c"}:
            pass
    rows = "SELECT DISTINCT status FROM generations_generation WHERE end_user = %s"
    wait_until(lambda: stack.sql(rows, marker) == [("cancelled",)], 120, "cancelled")


@pytest.mark.parametrize(
    "stream_id", ["", "a b", "a\n", "ä", "x" * 257, 5, True, ["a"], {"a": "b"}, "x" * 100_000]
)
def test_stream_id_that_is_none_is_refused(socket: Socket, stream_id: object) -> None:
    for type_ in ("response.create", "response.cancel", "response.steer"):
        socket.send(type_, input="x", stream_id=stream_id) if type_ == "response.create" else (
            socket.send(type_, stream_id=stream_id)
        )
        error = socket.error()
        assert error["error"]["code"] == "invalid_stream_id"
        assert error["error"]["param"] == "stream_id"
        assert "stream_id" not in error
    assert socket.respond(input="there", stream_id="x" * 256)["status"] == "completed"


def test_lanes_of_one_conversation_answer_in_turn(socket: Socket, client: openai.OpenAI) -> None:
    conversation = client.conversations.create().id
    for lane in "ab":
        socket.send(input=f"lane {lane}", conversation=conversation, stream_id=lane)
    found = by_lane(socket, 2)
    check_each(found)
    texts = [item.to_dict()["content"] for item in client.conversations.items.list(conversation)]
    assert len(texts) == 4
    socket.send(input=ENDLESS, conversation=conversation, stream_id="a")
    socket.event()
    socket.send(input="too long", conversation=conversation, stream_id="b")
    while (event := socket.event())["stream_id"] != "b":
        pass
    assert event["error"]["code"] == "conversation_locked"


def test_fork_in_another_lane_keeps_the_source(socket: Socket) -> None:
    source = {"store": False, "stream_id": "source"}
    first = socket.respond(input="one two", **source)
    builds: dict[str, Any] = {"store": False, "previous_response_id": first["id"]}
    socket.send(input="x", stream_id="fork", temperature=9, **builds)
    assert socket.error()["stream_id"] == "fork"
    fork = socket.respond(input="three", stream_id="fork", **builds)
    assert fork["usage"]["input_tokens"] == 5
    second = socket.respond(input="four", **{**source, **builds})
    assert second["usage"]["input_tokens"] == 5
    # The lane has gone on, so what it had before is kept no longer.
    socket.send(input="x", stream_id="fork", **builds)
    assert socket.error()["error"]["code"] == "previous_response_not_found"
    # A request that fails in the lane of the response before it makes that one unknown.
    builds["previous_response_id"] = second["id"]
    socket.send(input="x", temperature=9, **{**source, **builds})
    assert socket.error()["error"]["param"] == "temperature"
    socket.send(input="x", **{**source, **builds})
    assert socket.error()["error"]["code"] == "previous_response_not_found"


def test_response_without_output_is_continued(socket: Socket) -> None:
    socket.send(input="one two", instructions="left out", store=False, generate=False)
    prepared = socket.response()
    assert [event["type"].removeprefix("response.") for event in prepared] == [
        *("created", "in_progress", "completed")
    ]
    ended = prepared[-1]["response"]
    assert (ended["status"], ended["output"], ended["usage"]["total_tokens"]) == (
        "completed",
        [],
        0,
    )
    next_ = socket.respond(input="three", store=False, previous_response_id=ended["id"])
    assert next_["usage"]["input_tokens"] == 3
    assert next_["output"][0]["content"][0]["text"] == "three"


def test_reader_that_stops_gets_all_of_each_lane(stack: ServedStack) -> None:
    lanes = [f"lane-{number}" for number in range(8)]
    headers = {"Authorization": f"Bearer {stack.key}"}
    with open_socket(stack, **headers) as connection:
        socket = Socket(connection)
        for lane in lanes:
            socket.send(
                input=json.dumps([{"repeat": 3000, "steps": [{"text": "word "}]}]), stream_id=lane
            )
        wait_until(lambda: all_ended(stack, len(lanes)), 120, "answered without a reader")
        found = by_lane(socket, len(lanes))
    assert set(found) == set(lanes)
    check_each(found)
    texts = {events[-1]["response"]["output"][0]["content"][0]["text"] for events in found.values()}
    assert texts == {"word " * 3000}


def all_ended(stack: ServedStack, count: int) -> bool:
    """Whether the latest generations have ended."""
    latest = "SELECT finished_at FROM generations_generation ORDER BY id DESC LIMIT %s"
    return all(finished for (finished,) in stack.sql(latest, count))

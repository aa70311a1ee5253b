"""Responses over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.e2e.scripts import ENDLESS, call, events, script, slow, stream_raw
from tests.responses_api.validation import StreamCheck, check
from tests.served_stack import ServedStack, wait_until

ENDS = ("response.completed", "response.incomplete", "response.failed")
OF_SOCKETS = ("stream_id", "unsupported_params")
"""Fields that events have over a WebSocket alone."""


class Socket:
    """A connection; all that comes over it is held to the schemas."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, type_: str = "response.create", **fields: Any) -> None:
        """Send a message; a response is one of the scripted model unless the fields say else."""
        if type_ == "response.create":
            fields = {"model": "scripted", **fields}
        self.connection.send(json.dumps({"type": type_, **fields}))

    def event(self) -> dict[str, Any]:
        """The next event."""
        event: dict[str, Any] = json.loads(self.connection.recv(60))
        return event

    def response(self) -> list[dict[str, Any]]:
        """The events of the next response."""
        whole = StreamCheck()
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] not in ENDS:
            found.append(self.event())
            whole.take({k: v for k, v in found[-1].items() if k not in OF_SOCKETS})
        whole.end()
        return found

    def error(self) -> dict[str, Any]:
        """The error that is the next event."""
        event = self.event()
        check("a socket's error", event)
        return event

    def respond(self, **fields: Any) -> dict[str, Any]:
        """The final object of a response."""
        self.send(**fields)
        response: dict[str, Any] = self.response()[-1]["response"]
        return response


def open_socket(stack: ServedStack, path: str = "/v1/responses", **headers: str) -> Any:
    url = f"ws://127.0.0.1:{stack.port}{path}"
    return connect(url, additional_headers=headers, open_timeout=60, proxy=None)


@pytest.fixture
def socket(stack: ServedStack) -> Iterator[Socket]:
    """A connection with the key."""
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        yield Socket(connection)


def _alike(event: dict[str, Any]) -> str:
    """The event without what differs from run to run."""
    names: dict[str, str] = {}

    def strip(value: Any, key: str = "") -> Any:
        if key in ("id", "item_id", "call_id"):
            return names.setdefault(value, key)
        if key in ("created_at", "completed_at") and value is not None:
            return 0
        if isinstance(value, dict):
            return {k: strip(v, k) for k, v in value.items()}
        return [strip(entry) for entry in value] if isinstance(value, list) else value

    return json.dumps(strip(event))


def test_events_are_those_of_sse(socket: Socket, stack: ServedStack) -> None:
    given = script({"reasoning": "Hm"}, {"text": "a"}, {"text": "b"}, call("f", "{", "}"))
    tools = [{"type": "function", "name": "f"}]
    socket.send(input=given, tools=tools)
    over_socket = socket.response()
    with stack.http() as http:
        over_sse = events(stream_raw(http, input=given, tools=tools))
        stored = http.get(f"/v1/responses/{over_socket[-1]['response']['id']}").json()
    assert list(map(_alike, over_socket)) == list(map(_alike, over_sse))
    assert stored == over_socket[-1]["response"]


def test_official_client_connects(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model="scripted", input="hello there")
        seen = []
        for event in connection:
            seen.append(event)
            if event.type in ENDS:
                break
    assert seen[0].type == "response.created"
    last: Any = seen[-1]
    assert last.response.output_text == "hello there"


@pytest.mark.parametrize("lane", [{}, {"stream_id": "one"}])
def test_responses_of_a_lane_run_one_after_the_other(socket: Socket, lane: dict[str, str]) -> None:
    socket.send(input=slow(5), stream=True, **lane)
    socket.send(input="second", **lane)
    first, second = socket.response(), socket.response()
    assert {event.get("stream_id") for event in [*first, *second]} == {lane.get("stream_id")}
    assert second[-1]["response"]["output"][0]["content"][0]["text"] == "second"
    for found in (first, second):
        assert [event["sequence_number"] for event in found] == list(range(len(found)))


def test_message_cancels_what_runs(socket: Socket, stack: ServedStack) -> None:
    socket.send(input=ENDLESS)
    for _ in range(8):
        found = socket.event()
    assert found["type"] == "response.output_text.delta"
    socket.send("response.cancel")
    while found["type"] != "response.failed":
        found = socket.event()
    assert found["response"]["status"] == "cancelled"
    assert stack.row(found["response"]["id"])["status"] == "cancelled"
    assert socket.respond(input="still there")["status"] == "completed"


def test_cancel_that_comes_at_once_is_not_lost(socket: Socket) -> None:
    for _ in range(3):
        socket.send(input=ENDLESS)
        socket.send("response.cancel")
        assert socket.response()[-1]["response"]["status"] == "cancelled"


def test_cancel_without_a_response_changes_nothing(socket: Socket) -> None:
    socket.send("response.cancel")
    assert socket.respond(input="there")["status"] == "completed"


def test_closing_stops_what_runs(stack: ServedStack) -> None:
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        socket = Socket(connection)
        socket.send(input=ENDLESS)
        created = socket.event()["response"]["id"]
        for _ in range(5):
            socket.event()
    wait_until(lambda: stack.row(created)["status"] == "cancelled", 120, "cancelled")


def test_closing_at_once_leaves_nothing_running(stack: ServedStack) -> None:
    marker = "closed-at-once"
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        Socket(connection).send(input=ENDLESS, safety_identifier=marker)

    def left() -> list[Any]:
        return stack.sql(
            "SELECT status FROM generations_generation"
            " WHERE end_user = %s AND status <> 'cancelled'",
            marker,
        )

    wait_until(lambda: not left(), 120, "cancelled")


def test_history_that_is_not_stored_lives_as_long_as_the_connection(
    socket: Socket, stack: ServedStack
) -> None:
    first = socket.respond(input="one two", store=False)
    second = socket.respond(input="three", store=False, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] == 5
    third = socket.respond(input="four", store=False, previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] == 7
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        other = Socket(connection)
        other.send(input="x", previous_response_id=third["id"])
        error = other.error()
    assert error["status"] == 400
    assert error["error"]["code"] == "previous_response_not_found"
    assert error["error"]["param"] == "previous_response_id"


def test_nothing_that_is_stored_builds_on_what_is_not(socket: Socket) -> None:
    first = socket.respond(input="one two", store=False)
    socket.send(input="three", previous_response_id=first["id"])
    assert socket.error()["error"]["param"] == "store"


def test_stored_responses_are_continued_anywhere(socket: Socket, client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="one two")
    second = socket.respond(input="three", previous_response_id=first.id)
    assert second["usage"]["input_tokens"] == 5
    third = client.responses.create(
        model="scripted", input="four", previous_response_id=second["id"]
    )
    assert third.usage is not None
    assert third.usage.input_tokens == 7


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("{", None, "invalid_json"),
        ("[]", None, "invalid_json"),
        ('"text"', None, "invalid_json"),
        (b"\xff", None, "invalid_json"),
        ("[" * 5000, None, "invalid_json"),
        ("{}", "type", "invalid_value"),
        ('{"type": "response.frobnicate"}', "type", "invalid_value"),
        ('{"type": ["x"]}', "type", "invalid_value"),
        ('{"type": "response.create", "model": "scripted"}', "input", "missing_required_parameter"),
        ('{"type": "response.create", "model": "none", "input": "x"}', "model", "model_not_found"),
        (
            '{"type": "response.create", "model": "scripted", "input": "x", "temperature": 9}',
            "temperature",
            "decimal_above_max_value",
        ),
        *(
            (
                f'{{"type": "response.create", "model": "scripted", "input": "x", {field}}}',
                field.partition(":")[0].strip('"'),
                "invalid_request_error",
            )
            for field in (
                '"background": true',
                '"stream": false',
                '"stream": 1',
                '"generate": "no"',
                '"generate": false',  # It would be stored.
            )
        ),
        ('{"type": "response.cancel", "response_id": "x"}', "response_id", "unknown_parameter"),
    ],
)
def test_bad_message_is_told_and_the_connection_stays(
    socket: Socket, message: str | bytes, param: str | None, code: str
) -> None:
    socket.connection.send(message)
    error = socket.error()
    assert error["error"]["param"] == param
    assert error["error"]["code"] == code
    assert socket.respond(input="there")["status"] == "completed"


@pytest.mark.parametrize("lane", [{}, {"stream_id": "one"}])
@pytest.mark.parametrize("more", [{}, {"generate": False, "store": False}])
def test_ignored_fields_are_named_in_the_first_event(
    socket: Socket, stack: ServedStack, lane: dict[str, str], more: dict[str, Any]
) -> None:
    unknown: dict[str, Any] = {
        "frobnicate": 1,
        "text": {"odd": 1},
        "a\r\nb": 1,
        "tools": [{"type": "computer"}],
    }
    socket.send(input="x", **unknown, **lane, **more)
    first, *others = socket.response()
    named = ["frobnicate", "text.odd", "tools.computer"]
    assert first["unsupported_params"] == named
    assert {event.get("stream_id") for event in [first, *others]} == {lane.get("stream_id")}
    assert not any("unsupported_params" in event for event in others)
    with stack.http() as http:
        asked = {"model": "scripted", "input": "x", "store": False, **unknown}
        answer = http.post("/v1/responses", json=asked)
    assert answer.headers["x-unsupported-params"] == ",".join(named)
    socket.send(input="x", **lane)
    assert not any("unsupported_params" in event for event in socket.response())


def test_official_client_has_the_names_of_ignored_fields(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        event: Any = {"type": "response.create", "model": "scripted", "input": "x", "odd": 1}
        connection.send(event)
        first = connection.recv()
    assert first.to_dict().get("unsupported_params") == ["odd"]


def test_error_names_its_stream(socket: Socket) -> None:
    socket.send(stream_id="mine")
    assert socket.error()["stream_id"] == "mine"


def test_failure_is_an_error_and_a_failed_response(socket: Socket) -> None:
    socket.send(input=script({"text": "half"}, {"fail": "boom"}))
    error, failed = socket.response()[-2:]
    assert error["type"] == "error"
    assert failed["response"]["status"] == "failed"
    assert socket.respond(input="there")["status"] == "completed"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}])
def test_handshake_needs_a_key(stack: ServedStack, headers: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as caught, open_socket(stack, **headers):
        pass
    assert caught.value.response.status_code == 401


@pytest.mark.parametrize("name", ["key", "api_key", "authorization", "token", "access_token"])
def test_key_in_the_address_is_no_key(stack: ServedStack, name: str) -> None:
    path = f"/v1/responses?{name}={stack.key}"
    with pytest.raises(InvalidStatus), open_socket(stack, path):
        pass


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses/x", "/", "/v1/other"])
def test_other_paths_have_no_socket(stack: ServedStack, path: str) -> None:
    with (
        pytest.raises(InvalidStatus),
        open_socket(stack, path, Authorization=f"Bearer {stack.key}"),
    ):
        pass


def test_key_in_the_other_header_is_taken(stack: ServedStack) -> None:
    with open_socket(stack, **{"x-api-key": stack.key}) as connection:
        assert Socket(connection).respond(input="x")["status"] == "completed"

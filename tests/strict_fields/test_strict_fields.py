"""A site with ``STRICT_FIELDS``: what a request may not have is refused with its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.scripts import call, script
from tests.e2e.test_responses_websocket import Socket, open_socket
from tests.served_stack import ServedStack

SAY: dict[str, Any] = {"role": "user", "content": "hello"}
SHELL: dict[str, Any] = {"type": "function", "name": "run", "odd": 1}
HOSTILE = ["a'b", "a\r\nb: c", 'a"b', "\u202eabc", "x" * 1_000_000]


@pytest.fixture(scope="module")
def stack(routes_stack: ServedStack) -> ServedStack:
    return routes_stack


@pytest.fixture(scope="module")
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    with stack.http() as plain:
        yield plain


@pytest.fixture(scope="module")
def socket(stack: ServedStack) -> Iterator[Socket]:
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        yield Socket(connection)


RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"frobnicate": 1}, "frobnicate"),
    ({"text": {"odd": 1}}, "text.odd"),
    ({"reasoning": {"odd": 1}}, "reasoning.odd"),
    ({"tools": [{"type": "function", "name": "a"}, SHELL]}, "tools[1].odd"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [SHELL]}]}, "tools[0].tools[0].odd"),
    ({"tools": [{"type": "tool_of_tomorrow"}]}, "tools[0].tool_of_tomorrow"),
    ({"input": [SAY, {"type": "item_of_tomorrow"}]}, "input[1].item_of_tomorrow"),
    ({"input": [SAY, {"type": "compaction_trigger"}, SAY]}, "input[1].compaction_trigger"),
    ({"input": [SAY, {"type": "additional_tools", "tools": [SHELL]}]}, "input[1].tools[0].odd"),
]
"""Changes of a request for a response, and the field that is refused."""


@pytest.mark.parametrize(("change", "path"), RESPONSES)
def test_an_unknown_field_of_a_response_is_named_with_its_place(
    http: httpx.Client, change: dict[str, Any], path: str
) -> None:
    answer = http.post("/v1/responses", json={"model": "scripted", "input": "x", **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, path)
    assert (error["code"], error["message"]) == (
        "unknown_parameter",
        f"Unknown parameter: '{path}'.",
    )


@pytest.mark.parametrize("lane", [{}, {"stream_id": "one"}])
@pytest.mark.parametrize(("change", "path"), RESPONSES)
def test_an_unknown_field_of_a_message_is_an_error_event_of_its_lane(
    socket: Socket, change: dict[str, Any], path: str, lane: dict[str, str]
) -> None:
    socket.send(**{"input": "x", **change, **lane})
    event = socket.error()
    assert (event["status"], event["error"]["param"]) == (400, path)
    assert event["error"]["code"] == "unknown_parameter"
    assert event.get("stream_id") == lane.get("stream_id")
    assert socket.respond(input="there", **lane)["status"] == "completed"


def test_the_message_of_an_answer_is_taken_as_history(stack: ServedStack) -> None:
    create = stack.client().chat.completions
    asked: Any = {
        "model": "scripted",
        "messages": [{"role": "user", "content": script(call("get_weather", "{}"))}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "strict": True}}],
    }
    with create.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (create.parse(**asked).choices[0].message, streamed):
        assert message.tool_calls
        [called] = message.tool_calls
        result = {"role": "tool", "tool_call_id": called.id, "name": "get_weather", "content": "1"}
        messages: Any = [*asked["messages"], message, result, SAY]
        again = create.create(model="scripted", messages=messages)
        assert again.choices[0].message.content == "hello"


def test_an_unknown_field_of_a_file_is_named(http: httpx.Client) -> None:
    form = {"purpose": "user_data", "odd": "1"}
    answer = http.post("/v1/files", data=form, files={"file": ("a.txt", b"x")})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "odd")


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_refused_bounded_and_cleaned(
    http: httpx.Client, socket: Socket, name: str
) -> None:
    answer = http.post("/v1/responses", json={"model": "scripted", "input": "x", name: 1})
    assert answer.status_code == 400
    for type_ in ("response.create", "response.cancel"):
        socket.connection.send(
            json.dumps({"type": type_, "model": "scripted", "input": "x", name: 1})
        )
        for error in (answer.json()["error"], socket.error()["error"]):
            assert error["code"] == "unknown_parameter"
            assert len(error["message"]) < 150
            assert (error["param"] + error["message"]).isprintable()


def test_a_message_with_a_million_unknown_fields_has_one_error(socket: Socket) -> None:
    many = {f"f{number}": 1 for number in range(400_000)}
    socket.connection.send(json.dumps({"type": "response.create", "input": "x", **many}))
    error = socket.error()["error"]
    assert "more than 2048 parameters" in error["message"]
    socket.connection.send(json.dumps({"type": "response.cancel", **many}))
    assert socket.error()["error"]["param"] == "f0"
    nested = {"text": many}
    socket.connection.send(json.dumps({"type": "response.create", "input": "x", **nested}))
    assert socket.error()["error"]["param"] == "text.f0"
    assert socket.respond(input="there")["status"] == "completed"


def test_an_unknown_field_of_a_chat_is_named_with_its_place(client: openai.OpenAI) -> None:
    messages: Any = [SAY, {**SAY, "mood": "good"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=messages)
    assert (caught.value.param, caught.value.code) == ("messages[1].mood", "unknown_parameter")


@pytest.fixture(scope="module")
def client(stack: ServedStack) -> openai.OpenAI:
    return stack.client()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"messages": [SAY, {**SAY, "mood": 1}]}, "messages.1.mood"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]},
         "messages.0.content.0.odd"),
        ({"tools": [{"name": "a", "input_schema": {}, "odd": 1}]}, "tools.0.odd"),
        ({"metadata": {"odd": 1}}, "metadata.odd"),
    ],
)  # fmt: skip
def test_an_unknown_field_of_a_message_of_anthropics_is_named_with_its_place(
    stack: ServedStack, change: dict[str, Any], path: str
) -> None:
    body: Any = {"model": "scripted", "max_tokens": 9, "messages": [SAY], "extra_body": change}
    with (
        anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError) as caught,
    ):
        client.messages.create(**body)
    told: Any = caught.value.body
    assert told["error"]["message"] == f"{path}: Extra inputs are not permitted"
    assert told["error"]["details"] == {"error_code": "unknown_parameter"}

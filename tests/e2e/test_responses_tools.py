"""Tools of responses: chosen, forced, limited, answered, and chained for long."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripts import (
    CUSTOM,
    WEATHER,
    call,
    dicts,
    events,
    replay_raw,
    respond,
    script,
    stream_raw,
    types,
)

OSLO = "What is the weather in Oslo?"
PICK: Any = {
    "type": "function",
    "name": "pick",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
MCP_DEFAULTS = {"allowed_tools": None, "headers": None, "require_approval": "always"}
HOSTED: list[Any] = [{"type": "web_search"}, {**MCP_DEFAULTS, "type": "mcp", "server_label": "x"}]


def output(call_id: str, given: Any = "sunny", custom: bool = False) -> dict[str, Any]:
    """The item with the result of a call."""
    kind = "custom_tool_call_output" if custom else "function_call_output"
    return {"type": kind, "call_id": call_id, "output": given}


def test_model_calls_and_reads_the_result(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "temperature": 0}
    first = client.responses.create(input=OSLO, **asked)
    assert first.status == "completed"
    [made] = dicts(first.output)
    assert made["type"] == "function_call"
    assert json.loads(made["arguments"]) == {"city": "Oslo"}
    given: Any = [output(made["call_id"], '{"weather": "sunny", "degrees": 20}')]
    second = client.responses.create(input=given, previous_response_id=first.id, **asked)
    assert second.output_text
    # The same without the server's memory, with the items as they came.
    question: Any = {"role": "user", "content": OSLO}
    stateless = client.responses.create(input=[question, made, *given], store=False, **asked)
    assert stateless.output_text == second.output_text


def test_messages_and_tools_of_chats_are_taken_and_shown_as_items(client: openai.OpenAI) -> None:
    nested: Any = {"type": "function", "function": {k: WEATHER[k] for k in ("name", "parameters")}}
    history: Any = [
        {"role": "system", "content": [{"text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": OSLO}]},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                },
                {"id": "b", "type": "custom", "custom": {"name": "run", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "done"},
        {"role": "tool", "tool_call_id": "a", "content": [{"text": '{"weather": "sunny"}'}]},
    ]
    asked: dict[str, Any] = {"model": "demo", "input": history, "temperature": 0}
    named = {"type": "function", "function": {"name": WEATHER["name"]}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    made = client.responses.create(**asked, tools=[nested, CUSTOM], tool_choice=choice)
    assert made.output_text
    shown = dicts(made.tools)[0]
    assert (shown["type"], shown["name"], "function" in shown) == ("function", "get_weather", False)
    told = dicts(client.responses.input_items.list(made.id, order="asc").data)
    assert [item["type"] for item in told] == [
        *("message", "message", "message", "function_call", "custom_tool_call"),
        *("custom_tool_call_output", "function_call_output"),
    ]
    assert [part["type"] for item in told[:3] for part in item["content"]] == [
        *("input_text", "input_text", "output_text"),
    ]
    official: Any = [{k: v for k, v in item.items() if k != "id"} for item in told]
    again = client.responses.create(
        **{**asked, "input": official}, tools=[WEATHER, CUSTOM], tool_choice="auto", stream=True
    )
    last = list(again)[-1]
    assert last.type == "response.completed"
    streamed = client.responses.create(
        **asked, tools=[nested, CUSTOM], tool_choice=choice, stream=True
    )
    assert list(streamed)[-1].response.output_text == made.output_text


@pytest.mark.parametrize("question", [OSLO, "Hello"])
def test_log_probabilities_beside_tools(client: openai.OpenAI, question: str) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "temperature": 0}
    plain = client.responses.create(input=question, **asked)
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    made = client.responses.create(input=question, **asked)
    assert made.output_text == plain.output_text
    assert [item.type for item in made.output] == [item.type for item in plain.output]
    deltas = [
        event
        for event in client.responses.create(input=question, stream=True, **asked)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(event.delta for event in deltas) == plain.output_text
    told = "".join(entry.token for event in deltas for entry in event.logprobs)
    assert told.strip() == plain.output_text


def test_calls_are_streamed_one_after_the_other(http: httpx.Client) -> None:
    steps = [call("get_weather", '{"city":', '"Oslo"}'), call("get_weather")]
    raw = stream_raw(http, input=script(*steps), tools=[WEATHER])
    assert types(raw)[2:-1] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    first, second = events(raw)[-1]["response"]["output"]
    assert (first["arguments"], second["arguments"]) == ('{"city":"Oslo"}', "{}")
    assert first["call_id"] != second["call_id"]
    assert [e["output_index"] for e in events(raw)[2:-1]] == [0] * 5 + [1] * 4


def test_text_may_come_before_calls(client: openai.OpenAI) -> None:
    made = respond(client, {"text": "Let me see."}, call("get_weather"), tools=[WEATHER])
    assert [item.type for item in made.output] == ["message", "function_call"]
    assert made.output_text == "Let me see."


def test_custom_tool_takes_a_text(client: openai.OpenAI, http: httpx.Client) -> None:
    made = respond(client, call("run", '{"inp', 'ut": "1 +', ' 2"}'), tools=[CUSTOM])
    [item] = made.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "run", "1 + 2")
    assert "custom_tool_call_input.delta" in types(replay_raw(http, made.id))
    given: Any = [output(item.call_id, "3", custom=True), {"role": "user", "content": "x"}]
    after = client.responses.create(
        model="scripted", input=given, previous_response_id=made.id, tools=[CUSTOM]
    )
    assert after.status == "completed"


@pytest.mark.parametrize(
    "tool_choice",
    [
        {"type": "function", "name": "pick"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "pick"}],
        },
    ],
)
def test_forced_call_is_that_call(client: openai.OpenAI, tool_choice: Any) -> None:
    made = client.responses.create(
        model="demo", input=OSLO, tools=[WEATHER, PICK], tool_choice=tool_choice, temperature=0
    )
    [item] = (entry.to_dict() for entry in made.output)
    assert item["name"] == "pick"
    assert json.loads(str(item["arguments"]))["colour"] in ("red", "green")
    assert made.to_dict()["tool_choice"] == tool_choice


def test_tools_that_are_not_allowed_are_not_called(client: openai.OpenAI) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "pick"}],
    }
    made = client.responses.create(
        model="demo", input=OSLO, tools=[WEATHER, PICK], tool_choice=allowed, temperature=0
    )
    assert "get_weather" not in [item.to_dict().get("name") for item in made.output]
    none = client.responses.create(
        model="demo", input=OSLO, tools=[WEATHER], tool_choice="none", temperature=0
    )
    assert [item.type for item in none.output] == ["message"]


def test_one_call_at_most_when_they_may_not_be_parallel(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="demo",
        input="What is the weather in Oslo and in Rome?",
        tools=[WEATHER],
        parallel_tool_calls=False,
        tool_choice="required",
        temperature=0,
    )
    assert [item.type for item in made.output] == ["function_call"]
    assert made.parallel_tool_calls is False


def test_hosted_tools_are_echoed_and_named_but_not_run(http: httpx.Client) -> None:
    body = {"model": "demo", "input": OSLO, "tools": [*HOSTED, WEATHER], "temperature": 0}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-unsupported-params"] == "tools.web_search,tools.mcp"
    assert response.json()["tools"][:2] == HOSTED
    assert response.json()["output"][0]["name"] == "get_weather"


@pytest.mark.parametrize(
    ("tools", "tool_choice", "param"),
    [
        (HOSTED, {"type": "web_search"}, "tool_choice"),
        (HOSTED, "required", "tool_choice"),
        (
            [WEATHER, *HOSTED],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            "tool_choice",
        ),
        ([WEATHER], {"type": "function", "name": "other"}, "tool_choice"),
        ([], "required", "tool_choice"),
        (
            [WEATHER],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "o"}]},
            "tool_choice.tools[0]",
        ),
    ],
)
def test_choice_of_what_is_not_there_is_400(
    http: httpx.Client, tools: list[Any], tool_choice: Any, param: str
) -> None:
    body = {"model": "demo", "input": "x", "tools": tools, "tool_choice": tool_choice}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([output("call_x")], "No tool call found for function call output with call_id call_x."),
        (
            [{"type": "function_call", "call_id": "call_y", "name": "f", "arguments": "{}"}],
            "No tool output found for function call call_y.",
        ),
    ],
)
def test_calls_and_results_need_each_other(
    client: openai.OpenAI, items: list[Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input=[{"role": "user", "content": "x"}, *items])
    assert caught.value.param == "input[1]"
    error: Any = caught.value.body
    assert error["message"] == message


def test_result_may_be_a_list_of_parts(client: openai.OpenAI) -> None:
    first = respond(client, call("get_weather"), tools=[WEATHER])
    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    given: Any = [output(first.output[0].call_id, parts), {"role": "user", "content": "x"}]
    second = client.responses.create(
        model="scripted", input=given, previous_response_id=first.id, tools=[WEATHER]
    )
    items = client.responses.input_items.list(second.id, order="asc")
    kept = [item.to_dict() for item in items][-2]
    assert (kept["type"], kept["output"]) == ("function_call_output", parts)


def test_call_that_was_cut_is_not_held_against_the_next_request(client: openai.OpenAI) -> None:
    """Nobody can answer it: the chain goes on without it, also when the client sends it."""
    steps = [{"text": "a"}, call("get_weather", '{"city"', ': "Oslo"}')]
    cut = respond(client, *steps, tools=[WEATHER], max_output_tokens=2)
    assert cut.status == "incomplete"
    assert [item.to_dict()["status"] for item in cut.output] == ["completed", "incomplete"]
    for fields in (
        {"previous_response_id": cut.id, "input": "x"},
        {"input": [*(item.to_dict() for item in cut.output), {"role": "user", "content": "x"}]},
    ):
        after = client.responses.create(model="scripted", **fields)
        assert after.status == "completed"


def test_parallel_calls_may_be_answered_in_any_order(client: openai.OpenAI) -> None:
    first = respond(client, call("get_weather"), call("pick"), tools=[WEATHER, PICK])
    ids = [item.call_id for item in first.output]
    given: Any = [output(ids[1], "red"), output(ids[0])]
    second = client.responses.create(
        model="scripted", input=[*given, {"role": "user", "content": "x"}],
        previous_response_id=first.id,
    )  # fmt: skip
    assert second.status == "completed"
    with pytest.raises(openai.BadRequestError, match=f"function call {ids[0]}"):
        client.responses.create(model="scripted", input=given[:1], previous_response_id=first.id)


@pytest.mark.parametrize("length", [16, pytest.param(200, marks=pytest.mark.stress)])
def test_long_chain_of_calls_forked_at_the_tenth(client: openai.OpenAI, length: int) -> None:
    """Each turn answers the call before it and makes one; all of them stay in the history."""

    def turn(number: int, before: Any) -> Any:
        given: list[Any] = [] if before is None else [output(before.output[0].call_id, str(number))]
        given.append({"role": "user", "content": script(call("get_weather", f'{{"n":{number}}}'))})
        return client.responses.create(
            model="scripted",
            input=given,
            tools=[WEATHER],
            previous_response_id=None if before is None else before.id,
        )

    turns: list[Any] = []
    for number in range(length):
        turns.append(turn(number, turns[-1] if turns else None))
    fork = turn(999, turns[9])

    def made(of: Any) -> list[int]:
        items: Any = client.responses.input_items.list(of.id, order="asc", limit=100)
        calls = [item for item in items if item.type == "function_call"]
        results = [item for item in items if item.type == "function_call_output"]
        assert [c.call_id for c in calls] == [r.call_id for r in results]
        return [json.loads(item.arguments)["n"] for item in calls]

    assert made(turns[-1]) == list(range(length - 1))
    assert made(fork) == list(range(10))
    assert turns[-1].usage.input_tokens > turns[-2].usage.input_tokens

"""Errors of responses and chats name the place inside a field, where it is known."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

SAY: dict[str, Any] = {"role": "user", "content": "x"}
FIND: dict[str, Any] = {"type": "function", "name": "find", "parameters": {"type": "object"}}
LARGE: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": list(range(1001))}}}
BAD_PATTERN: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "("}},
}
SEARCHED: dict[str, Any] = {"type": "tool_search_call", "call_id": "s", "arguments": {}}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client"}
GRAMMAR: dict[str, Any] = {
    "type": "custom",
    "name": "write",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: " + "| " * 1001},
}


def more(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def found(*tools: Any) -> dict[str, Any]:
    return {"type": "tool_search_output", "call_id": "s", "tools": list(tools)}


def space(*tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "crm", "description": "d", "tools": list(tools)}


def calling(id_: str) -> dict[str, Any]:
    function = {"name": "find", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id_, "type": "function", "function": function}],
    }


ITEMS: list[tuple[list[Any], str]] = [
    ([SAY, more(FIND | {"name": 5})], "input[1].tools[0].name"),
    ([SAY, more(FIND, FIND | {"name": "a b"})], "input[1].tools[1].name"),
    ([SAY, more(FIND, {"type": "a robot"})], "input[1].tools[1].type"),
    ([SAY, more({"name": "x"})], "input[1].tools[0].type"),
    ([SAY, more(5)], "input[1].tools[0]"),
    ([SAY, {"type": "additional_tools"}], "input[1].tools"),
    ([SAY, more(FIND | {"parameters": 5})], "input[1].tools[0].parameters"),
    ([SAY, more(space(FIND, FIND | {"name": 5}))], "input[1].tools[0].tools[1].name"),
    ([SAY, more(space())], "input[1].tools[0].tools"),
    ([SAY, SEARCHED, found(FIND | {"name": 5})], "input[2].tools[0].name"),
    ([SAY, more(FIND, FIND | {"name": "b", "parameters": LARGE})], "input[1].tools[1].parameters"),
    ([SAY, more(space(FIND, FIND | {"name": "b", "parameters": LARGE}))],
     "input[1].tools[0].tools[1].parameters"),
    ([SAY, SEARCHED, found(FIND | {"parameters": LARGE})], "input[2].tools[0].parameters"),
    ([SAY, more(GRAMMAR)], "input[1].tools[0].format.definition"),
    ([SAY, SEARCHED, found(FIND, GRAMMAR)], "input[2].tools[1].format.definition"),
    ([SAY, more({"type": "file_search", "vector_store_ids": ["vs_none"]})],
     "input[1].tools[0].vector_store_ids[0]"),
    # The worker refuses these.
    ([SAY, more(FIND | {"parameters": {"type": "ghost"}})], "input[1].tools[0].parameters"),
    ([SAY, more(FIND, FIND | {"name": "b", "parameters": BAD_PATTERN})],
     "input[1].tools[1].parameters"),
]  # fmt: skip
"""Items of an input with bad tools, and the place that the error must name."""


@pytest.mark.parametrize("url", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize(("items", "param"), ITEMS)
def test_a_bad_tool_of_an_item_is_named_by_its_place_in_the_input(
    http: httpx.Client, url: str, items: list[Any], param: str
) -> None:
    is_of_worker = "ghost" in str(items) or "'('" in str(items)
    if url.endswith("tokens") and is_of_worker:
        pytest.skip("Nothing is generated, so no schema is compiled.")
    body = {"model": "demo", "input": items, "tools": [SEARCH]}
    if "ghost" in str(items):  # Of several tools, llama.cpp does not say which one is wrong.
        del body["tools"]
    answer = http.post(url, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_one_tool_too_many_is_named_by_its_place_in_the_input(http: httpx.Client) -> None:
    many = [FIND | {"name": f"f{number}"} for number in range(600)]
    others = [FIND | {"name": f"g{number}"} for number in range(600)]
    items = [SAY, more(space(*many)), SEARCHED, found(space(*others))]
    answer = http.post("/v1/responses", json={"model": "demo", "input": items})
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (
        "input[3].tools[0].tools[424]",
        "array_above_max_length",
    )


def test_a_bad_tool_of_an_earlier_turn_is_named_by_the_field_of_that_turn(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    tool = {"type": "file_search", "vector_store_ids": [client.vector_stores.create().id]}
    first = client.responses.create(model="scripted", input=[SAY, more(tool)])  # type: ignore[list-item]  # A plain dict.
    client.vector_stores.delete(str(tool["vector_store_ids"][0]))
    body = {"model": "scripted", "input": "x", "previous_response_id": first.id}
    error = http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "previous_response_id.tools[0].vector_store_ids[0]"


RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": [SAY, {"type": "function_call_output", "call_id": "a", "output": "x"}]},
     "input[1]"),
    ({"input": [SAY, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]},
     "input[1]"),
    ({"input": [SAY, {"type": "item_reference", "id": "msg_none"}]}, "input[1].id"),
    ({"input": [SAY, {**calling("a"), "content": "So"},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "ftp://a"}]}]},
     "input[3].content[0].image_url"),
    ({"input": [{**calling("a"), "content": "So"}, {"type": "item_reference", "id": "msg_none"}]},
     "input[1].id"),
    ({"tools": [FIND], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "find"}, {"type": "function", "name": "none"}]}},
     "tool_choice.tools[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), RESPONSES)
def test_an_error_of_a_response_names_the_place(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/responses", json={"model": "demo", "input": "x", **change})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "parameters": {}, **fields}}


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [SAY, calling("a"), {"role": "tool", "tool_call_id": "b", "content": "x"}]},
     "messages[2].tool_call_id"),
    ({"messages": [SAY, calling("a"), SAY]}, "messages[1].tool_calls"),
    ({"messages": [SAY, {"role": "tool", "tool_call_id": "b", "content": "x"}]},
     "messages[1].role"),
    ({"tools": [function(), function(name="b", parameters=LARGE)]},
     "tools[1].function.parameters"),
    ({"functions": [{"name": "a"}, {"name": "b", "parameters": LARGE}]},
     "functions[1].parameters"),
    ({"tools": [function(), {"type": "custom", "custom": {"name": "write", "format": {
        "type": "grammar",
        "grammar": {"syntax": "lark", "definition": "start: " + "| " * 1001}}}}]},
     "tools[1].custom.format.grammar.definition"),
    ({"tools": [function()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [function(), {"type": "function", "function": {"name": "no"}}]}}},
     "tool_choice.allowed_tools.tools[1]"),
    ({"tools": [function(), function(name="b", parameters=BAD_PATTERN)]},
     "tools[1].function.parameters"),
    ({"messages": [SAY, {"role": "assistant", "content": "So"}],
      "response_format": {"type": "json_object"}}, "messages[1]"),
    ({"logit_bias": {"a'b": 1}}, "logit_bias.a\\u0027b"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), CHATS)
def test_an_error_of_a_chat_names_the_place(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "demo", "messages": [SAY], **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_ids_of_calls_are_repeated_bounded(http: httpx.Client) -> None:
    calls = [calling(f"{number}\n{'x' * 1_000}")["tool_calls"][0] for number in range(1_000)]
    messages = [SAY, {"role": "assistant", "tool_calls": calls}, SAY]
    answer = http.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert len(message) < 1_500
    assert message.isprintable()

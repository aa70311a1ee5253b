"""Custom tools: tools that take one text; the calls of an answer, of a stream, of the history."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

CODE: dict[str, Any] = {
    "type": "custom",
    "custom": {"name": "run_code", "description": "Run Python code"},
}
NOTE: dict[str, Any] = {
    "type": "custom",
    "custom": {"name": "take_note", "format": {"type": "text"}},
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 5}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def lark(definition: str, syntax: str = "lark") -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def ask(client: openai.OpenAI, tools: list[Any], choice: Any, **fields: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 150, "messages": STORY, **fields}
    return client.chat.completions.create(model="demo", tools=tools, tool_choice=choice, **body)


def named(name: str, kind: str = "custom") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def allowed(mode: str, *names: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(names)}}


@pytest.mark.parametrize(
    "choice", ["required", named("run_code"), allowed("required", named("run_code"))]
)
def test_forced_call_has_a_plain_text(client: openai.OpenAI, choice: Any) -> None:
    tools = [CODE] if choice == "required" else [LOOK, NOTE, CODE]
    for seed in range(3):
        answer = ask(client, tools, choice, temperature=1.2, seed=seed).choices[0]
        [call] = answer.message.tool_calls
        assert (call.type, call.custom.name) == ("custom", "run_code")
        assert call.id
        assert answer.message.content is None
        assert not call.custom.input.startswith("{")
        assert answer.finish_reason in ("tool_calls", "length")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (lark('start: "SELECT " COLUMN " FROM " COLUMN\nCOLUMN: /[a-z]{1,8}/'),
         r"SELECT [a-z]{1,8} FROM [a-z]{1,8}"),
        (lark("[0-9]{3}-[0-9]{4}", "regex"), r"[0-9]{3}-[0-9]{4}"),
    ],
)  # fmt: skip
def test_forced_call_has_a_text_of_the_grammar(
    client: openai.OpenAI, form: Any, pattern: str
) -> None:
    tool = {"type": "custom", "custom": {"name": "query", "format": form}}
    asked: dict[str, Any] = {"temperature": 1.2, "seed": 3}
    [call] = ask(client, [LOOK, tool], named("query"), **asked).choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "query")
    assert re.fullmatch(pattern, call.custom.input)
    pieces, last = "", None
    for chunk in ask(client, [tool], "required", stream=True, **asked):
        last = chunk.choices[0]
        pieces += "".join(p.model_dump()["custom"]["input"] for p in last.delta.tool_calls or ())
    assert re.fullmatch(pattern, pieces)
    assert last is not None
    assert last.finish_reason == "tool_calls"
    flat = {"type": "custom", "name": "query", "format": {**form["grammar"], "type": "grammar"}}
    choice: Any = {"type": "custom", "name": "query"}
    body: dict[str, Any] = {"model": "demo", "input": "Hi", "tools": [flat], **asked}
    del body["seed"]
    made = client.responses.create(**body, tool_choice=choice)
    [item] = made.output
    assert re.fullmatch(pattern, item.input)
    assert made.tools[0].to_dict() == flat
    events = list(client.responses.create(**body, tool_choice="required", stream=True))
    [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert re.fullmatch(pattern, done.input)


def test_grammar_that_binds_nothing_is_named(client: openai.OpenAI) -> None:
    tool = {"type": "custom", "custom": {"name": "query", "format": lark('start: "x"')}}
    body: Any = {"model": "demo", "messages": STORY, "max_tokens": 5, "tools": [tool]}
    raw = client.chat.completions.with_raw_response.create(**body)
    assert raw.headers["x-unsupported-params"] == "tools[].format"


def test_functions_beside_custom_tools_have_arguments(client: openai.OpenAI) -> None:
    answer = ask(client, [CODE, LOOK], named("look", "function")).choices[0]
    [call] = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    assert set(json.loads(call.function.arguments)) == {"at"}


def test_tools_that_are_not_allowed_are_not_called(client: openai.OpenAI) -> None:
    choice = allowed("required", named("take_note"))
    for seed in range(3):
        answer = ask(client, [CODE, NOTE, LOOK], choice, temperature=1.5, seed=seed)
        assert answer.choices[0].message.tool_calls[0].custom.name == "take_note"


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_call_has_its_name_once_and_then_its_text(client: openai.OpenAI, n: int) -> None:
    whole = ask(client, [CODE], "required", n=n)
    texts, names, ids = [""] * n, [""] * n, [""] * n
    for chunk in ask(client, [CODE], "required", n=n, stream=True):
        [choice] = chunk.choices
        for piece in choice.delta.tool_calls or []:
            told = piece.model_dump()
            texts[choice.index] += told["custom"]["input"]
            names[choice.index] += told["custom"].get("name") or ""
            ids[choice.index] += piece.id or ""
            assert piece.index == 0
            assert (told.get("type") == "custom") == (piece.id is not None)
    assert names == ["run_code"] * n
    assert len(set(ids)) == n
    assert texts == [c.message.tool_calls[0].custom.input for c in whole.choices]


def test_calls_and_results_of_the_history_reach_the_template(http: httpx.Client) -> None:
    text = 'print("é")\n'
    calls = [{"id": "a", "type": "custom", "custom": {"name": "run_code", "input": text}}]
    messages = [
        *STORY,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "é"},
        {"role": "user", "content": "Well?"},
    ]
    body = {"model": "demo", "messages": messages, "tools": [CODE]}
    prompt = http.post("/v1/chat/render", json=body).json()["prompt"]
    line = prompt.split("<tool_call>\n")[2].split("\n</tool_call>")[0]
    assert json.loads(line) == {"name": "run_code", "arguments": {"input": text}}
    assert "<tool_response>\né\n</tool_response>" in prompt


def test_call_of_an_answer_may_be_sent_back(client: openai.OpenAI) -> None:
    message = ask(client, [CODE], "required").choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answer = ask(client, [CODE], "none", messages=[*STORY, message, result])
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([CODE], named("ghost"), "tool_choice"),
        ([CODE], allowed("auto", named("ghost")), "tool_choice.allowed_tools.tools[0]"),
        ([CODE], allowed("auto"), "tool_choice.allowed_tools.tools"),
        ([{"type": "custom", "custom": {}}], "auto", "tools[0].custom.name"),
        ([{"type": "custom", "custom": {"name": "a b"}}], "auto", "tools[0].custom.name"),
        ([{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}], "auto",
         "tools[0].custom.format.grammar"),
        ([{"type": "custom", "custom": {"name": "a", "format": lark("start: missing")}}],
         "required", "tools[0].custom.format.grammar.definition"),
        ([{"type": "custom", "custom": {"name": "a", "format": lark("x: | \n" * 2000)}}],
         "auto", "tools[0].custom.format.grammar.definition"),
        ([{"type": "ghost"}], "auto", "tools[0].type"),
    ],
)  # fmt: skip
def test_bad_tool_is_400_and_names_the_parameter(
    client: openai.OpenAI, tools: list[Any], choice: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools, choice)
    assert caught.value.param == param

"""Tools: the model chooses, or must; the calls are whole, typed, and fit their schemas."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.upstream_server import UpstreamServer, chunks, delta, finish, text

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PICK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "green"]},
                "deep": {
                    "type": "object",
                    "properties": {"text": {"type": "string", "maxLength": 5}},
                    "required": ["text"],
                },
            },
            "required": ["colour", "deep"],
            "additionalProperties": False,
        },
    },
}
OSLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    """The first choice of an answer of the demo model."""
    fields = {"temperature": 0, "max_tokens": 300, **fields}
    return client.chat.completions.create(model="demo", messages=messages, **fields).choices[0]


def test_model_that_chooses_to_call(client: openai.OpenAI) -> None:
    choice = ask(client, OSLO, tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert call.id


def test_model_that_chooses_to_talk_has_no_calls(client: openai.OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "Hello"}], tools=[WEATHER])
    assert choice.finish_reason == "stop"
    assert choice.message.content
    assert choice.message.tool_calls is None


def test_none_hides_the_tools(client: openai.OpenAI) -> None:
    choice = ask(client, OSLO, tools=[WEATHER], tool_choice="none")
    assert choice.message.tool_calls is None
    assert "<tool_call>" not in (choice.message.content or "")


@pytest.mark.parametrize(
    "tool_choice",
    [
        "required",
        {"type": "function", "function": {"name": "pick"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "pick"}}],
            },
        },
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.9])
def test_forced_call_always_comes_and_fits(
    client: openai.OpenAI, tool_choice: Any, temperature: float
) -> None:
    for seed in range(3 if temperature else 1):
        choice = ask(
            client,
            STORY,
            tools=[WEATHER, PICK],
            tool_choice=tool_choice,
            temperature=temperature,
            seed=seed,
        )
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        if tool_choice != "required":
            assert call.function.name == "pick"
        if call.function.name == "pick":
            assert arguments["colour"] in ("red", "green")
            assert len(arguments["deep"]["text"]) <= 5
        else:
            assert set(arguments) == {"city"}


def test_allowed_tools_hide_the_others(client: openai.OpenAI) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "pick"}}]}
    choice = ask(
        client,
        OSLO,
        tools=[WEATHER, PICK],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    names = [call.function.name for call in choice.message.tool_calls or []]
    assert "get_weather" not in names


@pytest.mark.parametrize("only", [None, "pick"])
def test_a_call_of_a_tool_that_is_left_out_is_dropped(
    client: openai.OpenAI, odd: UpstreamServer, only: str | None
) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": "{}"}}
    odd.answers = [chunks(text("No."), delta({"tool_calls": [call]}), finish("tool_calls"))]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": only}],
    }
    asked: Any = {"model": "odd", "tool_choice": allowed if only else "none"}
    nested: Any = [WEATHER, PICK]
    [choice] = client.chat.completions.create(**asked, messages=OSLO, tools=nested).choices
    assert (choice.message.content, choice.message.tool_calls) == ("No.", None)
    assert choice.finish_reason == "stop"
    flat: Any = [{"type": "function", **tool["function"]} for tool in nested]
    response = client.responses.create(**asked, input=OSLO, tools=flat)
    assert [item.type for item in response.output] == ["message"]


def test_tools_and_parts_of_responses_are_taken_and_stored_as_chats_have_them(
    client: openai.OpenAI,
) -> None:
    flat: Any = {"type": "function", **PICK["function"]}
    parts = [{"type": "input_text", "text": "Tell me"}, {"text": " a story."}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    named: Any = {"type": "function", "name": "pick"}
    body: dict[str, Any] = {"model": "demo", "messages": messages, "temperature": 0}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        asked: Any = {**body, "tools": [flat, WEATHER], "tool_choice": choice}
        made = client.chat.completions.create(**asked, store=True)
        assert made.choices[0].message.tool_calls[0].function.name == "pick"
        chunks = client.chat.completions.create(**asked, stream=True)
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert calls[0].function.name == "pick"
    [stored] = client.chat.completions.messages.list(made.id).data
    assert stored.to_dict()["content_parts"] == [
        {"type": "text", "text": "Tell me"},
        {"type": "text", "text": " a story."},
    ]


@pytest.mark.parametrize("asked", [{"logprobs": True, "top_logprobs": 2}, {"stop_token_ids": [5]}])
def test_log_probabilities_and_stop_tokens_beside_tools(client: openai.OpenAI, asked: Any) -> None:
    if "stop_token_ids" in asked:
        asked = {"extra_body": asked}
    for messages in (OSLO, [{"role": "user", "content": "Hello"}]):
        plain = ask(client, messages, tools=[WEATHER])
        choice = ask(client, messages, tools=[WEATHER], **asked)
        assert choice.finish_reason == plain.finish_reason
        assert choice.message.content == plain.message.content
        assert [c.function for c in choice.message.tool_calls or []] == [
            c.function for c in plain.message.tool_calls or []
        ]
        body: Any = {"model": "demo", "messages": messages, "temperature": 0, "tools": [WEATHER]}
        parts = [c.choices[0] for c in client.chat.completions.create(**body, stream=True, **asked)]
        content = "".join(part.delta.content or "" for part in parts)
        assert content == (plain.message.content or "")
        if "logprobs" in asked and content:
            told = [e for part in parts if part.logprobs for e in part.logprobs.content or []]
            assert "".join(entry.token for entry in told).strip() == content
            assert told == choice.logprobs.content
            assert all(len(entry.top_logprobs) == 2 for entry in told)


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_streamed_call_has_its_name_once_and_then_its_arguments(
    client: openai.OpenAI, tool_choice: Any
) -> None:
    question: dict[str, Any] = {"model": "demo", "messages": OSLO, "tools": [WEATHER]}
    question |= {"tool_choice": tool_choice, "temperature": 0, "stream": True}
    parts: list[Any] = [c.choices[0] for c in client.chat.completions.create(**question)]
    assert parts[0].delta.role == "assistant"
    assert all(not part.delta.content for part in parts)
    pieces = [piece for part in parts for piece in part.delta.tool_calls or []]
    assert pieces[0].id
    assert pieces[0].type == "function"
    assert pieces[0].function.name == "get_weather"
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert {piece.index for piece in pieces} == {0}
    assert len(pieces) > 3
    arguments = "".join(piece.function.arguments for piece in pieces)
    assert json.loads(arguments) == {"city": "Oslo"}
    assert parts[-1].finish_reason == "tool_calls"


def test_sdk_adds_a_streamed_call_up(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {"model": "demo", "messages": OSLO, "tools": [WEATHER]}
    with client.chat.completions.stream(**question, temperature=0) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    [call] = completion.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_call_cut_by_the_limit_is_length(client: openai.OpenAI) -> None:
    choice = ask(client, OSLO, tools=[WEATHER], tool_choice="required", max_tokens=12)
    assert choice.finish_reason == "length"


def test_result_of_a_tool_is_answered(client: openai.OpenAI) -> None:
    message = ask(client, OSLO, tools=[WEATHER]).message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 5}'}
    answer = ask(client, [*OSLO, message, result], tools=[WEATHER])
    assert "5" in answer.message.content
    assert "Oslo" in answer.message.content


def test_loop_that_runs_tools_ends_with_an_answer(client: openai.OpenAI) -> None:
    """The pattern of every agent: ask, run what is called, send the results back, ask again."""
    asked: list[str] = []

    def get_weather(city: str) -> str:
        asked.append(city)
        return '{"temperature": 5}'

    messages: list[Any] = list(OSLO)
    for _ in range(4):
        choice = ask(client, messages, tools=[WEATHER])
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        messages += [
            result(call.id, get_weather(**json.loads(call.function.arguments)))
            for call in choice.message.tool_calls
        ]
    assert asked == ["Oslo"]
    assert "5" in messages[-1].content


def turn(*calls: tuple[str, str]) -> dict[str, Any]:
    """An assistant's turn that made these calls, given by id and arguments."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id_, "type": "function",
             "function": {"name": "get_weather", "arguments": arguments}}
            for id_, arguments in calls
        ],
    }  # fmt: skip


def result(id_: str, content: Any) -> dict[str, Any]:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": id_, "content": content}


def test_results_in_any_order_are_matched_to_their_calls(client: openai.OpenAI) -> None:
    calls = turn(("a", '{"city": "Oslo"}'), ("b", '{"city": "Rome"}'))
    results = [result("a", "5 degrees"), result("b", [{"type": "text", "text": "20 degrees"}])]
    forward = ask(client, [*OSLO, calls, *results], tools=[WEATHER])
    backward = ask(client, [*OSLO, calls, *reversed(results)], tools=[WEATHER])
    assert forward.message.content == backward.message.content


@pytest.mark.parametrize("id_", ["", "same"])
def test_calls_of_one_id_have_their_results_in_order(http: httpx.Client, id_: str) -> None:
    calls = turn((id_, '{"city": "Oslo"}'), (id_, '{"city": "Rome"}'))
    named = turn(("a", '{"city": "Oslo"}'), ("b", '{"city": "Rome"}'))

    def shown(*messages: Any) -> list[int]:
        body = {"model": "demo", "messages": [*OSLO, *messages]}
        tokens: list[int] = http.post("/v1/tokenize", json=body).json()["tokens"]
        return tokens

    shared = shown(calls, result(id_, "5 degrees"), result(id_, "20 degrees"))
    assert shared == shown(named, result("a", "5 degrees"), result("b", "20 degrees"))


@pytest.mark.parametrize("arguments", ["", "not json {", "[1]"])
def test_malformed_call_in_the_history_does_not_end_the_conversation(
    client: openai.OpenAI, arguments: str
) -> None:
    history = [*OSLO, turn(("a", arguments)), result("a", "sorry")]
    choice = ask(client, [*history, {"role": "user", "content": "Hello"}], tools=[WEATHER])
    assert choice.finish_reason in ("stop", "tool_calls")


def test_call_without_arguments_is_shown_with_an_empty_object(http: httpx.Client) -> None:
    body = {"model": "demo", "messages": [*OSLO, turn(("a", "")), result("a", "sorry")]}
    prompt = http.post("/v1/chat/render", json=body).json()["prompt"]
    assert '"arguments": {}' in prompt


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        (OSLO, {"tool_choice": "required"}, "tool_choice"),
        (OSLO, {"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        (OSLO, {"tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "ghost"}}}, "tool_choice"),
        (OSLO, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools[0].function.name"),
        (OSLO, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ([*OSLO, result("a", "x")], {}, "messages[1].role"),
        ([*OSLO, turn(("a", "{}"))], {}, "messages[1].tool_calls"),
        ([*OSLO, turn(("a", "{}")), result("b", "x")], {}, "messages[2].tool_call_id"),
        ([*OSLO, {"role": "assistant", "content": None}], {}, "messages[1].content"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], {},
         "messages[0].tool_calls[0].type"),
        ([{"content": "x"}], {}, "messages[0].role"),
    ],
)  # fmt: skip
def test_bad_tools_and_messages_are_400_and_name_the_parameter(
    client: openai.OpenAI, messages: list[Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=messages, **fields)
    assert caught.value.param == param


def test_bare_string_is_one_message_of_the_user(client: openai.OpenAI) -> None:
    text: Any = "What is the capital of Japan?"
    assert "Tokyo" in ask(client, text).message.content


@pytest.mark.parametrize(
    "grammar", ['root ::= "rain" | "sun"', {"type": "regex", "value": "rain|sun"}]
)
@pytest.mark.parametrize("thinks", [False, True])
def test_grammar_binds_what_is_said_beside_tools(
    client: openai.OpenAI, grammar: Any, thinks: bool
) -> None:
    body = {"grammar": grammar, "enable_thinking": thinks}
    choice = ask(client, OSLO, tools=[WEATHER], extra_body=body)
    assert choice.message.content in ("rain", "sun")
    assert choice.message.tool_calls is None


def test_forced_call_goes_before_a_format(client: openai.OpenAI) -> None:
    choice = ask(
        client,
        OSLO,
        tools=[WEATHER],
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert choice.message.content is None
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


def test_forced_call_and_a_grammar_exclude_each_other(client: openai.OpenAI) -> None:
    grammar = {"grammar": "root ::= [a]"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, OSLO, tools=[WEATHER], tool_choice="required", extra_body=grammar)
    assert caught.value.param == "grammar"


class Street(pydantic.BaseModel):
    """A street, and those that cross it."""

    name: Literal["Main Street", "Broadway"]
    crossing: list[Street]


class Address(pydantic.BaseModel):
    """Where somebody lives."""

    home: Street
    number: Literal[1, 2, 3]
    work: Street | None


ADDRESS = openai.pydantic_function_tool(Address)
TREE: Any = {
    "type": "function",
    "function": {
        "name": "plant",
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["oak", "elm"]},
                "branches": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
                "note": True,
                "pair": {
                    "type": "array",
                    "prefixItems": [{"enum": ["a"]}, {"enum": [1]}],
                    "items": False,
                },
            },
            "required": ["kind", "branches"],
        },
    },
}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("tools", [[ADDRESS], [WEATHER, ADDRESS]], ids=["alone", "beside another"])
def test_call_of_a_schema_with_definitions_is_forced(
    client: openai.OpenAI, tools: list[Any], thinks: bool
) -> None:
    choice = ask(
        client,
        OSLO,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "Address"}},
        extra_body={"enable_thinking": thinks},
    )
    [call] = choice.message.tool_calls
    if choice.finish_reason == "tool_calls":
        Address.model_validate_json(call.function.arguments)


def test_definitions_reach_a_streamed_response(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", **ADDRESS["function"]}
    events = client.responses.create(
        model="demo",
        input="Hello",
        tools=[function],
        tool_choice="required",
        max_output_tokens=300,
        stream=True,
    )
    *_, last = events
    assert last.type in ("response.completed", "response.incomplete")
    [call] = [item for item in last.response.output if item.type == "function_call"]
    if last.type == "response.completed":
        Address.model_validate_json(call.arguments)


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_short_forms_of_schemas_are_read(client: openai.OpenAI, tool_choice: str) -> None:
    choice = ask(client, OSLO, tools=[TREE], tool_choice=tool_choice, max_tokens=60)
    assert choice.finish_reason in ("tool_calls", "stop", "length")


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_tool_without_parameters_is_called_without_arguments(
    client: openai.OpenAI, parameters: Any
) -> None:
    function = {"name": "now"} if parameters is None else {"name": "now", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    [call] = ask(client, OSLO, tools=tools, tool_choice="required").message.tool_calls
    assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "object", "properties": {"x": {"$ref": "#/$defs/Missing"}}}, {"$ref": "Missing"}],
)
def test_reference_to_nothing_is_refused_and_names_the_tools(
    client: openai.OpenAI, schema: dict[str, Any], tool_choice: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, OSLO, tools=tools, tool_choice=tool_choice)
    assert caught.value.param == "tools[0].function.parameters"
    assert "Missing" in caught.value.message


WRITTEN = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize("text", [WRITTEN, f"```json\n{WRITTEN}\n```"])
def test_a_call_that_is_written_as_the_answer_is_a_call(client: openai.OpenAI, text: str) -> None:
    steps = [{"text": text[:9]}, {"text": text[9:]}]
    asked: dict[str, Any] = {"model": "scripted", "tools": [WEATHER]}
    asked["messages"] = [{"role": "user", "content": json.dumps(steps)}]
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    tools: Any = [{"type": "function", **WEATHER["function"], "strict": False}]
    response = client.responses.create(
        model="scripted",
        input=asked["messages"],
        tools=tools,
    )
    assert [item.type for item in response.output] == ["function_call"]


@pytest.mark.parametrize(
    "text", [WRITTEN.replace("city", "town"), WRITTEN.replace("get_", "set_"), f"{WRITTEN} Or so."]
)
def test_an_answer_that_looks_like_a_call_and_fits_no_tool_is_text(
    client: openai.OpenAI, text: str
) -> None:
    messages: Any = [{"role": "user", "content": json.dumps([{"text": text}])}]
    tools: Any = [WEATHER]
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=tools)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", text)

"""``functions`` and ``function_call``: tools as they were before there were tools."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"name": "get_time"}
OSLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def ask(client: openai.OpenAI, messages: list[Any] = OSLO, **fields: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 100, "functions": [WEATHER], **fields}
    return client.chat.completions.create(model="demo", messages=messages, **body)


@pytest.mark.parametrize("fields", [{}, {"function_call": "auto"}])
def test_model_that_chooses_to_call(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    choice = ask(client, **fields).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.content is None
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Oslo"}


def test_named_function_is_called_whatever_the_model_would_say(client: openai.OpenAI) -> None:
    for seed in range(3):
        choice = ask(
            client,
            [{"role": "user", "content": "Tell me a story."}],
            functions=[CLOCK, WEATHER],
            function_call={"name": "get_weather"},
            temperature=1.5,
            seed=seed,
        ).choices[0]
        assert choice.finish_reason == "function_call"
        assert choice.message.function_call.name == "get_weather"
        assert set(json.loads(choice.message.function_call.arguments)) == {"city"}


def test_none_hides_the_functions(client: openai.OpenAI) -> None:
    choice = ask(client, function_call="none").choices[0]
    assert choice.message.function_call is None
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content


def test_answer_without_a_call_has_no_function_call(client: openai.OpenAI) -> None:
    message = ask(client, [{"role": "user", "content": "Hello"}]).choices[0].message
    assert message.content
    assert "function_call" not in message.model_dump(exclude_unset=True)


@pytest.mark.parametrize("function_call", ["auto", {"name": "get_weather"}])
def test_streamed_call_adds_up(client: openai.OpenAI, function_call: Any) -> None:
    parts = [c.choices[0] for c in ask(client, function_call=function_call, stream=True)]
    pieces = [part.delta.function_call for part in parts if part.delta.function_call]
    assert [piece.name for piece in pieces] == ["get_weather"] + [None] * (len(pieces) - 1)
    assert len(pieces) > 2
    assert json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Oslo"}
    assert all(part.delta.tool_calls is None for part in parts)
    assert parts[-1].finish_reason == "function_call"


def test_history_of_calls_and_results_reaches_the_model(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    made = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        *OSLO,
        {"role": "assistant", "content": None, "function_call": made},
        {"role": "function", "name": "get_weather", "content": '{"temperature": 5}'},
    ]
    answer = ask(client, messages).choices[0].message
    assert "5" in answer.content
    body = {"model": "demo", "messages": messages, "functions": [WEATHER]}
    prompt = http.post("/v1/chat/render", json=body).json()["prompt"]
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
    assert '"description": "Get the weather of a city"' in prompt
    assert '<tool_response>\n{"temperature": 5}\n</tool_response>' in prompt


def test_message_of_an_answer_may_be_sent_back(client: openai.OpenAI) -> None:
    message = ask(client).choices[0].message
    result = {"role": "function", "name": "get_weather", "content": '{"temperature": 5}'}
    assert "5" in ask(client, [*OSLO, message, result]).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": {"name": "ghost"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
        ({"functions": None, "function_call": "auto"}, "function_call"),
        ({"functions": []}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"tool_choice": "none"}, "functions"),
        ({"functions": None, "function_call": "auto", "tool_choice": "none"}, "function_call"),
    ],
)
def test_bad_functions_are_400_and_name_the_parameter(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param

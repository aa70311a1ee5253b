"""Real weights through the whole product answer as they do in llama.cpp's own server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from tests.served_stack import ServedStack
from worker.engines.base import load_engine

pytestmark = pytest.mark.timeout(300)  # The first test starts a whole site.

MODEL, TOKENS = "smollm2", 24
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}
PROMPTS = [
    "Explain in two sentences what a database index is.",
    "Write one line of Python that prints hello.",
    "日本の首都はどこですか。",
    "Tell me about 🐙 in one sentence.",
    'Return the JSON object {"a": 1} and nothing else.',
]


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def asked(reference: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """What llama.cpp's own server answers."""
    answer = reference.post(path, json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_chat_is_that_of_llama_cpp(
    client: openai.OpenAI, reference: httpx.Client, prompt: str
) -> None:
    fields: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": True, "top_logprobs": 2}
    ours = client.chat.completions.create(
        model=MODEL, messages=messages(prompt), **GREEDY, **fields
    )
    theirs = asked(reference, "/chat/completions", messages=messages(prompt), **fields)
    choice, their_choice = ours.choices[0], theirs["choices"][0]
    assert choice.message.content == their_choice["message"]["content"]
    assert choice.finish_reason == their_choice["finish_reason"]
    assert ours.usage is not None
    counted = (ours.usage.prompt_tokens, ours.usage.completion_tokens)
    assert counted == (theirs["usage"]["prompt_tokens"], theirs["usage"]["completion_tokens"])
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    own = {n: each.logprob for n, each in enumerate(choice.logprobs.content)}
    known = [each["logprob"] for each in their_choice["logprobs"]["content"][: len(own)]]
    assert len(own) > 0
    assert own == pytest.approx(dict(enumerate(known)), abs=1e-3)


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 40, **GREEDY}
    for prompt in ("日本の首都はどこですか。", "Repeat these: 🐙🦑🐠🐟🐬"):
        whole = client.chat.completions.create(messages=messages(prompt), **fields)
        stream = client.chat.completions.create(messages=messages(prompt), stream=True, **fields)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert not any("\ufffd" in piece for piece in pieces), "a character was cut in two"


def test_a_stop_text_ends_the_answer(client: openai.OpenAI, reference: httpx.Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "stop": ["Tokyo"]}
    question = messages("What is the capital of Japan?")
    ours = client.chat.completions.create(model=MODEL, messages=question, **GREEDY, **fields)
    theirs = asked(reference, "/chat/completions", messages=question, **fields)
    assert ours.choices[0].message.content == theirs["choices"][0]["message"]["content"]
    assert "Tokyo" not in (ours.choices[0].message.content or "Tokyo")
    assert ours.choices[0].finish_reason == "stop"


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=30)
    inhabitants: int = Field(ge=0, le=99_999_999)


class Country(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=30)
    capital: City
    neighbours: list[City] = Field(max_length=2)


def test_nested_models_of_pydantic_are_the_schema_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages("Describe Japan."),
        response_format=Country,
        max_tokens=300,
        **GREEDY,
    )
    assert isinstance(answer.choices[0].message.parsed, Country)


def test_a_forced_call_fits_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    function: Any = {"name": "get_weather", "parameters": schema}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages("What is the weather in Paris for 3 days?"),
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
        **GREEDY,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    given = json.loads(call.function.arguments)
    assert given["city"] in ("Paris", "Rome")
    assert isinstance(given["days"], int)


def test_a_prompt_that_is_too_long_is_told_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=messages("word " * 2000))
    assert refused.value.code == "context_length_exceeded"
    assert "1024" in str(refused.value) or "1,024" in str(refused.value)


def test_a_prefix_is_read_once(client: openai.OpenAI) -> None:
    history = messages("Here is a text about the sea. " * 20)
    first = client.chat.completions.create(model=MODEL, messages=history, max_tokens=4, **GREEDY)
    history += [{"role": "assistant", "content": first.choices[0].message.content}]
    history += messages("Go on.")
    again = client.chat.completions.create(model=MODEL, messages=history, max_tokens=4, **GREEDY)
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens - 8


def test_a_response_is_given_what_was_said_before(
    client: openai.OpenAI, reference: httpx.Client
) -> None:
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=20)
    question = "What is my name?"
    again = client.responses.create(
        model=MODEL,
        input=question,
        previous_response_id=first.id,
        max_output_tokens=20,
        temperature=0,
    )
    history = messages("My name is Ada.")
    history += [{"role": "assistant", "content": first.output_text}, *messages(question)]
    theirs = asked(reference, "/chat/completions", messages=history, max_tokens=20)
    assert again.output_text == theirs["choices"][0]["message"]["content"]
    assert again.usage is not None
    assert again.usage.input_tokens == theirs["usage"]["prompt_tokens"]


def test_ctransformers_writes_what_llama_cpp_writes_from_a_file_that_both_load(
    client: openai.OpenAI,
) -> None:
    """On the demo's file: SmolLM2 has a vocabulary that ctransformers reads wrongly."""
    told = {}
    for model in ("demo", "old"):
        answer = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=TOKENS, logprobs=1, **GREEDY
        )
        assert answer.usage is not None
        told[model] = answer.choices[0].text, answer.usage.completion_tokens
    assert told["old"] == told["demo"]
    assert told["old"][1] > 4


def test_ctransformers_refuses_a_vocabulary_that_it_would_read_wrongly(weights: Path) -> None:
    with pytest.raises(EngineLoadError, match="'gpt2'; the engine llama_cpp reads it"):
        load_engine(ModelSpec("smollm2", "ctransformers", weights))


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


def test_tools_stand_in_the_system_text_where_the_template_has_no_place_for_them(
    client: openai.OpenAI, stack: ServedStack
) -> None:
    called = {"id": "c1", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    talk: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **called}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with stack.http() as http:
        listed = {model["id"]: model["tools"] for model in http.get("/v1/models").json()["data"]}
        assert (listed["smollm2"], listed["demo"]) == ("prompt", "native")
        body = {"model": "smollm2", "messages": talk, "tools": [WEATHER]}
        prompt = http.post("/v1/chat/render", json=body).raise_for_status().json()["prompt"]
    system, question, call, result, begun = prompt.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nYou can call these functions")
    assert '"name": "get_weather", "description": "Get the weather of a city"' in system
    assert question == "user\nWhat is the weather in Rome?<|im_end|>\n"
    assert call == ('assistant\n{"name": "get_weather", "arguments": {"city": "Rome"}}<|im_end|>\n')
    assert result == "user\nThe result of get_weather:\nsunny<|im_end|>\n"
    assert begun == "assistant\n"
    asked = {"messages": talk[:2], "tools": [WEATHER], "tool_choice": "required", **GREEDY}
    forced: Any = client.chat.completions.create(model="smollm2", **asked)
    assert forced.usage.prompt_tokens > 100  # The model has seen them.
    [made] = forced.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Rome"}
